"""Checks the counts in a configuration before transformers sees it.

The constructor of a configuration makes lists with one entry for each layer, and a model is built
module by module, on the meta device too. So a count of a billion would take minutes and gigabytes
before anybody could say that it is wrong. More layers or experts than a frame can name cannot be
served anyhow.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from dflash_moe import _core
from dflash_moe.errors import UnsupportedError, shown

# These fields count layers or experts, by the names that configurations have for them:
# num_hidden_layers, n_layer, encoder_layers, depth (of a vision tower), num_local_experts,
# n_routed_experts, and the block_count and expert_count of a GGUF file.
_COUNTS_LAYERS = re.compile(r"(?:num|n)_(?:\w+_)?layers?|(?:\w+_)?(?:encoder|decoder|hidden)_layers|depth|block_count")
_COUNTS_EXPERTS = re.compile(r"(?:moe_)?(?:num|n)_(?:\w+_)?experts|expert_count")


def check_counts(settings: Mapping[str, Any], where: str) -> None:
    """Checks a configuration and those inside it, or the metadata of a GGUF file. Raises
    UnsupportedError that names `where`, the first field that counts more layers or experts than the
    wire can name, and the bound.
    """
    limits = _core.wire_limits()
    for field, value in _integers(settings):
        name = field.rpartition(".")[2]
        if _COUNTS_LAYERS.fullmatch(name):
            _check(where, field, value, limits["max_layers"], "layers of a model")
        elif _COUNTS_EXPERTS.fullmatch(name):
            _check(where, field, value, limits["max_experts_per_shard"], "experts of a layer")


def _check(where: str, field: str, value: int, most: int, what: str) -> None:
    if value > most:
        raise UnsupportedError(f"{where}: {field} is {shown(value)}; at most {most} {what} can be served")


def _integers(settings: Any, path: str = "") -> Iterator[tuple[str, int]]:
    """Yields (dotted field, value) of every integer in a tree of maps and lists."""
    entries: Iterable[tuple[Any, Any]] = settings.items() if isinstance(settings, Mapping) else enumerate(settings)
    for key, value in entries:
        field = f"{path}.{key}" if path else str(key)
        if type(value) is int:
            yield field, value
        elif isinstance(value, Mapping | list):
            yield from _integers(value, field)
