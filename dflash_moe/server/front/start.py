"""The first file of a front, and of the process that reads its large bodies: it takes the package
from the folder this file lies in, and nothing from the folder the server was called in, for the
reasons of decision 27 (docs/decisions).

Run as `python start.py dflash_moe front --link-fd N --listen-fd N` by server/front_keeper.py, as
`python start.py dflash_moe bodies --max-body N` by large_bodies.py, and by nobody else.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import sys

PACKAGE = "dflash_moe"


def run() -> None:
    """Imports the package that holds this file and does what the process that started this one asks
    for.
    """
    # Python before 3.11 has no `-P`, and puts the folder of a script first on the path.
    if not getattr(sys.flags, "safe_path", False):
        del sys.path[0]

    import importlib.util
    import os

    folder = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    spec = importlib.util.spec_from_file_location(
        PACKAGE, os.path.join(folder, "__init__.py"), submodule_search_locations=[folder]
    )
    if spec is None or spec.loader is None:
        raise ImportError(f"{folder} is no package")
    package = importlib.util.module_from_spec(spec)
    sys.modules[PACKAGE] = package
    spec.loader.exec_module(package)
    told = dict(zip(sys.argv[3::2], sys.argv[4::2], strict=True))
    if sys.argv[2] == "bodies":
        from dflash_moe.server.front.body_process import run_bodies

        run_bodies(int(told["--max-body"]))
        return

    # The library reads it when it is first used: a text is tokenised by one thread.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"

    from dflash_moe.server.front.process import run_front

    sys.exit(run_front(int(told["--link-fd"]), int(told["--listen-fd"])))


if __name__ == "__main__":
    run()
