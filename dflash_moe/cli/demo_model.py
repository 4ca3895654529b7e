"""Where the shipped model lies, which `--model demo` names.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from importlib import resources
from pathlib import Path

from dflash_moe.errors import ConfigError

# What a user writes in the place of a path. A folder of this name is ./demo.
DEMO = "demo"
# This package of bench/demo_model holds the model and the prompt.
ASSETS = "dflash_moe_demo"
TOY = (
    "the demo model is a toy: 4 layers trained on Python's documentation, which go on with a text and know no answers; "
    "it shows the program, not what a model can do"
)


def find_assets() -> Path:
    """Returns the folder with `model/` and `prompt.txt`. Raises ConfigError that says what to
    install, because the package of a worker goes without.
    """
    try:
        return Path(str(resources.files(ASSETS)))
    except ModuleNotFoundError:
        raise ConfigError(
            "the demo's model is not installed: it is a package of its own, dflash-moe-demo; in the source tree run `make`, or "
            "`pip install ./bench/demo_model`"
        ) from None


def demo_model() -> Path:
    """Returns the checkpoint directory of the shipped model. Errors are those of `find_assets`."""
    return find_assets() / "model"
