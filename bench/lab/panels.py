"""Writes the panels of a model for a measurement that begins with all of them on disk.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from dflash_moe import _core
from dflash_moe.model.checkpoint import Checkpoint
from dflash_moe.model.spec import ModelSpec
from dflash_moe.store.panel_store import PanelStore
from dflash_moe.store.warming import WantedExperts, Warming

# A checkpoint that was made less than 50 ms ago has no panels yet.
SETTLED_S = 0.1


def let_panels_be_kept() -> None:
    """Takes back for this process and its children what keeps panels from being written: steps that
    are recorded have them off, and tests have no folder for them.
    """
    os.environ["DFLASH_MOE_CACHE_PANELS"] = "on"
    os.environ.pop("DFLASH_MOE_CACHE_PATH", None)


def write_panels(spec: ModelSpec, cache: Path, threads: int = 2) -> None:
    """Writes what is missing in the folder `cache` of all experts, for this machine's kernels."""
    time.sleep(SETTLED_S)
    wanted = [
        WantedExperts(layer.ffn, tuple(range(layer.num_experts)), layer.weight_dtype, "f32-canonical") for layer in spec.layers
    ]
    store = PanelStore.open(cache, max_bytes=None, allow_network=True)
    try:
        Warming(store, Checkpoint.open(spec.path), wanted, isa=_core.best_isa()).write(threads=threads)
    finally:
        store.close()
