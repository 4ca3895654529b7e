"""The first file of a worker that a host starts: it takes the package from the folder this file
lies in, and nothing from the folder the host was called in.

`python -m dflash_moe` would put the caller's folder first on `sys.path`, so that a module
named `msgpack` in a downloaded model's folder would become part of every worker. Run as a script,
this file decides what is on the path before anything is looked up there. The package itself is
found by its file and not by the path: it need not be installed, and its folder need not be on the
path.

Run as `python start.py dflash_moe worker --name NAME --model DIR --control-fd N --key-fd N
--parent-pid N --cache-path DIR --cache-max-bytes N --cache-panels WORD` by holders/launcher.py and
nobody else. So the line is taken as it is: to import
what parses a person's command line would make a start longer by a fifth. The first two arguments
only say what it is in lists of processes.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import sys

PACKAGE = "dflash_moe"


def run() -> None:
    """Imports the package that holds this file and serves the host that started this process."""
    # Python before 3.11 has no `-P`, and puts the folder of a script first on the path. That is
    # this one, whose modules like `session` would stand in for others of that name.
    if not getattr(sys.flags, "safe_path", False):
        del sys.path[0]

    import importlib.util
    import os
    from pathlib import Path

    folder = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    spec = importlib.util.spec_from_file_location(
        PACKAGE, os.path.join(folder, "__init__.py"), submodule_search_locations=[folder]
    )
    if spec is None or spec.loader is None:
        raise ImportError(f"{folder} is no package")
    package = importlib.util.module_from_spec(spec)
    sys.modules[PACKAGE] = package
    spec.loader.exec_module(package)
    # A worker asks numpy for nothing that is computed on threads, and numpy's library would start
    # one for each core as soon as it is imported.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

    from dflash_moe.config.cache import CacheSettings
    from dflash_moe.workers.process import run_started_worker

    told = dict(zip(sys.argv[3::2], sys.argv[4::2], strict=True))
    control_fd, key_fd, parent_pid = (int(told[option]) for option in ("--control-fd", "--key-fd", "--parent-pid"))
    name, model, cache = told["--name"], Path(told["--model"]), CacheSettings.from_options(told)
    sys.exit(
        run_started_worker(name=name, model=model, control_fd=control_fd, key_fd=key_fd, parent_pid=parent_pid, cache=cache)
    )


if __name__ == "__main__":
    run()
