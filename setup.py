"""Builds the C++ core, the extensions that measure and that simulate failures, the plug-ins of the
backend `sim` and the library of the C interface with CMake, and completes the links of the readme;
everything else about the package is in pyproject.toml.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import ClassVar

import pybind11
from setuptools import Command, Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
EXTENSIONS = ("_core", "_measure", "_simulation")
# What comes beside the extensions. The plug-ins of the backend `sim` are opened at run time, by the
# core and by what measures; the library of the C interface is for programs without Python.
LIBRARIES = ("dflash_sim", "dflash_sim_measure", "dflash_moe")
C_HEADER = ROOT / "csrc" / "c_interface" / "dflash_moe.h"
BUILD_DIR = Path(os.environ.get("DFLASH_BUILD_DIR", ROOT / "build" / "core")).resolve()
# cmake and ninja come with the build requirements and lie beside this interpreter, which need not
# be on PATH.
ENVIRONMENT = dict(os.environ, PATH=os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]))


class Configure(Command):
    """Configures csrc/ without building anything; `make` builds by itself then."""

    user_options: ClassVar[list[tuple[str, str, str]]] = []

    def initialize_options(self) -> None: ...

    def finalize_options(self) -> None: ...

    def run(self) -> None:
        BUILD_DIR.mkdir(parents=True, exist_ok=True)
        configure = [
            "cmake", "-S", str(ROOT / "csrc"), "-B", str(BUILD_DIR), "-G", "Ninja",
            f"-DCMAKE_MAKE_PROGRAM={shutil.which('ninja', path=ENVIRONMENT['PATH']) or 'ninja'}",
            "-DCMAKE_BUILD_TYPE=Release", "--log-level=WARNING",
            # not the target: setuptools may ask for a temporary place
            f"-DCMAKE_LIBRARY_OUTPUT_DIRECTORY={BUILD_DIR}",
            f"-DPython_EXECUTABLE={sys.executable}",
            f"-Dpybind11_DIR={pybind11.get_cmake_dir()}",
            f"-DDFLASH_VERSION={self.distribution.get_version()}",
        ]  # fmt: skip
        if shutil.which("ccache"):
            configure.append("-DCMAKE_CXX_COMPILER_LAUNCHER=ccache")
        subprocess.run(configure, check=True, env=ENVIRONMENT, stdout=subprocess.DEVNULL)


class CMakeBuild(build_ext):
    """Builds the extensions and what comes beside them into the place setuptools asks for. An
    editable installation, which lies beside the sources, gets the core alone: what measures and
    simulates takes as long again, and `make` builds it.
    """

    def run(self) -> None:
        """Configures, and builds all targets at once."""
        is_whole = not self.editable_mode
        if not is_whole:
            self.extensions = self.extensions[:1]
        self.run_command("configure")
        targets = [*EXTENSIONS, *LIBRARIES] if is_whole else EXTENSIONS[:1]
        subprocess.run(["cmake", "--build", str(BUILD_DIR), "--target", *targets], check=True, env=ENVIRONMENT)
        super().run()

    def build_extension(self, ext: Extension) -> None:
        """Copies what was built; the libraries come with the last extension."""
        target = Path(self.get_ext_fullpath(ext.name)).resolve()
        target.parent.mkdir(parents=True, exist_ok=True)
        is_last = ext.name.endswith(EXTENSIONS[-1])
        for built in (target, *(target.with_name(f"lib{library}.so") for library in LIBRARIES if is_last)):
            built.unlink(missing_ok=True)  # a process that has the former one mapped keeps it
            shutil.copy2(BUILD_DIR / built.name, built)
        if is_last:
            (target.parent / "include").mkdir(exist_ok=True)
            shutil.copy2(C_HEADER, target.parent / "include" / C_HEADER.name)


def readme() -> str:
    """README.md as a page of its own: relative links lead to the source's place on the web, and the
    marks of generated figures are left out.
    """
    source = re.search(r'^Source = "([^"]+)"', (ROOT / "pyproject.toml").read_text(encoding="utf-8"), re.MULTILINE)
    assert source is not None
    text = re.sub(r"<!-- .*? -->", "", (ROOT / "README.md").read_text(encoding="utf-8"))
    return re.sub(r"\]\((?![a-z]+:|#)([^)]+)\)", rf"]({source[1]}/blob/main/\1)", text)


setup(
    long_description=readme(),
    long_description_content_type="text/markdown",
    ext_modules=[Extension(f"dflash_moe.{module}", sources=[]) for module in EXTENSIONS],
    cmdclass={"build_ext": CMakeBuild, "configure": Configure},
)
