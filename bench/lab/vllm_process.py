"""A vLLM in a process of its own, with our workers or without, for tests and campaigns. vLLM keeps
processes, threads and settings for as long as its process lives.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
SHARED = Path("/dev/shm")
PROGRAM = "bench.lab.vllm_generate"
# A start takes 20 s on two idle cores, and a minute where vLLM compiles.
LIMIT_S = 600.0
# A cache of keys and values of 1 GiB, and threads that stay where the kernel puts them, so that
# workers find cores.
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "PASSIVE", "VLLM_NO_USAGE_STATS": "1", "VLLM_ALLOW_INSECURE_SERIALIZATION": "1", "HF_HUB_OFFLINE": "1",
}  # fmt: skip
OPTIONS: dict[str, Any] = {"max_model_len": 2048, "enforce_eager": True}


class VllmFailed(RuntimeError):
    """A vLLM that ended. The message is all that it said."""


class VllmProcess:
    """One running vLLM; `running_vllm` makes it."""

    def __init__(self, process: subprocess.Popen[str], answers: int, said: Path) -> None:
        self.process = process
        self._answers = os.fdopen(answers, encoding="utf-8")
        self._said = said
        self.start_s: float = self._answer()["start_s"]

    def generate(self, prompts: list[list[int]], **order: Any) -> dict[str, Any]:
        """Has the prompts continued greedily, with the order's fields of vllm_generate.py."""
        return self._ordered({"prompts": prompts, **order})

    def look(self) -> list[dict[str, Any]]:
        """Returns what is seen of the model at each rank."""
        ranks: list[dict[str, Any]] = self._ordered({"seen": "look"})["ranks"]
        return ranks

    def count_sums(self) -> None:
        """Has each rank count its sums over ranks from now on, which `look` then returns."""
        self._ordered({"seen": "count_sums"})

    def said(self) -> str:
        """Returns what vLLM wrote so far."""
        return self._said.read_text(encoding="utf-8", errors="replace")

    def _ordered(self, order: dict[str, Any]) -> dict[str, Any]:
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(order) + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            raise VllmFailed(self.said()) from None
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        if not select.select([self._answers], [], [], LIMIT_S)[0]:
            raise VllmFailed(f"no answer within {LIMIT_S:.0f} s\n{self.said()}")
        line = self._answers.readline()
        if not line:
            # What it says of its end comes behind the last answer.
            self.process.wait(timeout=LIMIT_S)
            raise VllmFailed(self.said())
        found: dict[str, Any] = json.loads(line)
        return found

    def close(self) -> None:
        """Ends the process in order, or else kills it."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.close()
            self.process.wait(timeout=60)
        except (subprocess.TimeoutExpired, BrokenPipeError):
            self.process.kill()
            self.process.wait(timeout=10)
        self._answers.close()


@contextmanager
def running_vllm(
    python: str | Path, model: Path, topology: str | None = None, *, environment: Mapping[str, str] | None = None,
    **options: Any,
) -> Iterator[VllmProcess]:  # fmt: skip
    """Starts vLLM by the interpreter `python`, and ends it with the block. With `topology`, the
    text of one, our workers have the experts. `environment` is added, and `options` are those of
    `vllm.LLM`. Raises VllmFailed where it does not start.
    """
    before = set(SHARED.glob("vllm_*"))
    with tempfile.TemporaryDirectory(prefix="dflash-vllm-") as folder:
        # The settings are those of `topology`, but for what may be kept on disk: a test or a record
        # that switches that off means its children too.
        kept = ("DFLASH_MOE_CACHE_PATH", "DFLASH_MOE_CACHE_PANELS")
        env = {name: value for name, value in os.environ.items() if name in kept or not name.startswith("DFLASH_MOE_")}
        env |= ENVIRONMENT | {"PYTHONPATH": str(ROOT)} | dict(environment or {})
        if topology is not None:
            path = Path(folder) / "topology.yaml"
            path.write_text(topology, encoding="utf-8")
            env["DFLASH_MOE_TOPOLOGY"] = str(path)
        said = Path(folder) / "said.txt"
        answers, out = os.pipe()
        with said.open("w", encoding="utf-8") as output:
            process = subprocess.Popen(
                [python, "-m", PROGRAM, str(out)],
                stdin=subprocess.PIPE, stdout=output, stderr=subprocess.STDOUT, env=env, cwd=folder, text=True,
                pass_fds=[out],
            )  # fmt: skip
        os.close(out)
        assert process.stdin is not None
        process.stdin.write(json.dumps({"model": str(model), **OPTIONS, **options}) + "\n")
        process.stdin.flush()
        try:
            running = VllmProcess(process, answers, said)
        except BaseException:
            process.kill()
            process.wait(timeout=10)
            raise
        try:
            yield running
        finally:
            running.close()
            # vLLM leaves the memory in which its ranks add up behind.
            for path in set(SHARED.glob("vllm_*")) - before:
                path.unlink(missing_ok=True)
