"""Finds the plug-ins of packages for cards, `dflash-moe-cuda` and `dflash-moe-hip`, which are
installed beside this one.

Such a package names itself in the entry point group `dflash_moe.backends`, by the backend's name.
Its module states the interface that its plug-in was built for, so that one of another core is
refused before any of its code is mapped.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

from dflash_moe import _core
from dflash_moe.errors import UnsupportedError
from dflash_moe.version import __version__

GROUP = "dflash_moe.backends"


def directory_of(backend: str) -> str:
    """Returns the folder with the plug-in of a backend's installed package, and an empty text where
    none is installed. The core calls it where the plug-in does not lie beside itself.

    Raises UnsupportedError for a package of another version or interface, for one that cannot be
    imported, and where two packages offer the backend.
    """
    found = _offers(backend)
    if not found:
        return ""
    if len(found) > 1:
        packages = ", ".join(sorted(found))
        raise UnsupportedError(f"backend {backend!r}: the packages {packages} both offer it; uninstall one of them")
    ((package, entry),) = found.items()
    try:
        module = entry.load()
        built_for = (module.VERSION, module.BACKEND_ABI, module.HOST_ABI)
    except Exception as error:  # noqa: BLE001 - another package's code
        raise UnsupportedError(
            f"backend {backend!r}: package {package} cannot be used ({type(error).__name__}: {error}); install it again"
        ) from None
    here = (__version__, *_core.plugin_abi())
    if built_for != here:
        raise UnsupportedError(
            f"backend {backend!r}: package {package} was built for version {built_for[0]} with interfaces {built_for[1]} and "
            f"{built_for[2]}, and dflash-moe here is {here[0]} with {here[1]} and {here[2]}; install dflash-moe-{backend} "
            f"{__version__}"
        )
    return str(Path(module.__file__).parent)


def package_of(backend: str, directory: str) -> str | None:
    """Returns the name and version of the package that brought the plug-in in `directory`, or None
    where it lies beside the core.
    """
    return next(iter(_offers(backend)), None) if Path(directory) != Path(_core.__file__).parent else None


def _offers(backend: str) -> dict[str, metadata.EntryPoint]:
    """Returns the entry points for a backend by package. A package that is on the path twice counts
    once.
    """
    return {_name(entry): entry for entry in metadata.entry_points(group=GROUP, name=backend)}


def _name(entry: metadata.EntryPoint) -> str:
    distribution = entry.dist
    return "of unknown name" if distribution is None else f"{distribution.name} {distribution.version}"
