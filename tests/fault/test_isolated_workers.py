"""A worker runs the host's own package and interpreter, and nothing that lies in the folder the
host was called in, which may be that of a downloaded model.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import dflash_moe
from dflash_moe.experts.expert_runtime import ExpertRuntime
from dflash_moe.holders import launcher
from dflash_moe.model.spec import ModelSpec
from dflash_moe.topology import Topology
from tests.expert_cases import call, expected_of

TRAPS = ("msgpack.py", "numpy.py", "socket.py", "logging.py", "sitecustomize.py", "usercustomize.py", "session.py",
         "dflash_moe/__init__.py", "startup.py")  # fmt: skip
SITE = f"lib/python{sys.version_info.major}.{sys.version_info.minor}/site-packages"


@pytest.fixture
def trapped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder whose modules leave a file when they are imported; the current one from now on."""
    folder = tmp_path / "downloaded"
    for base in (folder, folder / "lib", folder / SITE):
        for name in TRAPS:
            trap = base / name
            trap.parent.mkdir(parents=True, exist_ok=True)
            trap.write_text(f"import os\nos.close(os.open({str(tmp_path / 'executed')!r}, os.O_CREAT))\n")
    monkeypatch.chdir(folder)
    return tmp_path / "executed"


def check_a_call(spec: ModelSpec) -> None:
    with ExpertRuntime.start(Topology.local(), model=spec) as runtime:
        assert np.array_equal(call(runtime), expected_of(runtime))


@pytest.mark.parametrize(
    "variables",
    [
        {},
        {"PYTHONPATH": ""},
        {"PYTHONPATH": os.pathsep},
        {"PYTHONPATH": f"{os.pathsep}lib"},
        {"PYTHONPATH": f"/nowhere{os.pathsep}"},
        {"PYTHONPATH": "."},
        {"PYTHONPATH": "lib"},
        {"PYTHONUSERBASE": "."},
        {"PYTHONSTARTUP": "startup.py", "PYTHONINSPECT": "1"},
    ],
    ids=str,
)
def test_nothing_of_the_callers_folder_is_executed(
    spec: ModelSpec, trapped: Path, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    check_a_call(spec)
    assert not trapped.exists()


@pytest.mark.usefixtures("trapped")
def test_interpreters_without_the_option_are_isolated_too(
    spec: ModelSpec, trapped: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launcher, "ISOLATION", ())  # what Python 3.10 is started with
    monkeypatch.setenv("PYTHONPATH", os.pathsep)
    check_a_call(spec)
    assert not trapped.exists()


def test_folders_named_absolutely_stay_on_the_path() -> None:
    kept = launcher.isolated_environment({"PYTHONPATH": "lib:/opt/lib::/opt/more:.", "PYTHONHOME": ".", "LANG": "C"})
    assert kept == {"PYTHONPATH": "/opt/lib:/opt/more", "LANG": "C"}


HOST = """
import sys
from pathlib import Path
from dflash_moe.experts.expert_runtime import ExpertRuntime
from dflash_moe.topology import Topology
from tests.expert_cases import tiny_spec

with ExpertRuntime.start(Topology.local(), model=tiny_spec(Path(sys.argv[1]))):
    pass
"""


def test_a_worker_of_a_package_that_is_not_installed_runs_that_one(spec: ModelSpec, tmp_path: Path) -> None:
    copy = tmp_path / "elsewhere" / "dflash_moe"
    for source in Path(dflash_moe.__file__).parent.rglob("*"):
        if source.is_file() and source.suffix in (".py", ".so"):
            linked = copy / source.relative_to(Path(dflash_moe.__file__).parent)
            linked.parent.mkdir(parents=True, exist_ok=True)
            linked.symlink_to(source) if source.suffix == ".so" else linked.write_bytes(source.read_bytes())
    script = tmp_path / "host.py"
    script.write_text(f"import sys\nsys.path[:0] = [{str(copy.parent)!r}, {str(Path(__file__).parents[2])!r}]\n{HOST}")
    marked = copy / "workers" / "process.py"
    marked.write_text(f"{marked.read_text()}\nopen({str(tmp_path / 'used')!r}, 'w').close()\n")
    subprocess.run([sys.executable, str(script), spec.path], check=True, timeout=60, cwd=tmp_path)
    assert (tmp_path / "used").exists()
