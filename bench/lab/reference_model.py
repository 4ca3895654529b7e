"""Makes the model of recorded campaigns: random weights in the shape of the prefill table, made
once into a cache directory.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

LAYERS, HIDDEN_SIZE, NUM_EXPERTS, TOP_K, MOE_INTERMEDIATE_SIZE = 12, 1024, 32, 8, 384
DTYPE, SEED = "bf16", 0
NAME = f"qwen3_moe-{LAYERS}x{HIDDEN_SIZE}-{NUM_EXPERTS}x{MOE_INTERMEDIATE_SIZE}-top{TOP_K}-{DTYPE}"


def reference_model(cache: Path | None = None, *, say: Callable[[str], None] = lambda _line: None) -> Path:
    """Returns the directory of the checkpoint, which has 0.9 GB of experts. It is made when it is
    not there. `cache` is by default ~/.cache/dflash_moe.
    """
    folder = cache or default_cache()
    directory = folder / NAME
    if directory.is_dir():
        return directory
    from dflash_moe.model.make import MakeOptions, make_checkpoint

    say(f"making {directory} (once)")
    folder.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix=f"{NAME}.", dir=folder))
    try:
        wanted = MakeOptions("qwen3_moe", LAYERS, HIDDEN_SIZE, NUM_EXPERTS, TOP_K, MOE_INTERMEDIATE_SIZE, DTYPE, SEED)
        make_checkpoint(wanted, unfinished)
        # The folder appears whole or not at all.
        unfinished.rename(directory)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return directory


def default_cache() -> Path:
    """Returns the folder where models of campaigns are kept between runs."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dflash_moe"
