"""Named marks: what a test needs of a machine, and how to find out whether this machine has it.

A test that names hardware which is absent is skipped with the reason of the probe. `--require MARK`
turns that skip into a failure, for runs whose purpose is that hardware.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Mark:
    """A named mark. `probe` returns None where the machine has what the mark names, else the reason
    why not.
    """

    description: str
    probe: Callable[[], str | None]


def _lacks_two_cores() -> str | None:
    cores = len(os.sched_getaffinity(0))
    return None if cores >= 2 else f"needs two cores, the process may use {cores}"


def _lacks_transformers() -> str | None:
    for module in ("torch", "transformers"):
        if importlib.util.find_spec(module) is None:
            return f"needs {module}, which is not installed"
    return None


def _lacks_isa(name: str) -> str | None:
    from dflash_moe import _core

    supported = _core.supported_isas()
    return None if name in supported else f"needs {name}; this processor has {', '.join(supported)}"


def _lacks_ray() -> str | None:
    return None if importlib.util.find_spec("ray") is not None else "needs ray, which is not installed"


def _lacks_slurm() -> str | None:
    programs = ("munged", "slurmctld", "slurmd", "srun", "sbatch")
    missing = [program for program in programs if shutil.which(program) is None]
    return f"needs Slurm; there is no {', '.join(missing)}" if missing else None


MARKS: dict[str, Mark] = {
    "long": Mark("an exhaustive sweep; left to `make test-long`", lambda: None),
    "two_cores": Mark("two cores that the process may use", _lacks_two_cores),
    "transformers": Mark("torch and transformers", _lacks_transformers),
    "ray": Mark("ray, for a cluster of it on this machine", _lacks_ray),
    "slurm": Mark("Slurm's daemons and commands, for a cluster of it on this machine", _lacks_slurm),
    "avx2": Mark("a processor with AVX2", lambda: _lacks_isa("avx2")),
    "avx512": Mark("a processor with AVX-512", lambda: _lacks_isa("avx512")),
}
