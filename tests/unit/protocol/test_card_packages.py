"""Packages with the plug-ins of cards: installed beside the core from built files, found by
`doctor`, and refused where they were built for another core.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import dflash_moe
from dflash_moe import UnsupportedError, _core
from dflash_moe.protocol import card_packages

PACKAGE = Path(dflash_moe.__file__).parent
ROOT = PACKAGE.parent
BUILT = PACKAGE / "libdflash_cuda.so"


def lay_out(folder: Path, module: str, *, distribution: str = "dflash_moe_cuda", backend: str = "cuda") -> Path:
    """Lays an installed package out in `folder`, with `module` as its code."""
    package = folder / distribution
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(module)
    info = folder / f"{distribution}-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1\n")
    (info / "entry_points.txt").write_text(f"[dflash_moe.backends]\n{backend} = {distribution}\n")
    return package


def stated(version=dflash_moe.__version__, abi=None) -> str:
    backend, host = abi or _core.plugin_abi()
    return f"VERSION = {version!r}\nBACKEND_ABI, HOST_ABI = {backend}, {host}\n"


@pytest.fixture
def path(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    for name in [name for name in sys.modules if name.startswith(("dflash_moe_cuda", "dflash_moe_other"))]:
        del sys.modules[name]


def test_the_folder_of_an_installed_package_is_found(path):
    assert card_packages.directory_of("cuda") == ""
    package = lay_out(path, stated())
    assert card_packages.directory_of("cuda") == str(package)
    assert card_packages.directory_of("hip") == ""


@pytest.mark.parametrize(
    ("module", "says"),
    [
        (stated(version="0.0.1"), r"built for version 0\.0\.1 .* install dflash-moe-cuda"),
        (stated(abi=(99, 1)), r"with interfaces 99 and 1, and dflash-moe here is"),
        ("VERSION = '1'\n", r"cannot be used \(AttributeError: .*BACKEND_ABI"),
        ("raise OSError('no driver')", r"cannot be used \(OSError: no driver\); install it again"),
    ],
)
def test_a_package_of_another_core_is_refused(path, module, says):
    lay_out(path, module)
    with pytest.raises(UnsupportedError, match=rf"backend 'cuda': package dflash_moe_cuda 1 .*{says}"):
        card_packages.directory_of("cuda")
    if not BUILT.exists():
        assert "package dflash_moe_cuda 1" in _core.probe_backend("cuda")["reason"], "doctor lists it and does not fail"


def test_two_packages_for_one_backend_are_refused(path):
    lay_out(path, stated())
    lay_out(path, stated(), distribution="dflash_moe_other")
    with pytest.raises(UnsupportedError, match="dflash_moe_cuda 1, dflash_moe_other 1 both offer it"):
        card_packages.directory_of("cuda")


def test_doctor_finds_a_package_that_is_installed_beside_the_core(tmp_path):
    """The core is a copy without plug-ins of its own. Where none are built, the simulator's library
    stands in for a card's, and the reason that doctor gives is what the core says of that file.
    """
    core = tmp_path / "core"
    shutil.copytree(
        PACKAGE, core / "dflash_moe", ignore=shutil.ignore_patterns("libdflash_cuda*", "libdflash_hip*", "__pycache__")
    )
    plugins = tmp_path / "plugins"
    plugins.mkdir()
    for suffix in ("", "_measure"):
        stand_in = PACKAGE / f"libdflash_{'cuda' if BUILT.exists() else 'sim'}{suffix}.so"
        shutil.copy2(stand_in, plugins / f"libdflash_cuda{suffix}.so")
    source = tmp_path / "source"
    shutil.copytree(ROOT / "csrc" / "cards" / "package", source)
    backend, host = _core.plugin_abi()
    described = {"DFLASH_CARD": "cuda", "DFLASH_PLUGINS": str(plugins), "DFLASH_VERSION": dflash_moe.__version__}
    environment = os.environ | described | {"DFLASH_PLUGIN_ABI": f"{backend} {host}"}
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*pip, "--target", str(tmp_path / "site"), str(source)], env=environment, check=True, timeout=120)
    environment = os.environ | {"PYTHONPATH": f"{core}:{tmp_path / 'site'}"}
    command = [sys.executable, "-m", "dflash_moe", "doctor", "--json"]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    found = json.loads(done.stdout)["backends"]["cuda"]
    assert found["package"] == f"dflash-moe-cuda {dflash_moe.__version__}", done.stderr
    if BUILT.exists():
        assert found["built"]
    else:
        assert "libdflash_cuda.so has an incomplete table or one of backend 'sim'" in found["reason"]
