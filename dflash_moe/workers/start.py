"""The first file that a started worker runs: it takes the package from the folder this file lies
in, and nothing from the folder the host was called in.

`python -m dflash_moe` would put the caller's folder first on `sys.path`, so that a module
named `msgpack` in a downloaded model's folder would become part of every worker. Run as a script,
this file decides what is on the path before anything is looked up there. The package itself is
found by its file and not by the path: it need not be installed, and its folder need not be on the
path. Run as `python start.py dflash_moe worker ...`; the first argument only names the package in
lists of processes.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import sys

PACKAGE = "dflash_moe"


def run() -> None:
    """Imports the package that holds this file and runs its command line with the arguments that
    follow PACKAGE.
    """
    # Python before 3.11 has no `-P`, and puts the folder of a script first on the path. That is
    # this one, whose modules like `session` would stand in for others of that name.
    if not getattr(sys.flags, "safe_path", False):
        del sys.path[0]

    import importlib.util
    import os
    import runpy

    folder = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    spec = importlib.util.spec_from_file_location(
        PACKAGE, os.path.join(folder, "__init__.py"), submodule_search_locations=[folder]
    )
    if spec is None or spec.loader is None:
        raise ImportError(f"{folder} is no package")
    package = importlib.util.module_from_spec(spec)
    sys.modules[PACKAGE] = package
    spec.loader.exec_module(package)
    sys.argv = sys.argv[1:]
    runpy.run_module(PACKAGE, run_name="__main__")


if __name__ == "__main__":
    run()
