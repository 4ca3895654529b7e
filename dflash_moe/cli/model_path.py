"""What `--model` names: a folder or file on disk, or the shipped model. What is neither gets a
sentence that says how to come by it.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import difflib
import itertools
import os
import re
import stat
from importlib import resources
from pathlib import Path

from dflash_moe.errors import ConfigError, shown

# What a user writes in the place of a path. A folder of this name is ./demo.
DEMO = "demo"
# This package of bench/demo_model holds the model and the prompt.
ASSETS = "dflash_moe_demo"
TOY = (
    "the demo model is a toy: 4 layers trained on Python's documentation, which go on with a text and know no answers; "
    "it shows the program, not what a model can do"
)
# An id of a model hub, which other programs take with a page's address before it, and with the
# quantisation of a GGUF file behind it.
_HUB_ID = re.compile(
    r"(?:https?://[\w.-]+/)?(?P<id>[A-Za-z0-9][\w.-]*/(?P<name>[A-Za-z0-9][\w.-]*))(?:/tree/\w+|/)?(?::(?P<kind>[A-Za-z0-9_]+))?",
    re.ASCII,
)
# The quantisation that most repositories of GGUF files have, and most people take.
USUAL_KIND = "Q4_K_M"
WEIGHT_SUFFIXES = (".gguf", ".safetensors")
# Names in a folder that are compared with one that is not there.
MAX_NAMES = 10_000


def find_assets() -> Path:
    """Returns the folder with `model/` and `prompt.txt`. Raises ConfigError that says what to
    install, because the package of a worker goes without.
    """
    try:
        return Path(str(resources.files(ASSETS)))
    except ModuleNotFoundError:
        raise ConfigError(
            "the demo's model is not installed: it is a package of its own, dflash-moe-demo; in the "
            "source tree run `make`, or `pip install ./bench/demo_model`"
        ) from None


def demo_model() -> Path:
    """Returns the checkpoint directory of the shipped model. Errors are those of `find_assets`."""
    return find_assets() / "model"


def names_model(value: str) -> bool:
    """Says whether a word can be meant as a model and not as a file to write: `demo`, a file of
    weights, whether it is there or not, or a directory with such files.
    """
    path = Path(value)
    if value == DEMO or path.suffix in WEIGHT_SUFFIXES or (os.path.isfile(value) and _is_gguf(path)):
        return True
    try:
        names = [entry.name for entry in itertools.islice(os.scandir(path), MAX_NAMES)]
    except (OSError, ValueError):
        return False
    return any(name == "config.json" or name.endswith(WEIGHT_SUFFIXES) for name in names)


def model_directory(value: str) -> Path:
    """Returns the checkpoint directory or GGUF file of a model that is to be run. Errors are those
    of `model_path`, and those of `refuse_unusable` where no command could run it.
    """
    # Help is shown without what this imports.
    from dflash_moe.model.first_look import refuse_unusable

    path = model_path(value)
    refuse_unusable(path)
    return path


def model_path(value: str) -> Path:
    """Returns the checkpoint directory or GGUF file. Raises ConfigError, which says for the id of a
    hub how to download it, for a typing error what was meant, and else what was found.
    """
    if value == DEMO:
        return demo_model()
    try:
        path = Path(value).expanduser()
        mode = os.stat(path).st_mode
    except (FileNotFoundError, NotADirectoryError):
        mode = 0
    except (OSError, RuntimeError, ValueError) as error:
        # ~NAME of a user that is not there is a RuntimeError, and a zero byte a ValueError.
        raise ConfigError(f"--model {shown(value)}: {getattr(error, 'strerror', None) or error}") from None
    if stat.S_ISDIR(mode):
        return path
    if mode:
        if stat.S_ISREG(mode) and _is_gguf(path):
            return path
        raise ConfigError(f"--model {value}: this is a file, and not GGUF; pass the checkpoint's directory, or a GGUF file")
    near = _near(path)
    if near:
        raise ConfigError(f"--model {shown(value)}: no such file or directory; did you mean {near}?")
    found = _HUB_ID.fullmatch(value)
    # What begins with a folder that is here is a path.
    if found and not Path(found["id"]).parent.is_dir():
        raise ConfigError(f"--model {value}: no such file or directory; {_download(found)}")
    raise ConfigError(
        f"--model {shown(value)}: no such file or directory; pass a checkpoint directory, a GGUF file, or `demo` for the "
        "shipped model"
    )


def _is_gguf(path: Path) -> bool:
    # As above.
    from dflash_moe.model.formats.gguf_header import is_gguf

    return is_gguf(path)


def _near(path: Path) -> Path | None:
    """Returns the model beside a path that is not there whose name is most like it, None where
    there is none.
    """
    try:
        names = [entry.name for entry in os.scandir(path.parent) if entry.is_dir() or entry.name.endswith(".gguf")][:MAX_NAMES]
    except (OSError, ValueError):
        return None
    by_lower = {name.lower(): name for name in names}
    close = difflib.get_close_matches(path.name.lower()[:255], by_lower, n=1, cutoff=0.75)
    return path.with_name(by_lower[close[0]]) if close else None


def _download(found: re.Match[str]) -> str:
    name, kind = found["name"], found["kind"]
    command = f"hf download {found['id']}"
    beginning = "it looks like a hub id, and models are read from disk only: download it with"
    if kind or "gguf" in name.lower():
        return (
            f'{beginning} `{command} --include "*{kind or USUAL_KIND}*" --local-dir {name}`, where --include picks one of the '
            f"models in a repository of GGUF files, then pass --model {name}"
        )
    return (
        f'{beginning} `{command} --local-dir {name}` (add `--include "*{USUAL_KIND}*"`, or another quantisation, where the '
        f"repository has several GGUF models), then pass --model {name}"
    )
