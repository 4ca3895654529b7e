"""The host of the campaign of failing calls, under LD_PRELOAD of failing_calls.c:

    python -m bench.campaigns.faults.failing_host FOLDER PLACE KINDS SIZE FIRST SEED

It counts how many calls of each of the KINDS there are in PLACE, spreads SIZE of them evenly, and
has one after the other fail, kind by kind, from the FIRST-th of all on. A line of JSON for each
says how it ended: `passed` (nothing failed), `error` (typed), `recovered`, `untyped`, `wrong` bits,
`leak`, or `lasting`, where calls or workers are not well afterwards.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import logging
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from bench.campaigns.faults.leftovers import belongings, left_since
from bench.campaigns.faults.load import make_model, pids_of, start, state_of, wait_until
from dflash_moe.errors import DflashError
from dflash_moe.experts.expert_runtime import ExpertRuntime
from dflash_moe.testing.tiny import routed_batch

# What an error may be besides our own: what Python says of a system that refuses.
TYPED = (DflashError, MemoryError, OSError)
NUM_CALLS = 10
# What was disturbed is well again within this time.
WELL_S = 60.0
COUNTING = 1 << 40
BATCH = routed_batch(16, 256, 16, 4, seed=1)
SETTINGS: dict[str, Any] = {"restart_backoff_ms": (10, 50), "call_timeout_s": 20.0, "start_timeout_s": 30.0}

_library = ctypes.CDLL(None)


def main(folder: str, place: str, kinds: str, size: str, first: str, seed: str) -> None:
    """Does what the module text says."""
    logging.getLogger("dflash_moe").setLevel(logging.ERROR)
    swept = _Sweep(Path(folder), place, seed=int(seed))
    counts = swept.count(int(kinds))
    for kind, number in [divmod(one, int(size)) for one in range(int(first), int(kinds) * int(size))]:
        n = 1 + number * max(1, counts[kind] - 1) // max(1, int(size) - 1)
        sys.stdout.write(json.dumps(swept.one(kind, n)) + "\n")
        sys.stdout.flush()
    swept.close()


def _arm(kind: int, n: int) -> None:
    _library.fault_arm(ctypes.c_int(kind), ctypes.c_long(n))


def _seen(kind: int) -> int:
    _library.fault_seen.restype = ctypes.c_long
    return int(_library.fault_seen(ctypes.c_int(kind)))


class _Sweep:
    """All kinds in one place. It owns the runtime that calls and restarts are tried on."""

    def __init__(self, folder: Path, place: str, *, seed: int) -> None:
        self._spec = make_model(folder / f"model-{os.getpid()}", seed=seed)
        self._place = place
        self._token = folder / f"token-{os.getpid()}"
        with start(self._spec, **SETTINGS) as runtime:
            self._expected = np.array(runtime.experts(0, *BATCH))
        self._before = belongings()
        self._runtime: ExpertRuntime | None = None

    def count(self, kinds: int) -> list[int]:
        """Returns how many calls of each kind there are where nothing fails. In a worker nobody
        counts them: the first few hundred are those of its start.
        """
        if self._place == "worker":
            return [400 if kind in (0, 1, 6) else 12 for kind in range(kinds)]
        self._ready()
        for kind in range(kinds):
            _arm(kind, COUNTING)
        self._do()
        counts = [_seen(kind) for kind in range(kinds)]
        for kind in range(kinds):
            _arm(kind, 0)
        return counts

    def one(self, kind: int, n: int) -> dict[str, Any]:
        """Has the n-th call fail, and says how that ended."""
        self._ready()
        began = time.monotonic()
        error = ""
        if self._place == "worker":
            self._token.touch()
            os.environ |= {"DFLASH_FAIL": f"{kind}:{n}", "DFLASH_FAIL_TOKEN": str(self._token)}
        else:
            _arm(kind, n)
        try:
            verdict = self._do()
        except TYPED as caught:
            verdict, error = "error", f"{type(caught).__name__}: {caught}"
        except Exception as caught:  # noqa: BLE001 - it is what is looked for
            verdict, error = "untyped", f"{type(caught).__name__}: {caught}"
        seen = _seen(kind)
        _arm(kind, 0)
        os.environ.pop("DFLASH_FAIL", None)
        fired = not self._token.exists() if self._place == "worker" else seen >= n
        self._token.unlink(missing_ok=True)
        if verdict != "wrong":
            verdict = self._after(verdict)
        return {"n": n, "fired": int(fired), "seen": seen, "verdict": verdict, "seconds": time.monotonic() - began,
                "error": error[:300]}  # fmt: skip

    def _ready(self) -> None:
        if self._place in ("call", "restart") and self._runtime is None:
            self._runtime = start(self._spec, **SETTINGS)

    def _do(self) -> str:
        if self._runtime is None:
            with start(self._spec, **SETTINGS) as runtime:
                return self._call(runtime)
        if self._place == "restart":
            deaths = state_of(self._runtime, "w1").deaths
            os.kill(pids_of(self._runtime)["w1"], signal.SIGKILL)
            verdict = self._call(self._runtime)
            runtime = self._runtime
            is_back = wait_until(
                lambda: (now := state_of(runtime, "w1")).state == "ready" and now.deaths > deaths, WELL_S, every_s=0.02
            )
            return verdict if is_back else "lasting"
        return self._call(self._runtime)

    def _call(self, runtime: ExpertRuntime) -> str:
        for _ in range(NUM_CALLS):
            if not np.array_equal(np.asarray(runtime.experts(0, *BATCH)), self._expected):
                return "wrong"
        return "passed"

    def _after(self, verdict: str) -> str:
        """Says whether everything is well afterwards."""
        if self._runtime is None:
            left = left_since(self._before)
            return "leak" if any(left.values()) else verdict
        runtime = self._runtime

        def is_well() -> bool:
            with contextlib.suppress(*TYPED):
                is_right = self._call(runtime) == "passed"
                return is_right and all(one.state == "ready" for one in runtime.workers())
            return False

        if wait_until(is_well, WELL_S, every_s=0.05):
            return "recovered" if verdict == "error" else verdict
        self.close()
        return "lasting"

    def close(self) -> None:
        """Ends the runtime."""
        if self._runtime is not None:
            self._runtime.close()
            self._runtime = None


if __name__ == "__main__":
    main(*sys.argv[1:])
