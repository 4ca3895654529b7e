"""`bench remote` measures two sides, base and patch, over the same workers: a host process each,
which differs in its environment alone.

Every sample is a process of its own, because libraries read their environment once. Rounds
interleave the sides, each in the other order than the one before (A B, B A, A B ...), so that a
drift of the machine or the link hits both. The workers are those of somebody else: a host hands
them no environment, while one that it started itself would inherit what one side has.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dflash_moe.bench.harness import Recorder, run_rounds
from dflash_moe.bench.redaction import HOST, PATH, Redaction
from dflash_moe.bench.results import BenchResult, timing_fields
from dflash_moe.config import check_environment
from dflash_moe.errors import ConfigError, DflashError, shown
from dflash_moe.holders.launcher import ISOLATION
from dflash_moe.topology import Topology

BASE, PATCH = "base", "patch"
CASES = ("decode", "prefill")
# A process that loads a large model and measures it once ends within this time.
CHILD_S = 3600.0
# Variables that change how a host computes or talks; a row has those that are set, beside those
# that were given.
TELLING = re.compile(
    r"(DFLASH_MOE|OMP|GOMP|KMP|MKL|OPENBLAS|NUMEXPR|TORCH|PYTORCH|CUDA|HIP|ROCR|NCCL|MALLOC|GLIBC|FI)_.*|"
    r"LD_PRELOAD|LD_LIBRARY_PATH|PYTHON[A-Z]*",
    re.ASCII,
)
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)
# What a row has of the latest run of its side, as far as the case has it.
COUNTED = ("calls", "request_bytes", "reply_bytes", "floor_bytes", "prompt_tokens", "dtype", "tokens_digests", "digests")


@dataclass(frozen=True, slots=True)
class RemoteParams:
    """What is measured: `case` in `mode`, `repeat` times on each side. Numbers that are None are
    the case's own.
    """

    model: Path
    topology: Path
    case: str = "decode"
    mode: str = "auto"
    prompt_tokens: int | None = None
    new_tokens: int | None = None
    repeat: int = 6

    def command(self) -> list[str]:
        """Returns the arguments of the process that takes one sample."""
        found = ["bench", self.case, "--model", str(self.model), "--topology", str(self.topology), "--modes", self.mode]
        for flag, value in (("--prompt-tokens", self.prompt_tokens), ("--new-tokens", self.new_tokens)):
            found += [] if value is None else [flag, str(value)]
        return [*found, "--no-local", "--repeat", "1", "--json", "-"]


@dataclass(slots=True)
class Side:
    """Base or patch: a `harness.Case`. `given` are the variables that differ from this process's
    own.
    """

    name: str
    given: Mapping[str, str]
    params: RemoteParams
    redaction: Redaction | None
    rounds: int | None = None
    samples: list[float] = field(default_factory=list)
    found: dict[str, Any] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """The name of the side in reports of progress."""
        return self.name

    def environment(self) -> dict[str, str]:
        """Returns what its process is started with."""
        return {**os.environ, **self.given}

    def effective(self) -> dict[str, str]:
        """Returns the part of `environment` that a row tells."""
        own = {
            name: value for name, value in sorted(self.environment().items()) if name in self.given or TELLING.fullmatch(name)
        }
        return own if self.redaction is None else self.redaction.environment(own)

    def measure(self, *, keep: bool) -> None:
        """Runs its process once. Raises DflashError that quotes the last line of one that failed,
        or says that it took too long.
        """
        command = [sys.executable, *ISOLATION, "-m", "dflash_moe", *self.params.command()]
        try:
            done = subprocess.run(
                command, env=self.environment(), stdin=subprocess.DEVNULL, capture_output=True, timeout=CHILD_S, check=False
            )
        except subprocess.TimeoutExpired:
            raise DflashError(f"side {self.name}: bench {self.params.case} has not ended within {CHILD_S:g} s") from None
        if done.returncode:
            said = done.stderr.decode(errors="replace").strip().splitlines() or ["it said nothing"]
            text = f"side {self.name}: bench {self.params.case} ended with code {done.returncode}: {said[-1]}"
            raise DflashError(text if self.redaction is None else self.redaction.text(text))
        row = _only_row(done.stdout, self.name)
        self.found = {key: row[key] for key in COUNTED if key in row}
        if keep:
            self.samples.append(float(row["median_s"]))

    def row(self) -> dict[str, Any] | None:
        """Returns its row; `samples_s` are the medians of its processes."""
        if not self.samples:
            return None
        return {"name": self.name, "environment": self.effective(), **timing_fields(self.samples), **self.found}

    def planned(self) -> dict[str, Any]:
        """Returns the row of a run that is not made."""
        return {"name": self.name, "environment": self.effective(), "samples_s": []}


def read_variables(given: Sequence[str], flag: str) -> dict[str, str]:
    """Returns K=V pairs as a mapping. Raises ConfigError naming the flag."""
    found: dict[str, str] = {}
    for pair in given:
        name, is_pair, value = pair.partition("=")
        if not is_pair or not _NAME.fullmatch(name) or "\0" in value:
            raise ConfigError(f"{flag} {shown(pair)}: expected NAME=VALUE, where NAME is of letters, digits and _")
        if name in found:
            raise ConfigError(f"{flag} {name}: it is given twice; give one value")
        found[name] = value
    return found


def make_sides(
    params: RemoteParams, both: Mapping[str, str], base: Mapping[str, str], patch: Mapping[str, str], *, is_redacted: bool
) -> tuple[Side, Side]:
    """Returns base and patch; what is given for one side wins over `both`. Raises ConfigError for a
    variable that is no setting, for sides that are equal, and for a worker that the host would
    start.
    """
    topology = Topology.load(params.topology)
    started = [worker.name for worker in topology.local_workers() if worker.parsed_address.kind != "loopback"]
    if started:
        raise ConfigError(
            f"worker {started[0]} of {params.topology} is started by the host, and would inherit the environment of a side; "
            "start it by hand (`dflash-moe worker --listen`) and write its address into the topology"
        )
    redaction = _redaction(params, topology) if is_redacted else None
    sides = [Side(name, {**both, **own}, params, redaction) for name, own in ((BASE, base), (PATCH, patch))]
    for side in sides:
        check_environment(side.environment())
    if sides[0].environment() == sides[1].environment():
        raise ConfigError("base and patch have the same environment; tell them apart with --patch-env or --base-env")
    return sides[0], sides[1]


def run_remote(params: RemoteParams, sides: tuple[Side, Side], *, recorder: Recorder, is_dry: bool = False) -> BenchResult:
    """Measures both sides, or says with `is_dry` what would be measured, without starting a
    process.
    """
    redaction = sides[0].redaction
    described = {
        "case": params.case, "mode": params.mode, "model": params.model.name, "topology": str(params.topology),
        "repeat": params.repeat, "is_dry": is_dry, "command": params.command(),
    }  # fmt: skip
    result = recorder.begin("remote", described if redaction is None else redaction.all_of(described))
    with recorder.recording():
        if is_dry:
            result.rows = [side.planned() for side in sides]
        else:
            run_rounds(recorder, sides, rounds=params.repeat)
    return result


def _only_row(output: bytes, side: str) -> Mapping[str, Any]:
    try:
        row: Mapping[str, Any] = json.loads(output)["rows"][0]
        if not float(row["median_s"]) > 0:
            raise ValueError("no time")
    except (ValueError, LookupError, TypeError) as error:
        text = f"side {side}: its process printed no result ({shown(error)}); run its command by hand"
        raise DflashError(text) from None
    return row


def _redaction(params: RemoteParams, topology: Topology) -> Redaction:
    known = {str(params.model): PATH, str(params.topology): PATH}
    for worker in topology.workers:
        address = worker.parsed_address
        known |= {text: stand_in for text, stand_in in ((address.host, HOST), (address.path, PATH)) if text}
    return Redaction(known)
