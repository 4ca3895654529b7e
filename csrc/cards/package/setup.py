"""Packs the built plug-in of one kind of cards as a package beside dflash-moe: `make wheels` calls
it with DFLASH_CARD, cuda or hip, and DFLASH_PLUGINS, the folder with the libraries.

The package is its libraries and one module, which states what they were built for;
dflash_moe/protocol/card_packages.py reads it.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel

CARDS = {"cuda": "NVIDIA's", "hip": "AMD's"}
MODULE = '''"""The plug-in for {owner} cards. `dflash-moe` finds this module by its entry point.

SPDX-License-Identifier: Apache-2.0
"""

VERSION = {version!r}
BACKEND_ABI, HOST_ABI = {backend_abi}, {host_abi}
'''


class PlatformWheel(bdist_wheel):
    """A wheel of libraries that no Python loads: for every Python, and one platform."""

    def get_tag(self) -> tuple[str, str, str]:
        """Returns the tag without an interpreter."""
        return "py3", "none", super().get_tag()[2]


class LibraryDistribution(Distribution):
    """Says that there are binaries, so that the wheel belongs to a platform."""

    def has_ext_modules(self) -> bool:
        """Always true: the libraries are data for setuptools."""
        return True


def lay_out(card: str, plugins: Path, version: str, abi: tuple[int, int]) -> str:
    """Writes the package's folder here and returns its name."""
    name = f"dflash_moe_{card}"
    folder = Path(name)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    text = MODULE.format(owner=CARDS[card], version=version, backend_abi=abi[0], host_abi=abi[1])
    (folder / "__init__.py").write_text(text, encoding="utf-8")
    for library in (f"libdflash_{card}.so", f"libdflash_{card}_measure.so"):
        shutil.copy2(plugins / library, folder / library)
    return name


card, version = os.environ["DFLASH_CARD"], os.environ["DFLASH_VERSION"]
backend_abi, host_abi = (int(number) for number in os.environ["DFLASH_PLUGIN_ABI"].split())
package = lay_out(card, Path(os.environ["DFLASH_PLUGINS"]), version, (backend_abi, host_abi))
setup(
    name=f"dflash-moe-{card}",
    version=version,
    description=f"The plug-in of dflash-moe for {CARDS[card]} cards.",
    license="Apache-2.0",
    python_requires=">=3.10",
    install_requires=[f"dflash-moe=={version}"],
    packages=[package],
    package_data={package: ["*.so"]},
    entry_points={"dflash_moe.backends": [f"{card} = {package}"]},
    cmdclass={"bdist_wheel": PlatformWheel},
    distclass=LibraryDistribution,
)
