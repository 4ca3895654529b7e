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

import pybind11
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
# What comes beside each extension. The plug-ins of the backend `sim` are opened at run time, by the
# core and by what measures; the library of the C interface is for programs without Python.
LIBRARIES = {"_core": ("dflash_sim", "dflash_moe"), "_measure": ("dflash_sim_measure",), "_simulation": ()}
C_HEADER = ROOT / "csrc" / "c_interface" / "dflash_moe.h"


class CMakeBuild(build_ext):
    """Configures csrc/ and builds an extension and what comes beside it into the place setuptools
    asks for.
    """

    def build_extension(self, ext: Extension) -> None:
        """Runs CMake and Ninja; a failure ends the build with the compiler's own output above
        it.
        """
        target = Path(self.get_ext_fullpath(ext.name)).resolve()
        build_dir = Path(os.environ.get("DFLASH_BUILD_DIR", ROOT / "build" / "core")).resolve()
        build_dir.mkdir(parents=True, exist_ok=True)
        # cmake and ninja come with the build requirements and lie beside this interpreter, which
        # need not be on PATH.
        environment = dict(os.environ, PATH=os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]))
        configure = [
            "cmake", "-S", str(ROOT / "csrc"), "-B", str(build_dir), "-G", "Ninja",
            f"-DCMAKE_MAKE_PROGRAM={shutil.which('ninja', path=environment['PATH']) or 'ninja'}",
            "-DCMAKE_BUILD_TYPE=Release",
            # not the target: setuptools may ask for a temporary place
            f"-DCMAKE_LIBRARY_OUTPUT_DIRECTORY={build_dir}",
            f"-DPython_EXECUTABLE={sys.executable}",
            f"-Dpybind11_DIR={pybind11.get_cmake_dir()}",
            f"-DDFLASH_VERSION={self.distribution.get_version()}",
        ]  # fmt: skip
        if shutil.which("ccache"):
            configure.append("-DCMAKE_CXX_COMPILER_LAUNCHER=ccache")
        subprocess.run(configure, check=True, env=environment)
        module = ext.name.rpartition(".")[2]
        libraries = LIBRARIES[module]
        subprocess.run(["cmake", "--build", str(build_dir), "--target", module, *libraries], check=True, env=environment)
        target.parent.mkdir(parents=True, exist_ok=True)
        for built in (target, *(target.with_name(f"lib{library}.so") for library in libraries)):
            built.unlink(missing_ok=True)  # a process that has the former one mapped keeps it
            shutil.copy2(build_dir / built.name, built)
        if "dflash_moe" in libraries:
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
    ext_modules=[Extension(f"dflash_moe.{module}", sources=[]) for module in LIBRARIES],
    cmdclass={"build_ext": CMakeBuild},
)
