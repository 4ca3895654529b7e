"""What only measures stays out of what runs: the core and the plug-ins carry nothing of `_measure`.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import ctypes
import subprocess
import sys
from pathlib import Path

import pytest

from dflash_moe import _core, _measure

PACKAGE = Path(_core.__file__).parent
PLUGINS = sorted(PACKAGE.glob("libdflash_*.so"))
MEASURING = [path for path in PLUGINS if path.stem.endswith("_measure")]
RUNNING = [path for path in PLUGINS if path not in MEASURING]
# The C++ room's name as symbols and type names spell it, its kernel, and all that Python calls.
MARKS = ["7measure", "ring_bells", *(name for name in dir(_measure) if not name.startswith("__"))]


@pytest.mark.parametrize("library", [Path(_core.__file__), *RUNNING], ids=lambda path: path.name)
def test_library_that_runs_has_no_measuring_symbol(library: Path) -> None:
    content = library.read_bytes()
    assert [mark for mark in MARKS if mark.encode() in content] == []


def test_measuring_libraries_have_the_symbols_that_are_looked_for() -> None:
    """A mark that no library has would make the test above empty."""
    content = Path(_measure.__file__).read_bytes() + b"".join(path.read_bytes() for path in MEASURING)
    assert [mark for mark in MARKS if mark.encode() not in content] == []


def test_measuring_plugin_is_apart_from_the_one_that_computes() -> None:
    def exported(library: str) -> set[str]:
        loaded = ctypes.CDLL(str(PACKAGE / library))
        return {name for name in ("dflash_backend", "dflash_host_device", "dflash_bells") if hasattr(loaded, name)}

    assert exported("libdflash_sim.so") == {"dflash_backend", "dflash_host_device"}
    assert exported("libdflash_sim_measure.so") == {"dflash_bells"}


def test_package_runs_without_the_measuring_extension() -> None:
    """`dflash_moe`, its command line and what the demo measures with import without extensions."""
    script = (
        "import sys; sys.modules.update({f'dflash_moe.{name}': None for name in ('_measure', '_simulation')})\n"
        "import dflash_moe.experts.expert_runtime, dflash_moe.workers.process, dflash_moe.cli.main, dflash_moe.bench.prefill\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)


@pytest.mark.parametrize(("extension", "command"), [("_measure", "bench ipc"), ("_simulation", "simulate --seeds 1")])
def test_command_that_needs_an_extension_which_is_not_built_says_what_builds_it(extension: str, command: str) -> None:
    script = (
        f"import sys; sys.modules['dflash_moe.{extension}'] = None\n"
        f"from dflash_moe.cli.main import run; sys.exit(run({command.split()}))"
    )
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 2, ended.stderr
    assert f"(dflash_moe.{extension}) is not built yet; `make` builds it" in ended.stderr.splitlines()[-1]
