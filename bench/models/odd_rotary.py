"""Derives odd rotary parameters: every kind that transformers has, with a small number of original
positions, and each number of a family's own. Only tests use it.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

# Where kinds that tell short sequences from long ones change over.
ORIGINAL_MAX = 48

# What belongs to the default kind, and to the family whatever the kind.
_KEPT = ("rope_theta", "partial_rotary_factor", "mrope_section", "mrope_interleaved")
# What no number of a family can be beside its own: its kind, and how it is cut into parts.
_FIXED = ("rope_type", "type", "mrope_section")
# What code reads of rotary parameters itself, beside what transformers' functions for all read.
_READ = re.compile(r"rope_parameters(?:\.get\(|\[)[\"'](\w+)[\"']")


def odd_rotary(rotary: Any, source: str, width: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields names and odd values of `rope_parameters`, of all kinds of layers together where they
    are by kind of layer, and of each kind alone. `width` is the number of frequencies.
    """
    if not isinstance(rotary, dict) or not rotary:
        return
    by_layer = {key: value for key, value in rotary.items() if isinstance(value, dict)}
    if not by_layer:
        yield from _odd(rotary, source, width)
        return
    for word, _ in _odd(next(iter(by_layer.values())), source, width):
        odd = {key: dict(_odd(value, source, width)).get(word, value) for key, value in by_layer.items()}
        yield word, rotary | odd
        for key in by_layer if len(by_layer) > 1 else ():
            yield f"{word} ({key})", rotary | {key: odd[key]}


def _odd(rotary: Mapping[str, Any], source: str, width: int) -> Iterator[tuple[str, dict[str, Any]]]:
    read = set(_READ.findall(source))
    kept = {key: value for key, value in rotary.items() if key in _KEPT or key in read - set(_FIXED)}
    for word, kind in _kinds(width).items():
        yield word, kept | kind
    yield "theta 100", {**rotary, "rope_theta": 100.0}
    for part in (0.25, 0.5):
        yield f"part {part:g}", {**rotary, "partial_rotary_factor": part}
    for name, value in rotary.items():
        if name not in _FIXED and name not in _KEPT and type(value) in (bool, int, float):
            odd = not value if isinstance(value, bool) else type(value)(2 * value)
            yield f"{name} {odd}", {**rotary, name: odd}
    for name in sorted(read - set(rotary) - {"attention_factor", "factor", *_KEPT, *_FIXED}):
        # What a family reads and does not have by default scales something with the position.
        yield f"{name} 0.5", {**kept, **_kinds(width)["yarn"], name: 0.5}


def _kinds(width: int) -> dict[str, dict[str, Any]]:
    """Returns the kinds of rotary parameters and, where it is known only behind them what they do
    to cosines, their variants.
    """
    original = {"original_max_position_embeddings": ORIGINAL_MAX}
    yarn = {"rope_type": "yarn", "factor": 8.0, **original}
    factors = {
        "short_factor": [1.0 + 0.05 * place for place in range(width)],
        "long_factor": [1.5 + 0.5 * place for place in range(width)],
    }
    return {
        "default": {"rope_type": "default"},
        "linear": {"rope_type": "linear", "factor": 4.0},
        "dynamic": {"rope_type": "dynamic", "factor": 4.0},
        "yarn": yarn,
        "yarn, scaled": {**yarn, "mscale": 0.7, "mscale_all_dim": 1.3},
        "yarn, not truncated": {**yarn, "truncate": False, "attention_factor": 1.4},
        "llama3": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, **original},
        "longrope": {"rope_type": "longrope", "factor": 8.0, **original, **factors},
        "longrope, scaled": {"rope_type": "longrope", **original, **factors, "short_mscale": 1.1, "long_mscale": 1.3},
        "proportional": {"rope_type": "proportional", "factor": 4.0, "partial_rotary_factor": 0.5},
    }
