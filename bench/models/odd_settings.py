"""Derives from a family's configuration class the odd settings that it allows, one at a time. Only
tests use it.

A rule looks at a field's name, type and value: flags are turned over, numbers halved, doubled or
made small, what is None gets a value, words are those that the family's code compares the field
with. Nothing is written for one family.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import dataclasses
import re
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from bench.models.odd_rotary import ORIGINAL_MAX, odd_rotary

# A prompt has so many tokens, and a model so many positions: four times the largest small size and
# some more, so that it goes past each window and each multiple of it that a layer could look at.
TOKENS = 389
# What is a limit of positions in a configuration becomes so small, so that a prompt goes past it.
WINDOW = 21
ODD_WINDOW = 5

# The width of a tiny model's heads.
HEAD_SIZE = 24
# Heads of linear attention have no tiny size otherwise, and were nearly all that such a model
# computes. A few of them are told apart as well as many.
_LINEAR_HEADS, _LESS_HEADS = "linear_num_", 8

# Fields that cannot change a logit, or whose value something outside of the model fixes: names of
# tokens, what only training reads, what is returned beside logits, heads of other tasks.
_WITHOUT_MEANING = re.compile(
    r"token_i|vocab|initializer|dropout|aux_loss|z_loss|loss_scaling|use_cache|^output_(?!gate|multiplier)|pretraining|^mtp|"
    r"nextn|^seed$|kernels$|num_logits|^model_max|^max_position_embeddings$|ssm_cache_dtype|residual_in_fp32|rescale_prenorm"
)
# Integers of these names bound positions. Sizes of these names do not.
_OF_POSITIONS = re.compile(r"window|chunk|floor|topk$|extent|budget|original_max|kpool$|topk_blocks|index_block")
_ACTIVATIONS = ("silu", "gelu", "gelu_pytorch_tanh", "relu2")
_HAS_ACTIVATION = re.compile(r"hidden_act|activation$|_act$")
# What a proof of a layer is most likely to overlook, first things first: limits on values, what
# depends on the position, windows, rotary kinds that change with it, scores of routers.
_DANGERS = (
    r"clip.*=[^N]|limit=|cap(ping)?=", r"scaling_beta|scaling_alpha|floor", r"use_sliding|window=\d", r": longrope", r": yarn$",
    r"scor|topk_method|selection_fn", r"norm_topk|renorm", r"per_tok=1|top_?k=1|moe_k=1", r"layer_types=",
)  # fmt: skip
# Numbers below are there against division by 0.
_LARGEST_EPSILON = 1e-3
_ODD_EPSILON = 2e-3


@dataclass(frozen=True, slots=True)
class OddSetting:
    """Fields of a language model's configuration beside the usual ones, and what they are called
    in a report.
    """

    name: str
    fields: Mapping[str, Any]


def usual_fields(text: Any) -> dict[str, Any]:
    """Returns what every model of the sweep has, odd or not, by its class's default configuration:
    as many positions as a prompt, windows that are shorter, and few heads of linear attention.
    """
    fields: dict[str, Any] = {}
    for name, value in _declared(text).items():
        if name == "max_position_embeddings":
            fields[name] = TOKENS
        elif type(value) is int and value > WINDOW and _OF_POSITIONS.search(name):
            fields[name] = ORIGINAL_MAX if "original" in name else WINDOW
        elif type(value) is int and name.startswith(_LINEAR_HEADS):
            fields[name] = value // _LESS_HEADS
    rotary = getattr(text, "rope_parameters", None)
    if isinstance(rotary, dict) and rotary:
        fields["rope_parameters"] = _short_rotary(rotary)
    return fields


def odd_settings(text: Any, source: str, rotary_width: int) -> Iterator[OddSetting]:
    """Yields every odd setting of a language model's configuration `text`, which was built with the
    usual fields. `source` is the code of its model and configuration, and `rotary_width` the number
    of its rotary frequencies.
    """
    kinds = _annotations(text)
    for name, value in text.to_dict().items():
        if name in _fields_of_all() or _WITHOUT_MEANING.search(name):
            continue
        if name == "rope_parameters":
            for word, odd in odd_rotary(value, source, rotary_width):
                yield OddSetting(f"{name}: {word}", {name: odd})
            continue
        for odd in _odd_values(name, value, kinds.get(name, ""), source):
            yield OddSetting(f"{name}={_said(odd)}", {name: odd})


def most_dangerous(settings: list[OddSetting], count: int) -> list[OddSetting]:
    """Returns the usual setting and `count` odd ones, no two of a kind that is overlooked alike."""
    found = [setting for setting in settings if not setting.name]
    for danger in _DANGERS:
        found += [setting for setting in settings if re.search(danger, setting.name)][:1]
    odd = [setting for place, setting in enumerate(found) if setting.name and setting not in found[:place]]
    return [*found[:1], *odd[:count]]


def _declared(text: Any) -> dict[str, Any]:
    """Returns the fields of a configuration with what its class declares for them: a constructor
    may have written something else over it, such as no window where none is used.
    """
    declared = {field.name: field.default for field in dataclasses.fields(text)} if dataclasses.is_dataclass(text) else {}
    return {name: value if (found := declared.get(name)) is None or found is dataclasses.MISSING else found
            for name, value in text.to_dict().items()}  # fmt: skip


def _annotations(text: Any) -> dict[str, Any]:
    return {field.name: field.type for field in dataclasses.fields(text)} if dataclasses.is_dataclass(text) else {}


def _fields_of_all() -> set[str]:
    from transformers import PreTrainedConfig

    return set(PreTrainedConfig().to_dict())


def _short_rotary(rotary: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in rotary.items():
        if isinstance(value, dict):
            found[name] = _short_rotary(value)
        elif "max_position" in name and value:
            found[name] = ORIGINAL_MAX if "original" in name else TOKENS
        else:
            found[name] = value
    if "mrope_section" in found:
        part = int(HEAD_SIZE // 2 * found.get("partial_rotary_factor", 1.0)) // 3
        found["mrope_section"] = [part] * 3
    return found


# -- values ----------------------------------------------------------------------------------------
def _odd_values(name: str, value: Any, kind: Any, source: str) -> list[Any]:
    """Returns what a field may be beside `value`; its class refuses what makes no sense."""
    found: list[Any]
    if value is None:
        found = _for_none(name, kind, source)
    elif isinstance(value, bool):
        found = [not value]
    elif isinstance(value, int):
        found = _integers(name, value)
    elif isinstance(value, float):
        found = _reals(value)
    elif isinstance(value, str):
        found = [*_words(name, kind, source), *(_ACTIVATIONS if _HAS_ACTIVATION.search(name) else ())]
    elif isinstance(value, (list, tuple)):
        found = _lists(name, list(value), source)
    elif isinstance(value, dict):
        found = [value | {key: odd} for key, part in value.items() for odd in _odd_values(str(key), part, "", source)]
    else:
        found = []
    return [odd for place, odd in enumerate(found) if odd != value and odd not in found[:place]]


def _integers(name: str, value: int) -> list[int]:
    if _OF_POSITIONS.search(name):
        return [ODD_WINDOW, 2 * WINDOW]
    if value <= 1:
        return [1, 2, 4] if "group" in name else [1 - min(value, 1), 2]
    if value <= 16:
        return [1, 2 * value]
    # Other sizes of layers and experts are what tests of operators and kernels are about.
    return [value // 2] if "head" in name or "rank" in name else []


def _reals(value: float) -> list[float]:
    if value in (float("inf"), float("-inf")):
        return [1.0]
    if 0.0 < value < _LARGEST_EPSILON:
        return [_ODD_EPSILON]
    return [0.5, 3.0] if value == 0.0 else [2.5 * value] if value < 1.0 else [0.5 * value, 2.5 * value]


def _for_none(name: str, kind: Any, source: str) -> list[Any]:
    parts = set(typing.get_args(kind)) or {kind}
    found: list[Any] = [True, False] if bool in parts else []
    # A limit of values as released models have it is one that few rows reach.
    found += [8.0, 0.5] if float in parts else []
    if int in parts and float not in parts:
        found += [ODD_WINDOW, WINDOW] if _OF_POSITIONS.search(name) else [1, 4, 24]
    if any("list" in str(part) for part in parts):
        found += [[0], [1], *_lists(name, [None, None], source)]
    return found + _words(name, kind, source)


def _words(name: str, kind: Any, source: str) -> list[Any]:
    """Returns the words that the code compares a field with, and those that its type lists."""
    found = [word for part in (kind, *typing.get_args(kind)) if typing.get_origin(part) is typing.Literal
             for word in typing.get_args(part)]  # fmt: skip
    for match in re.finditer(rf"\b{name}\b[\"')\]]*\s*(?:==|!=|not in|in)\s*([^\n]*)", source):
        found += re.findall(r"[\"']([\w-]+)[\"']", match[1])
    return found


def _lists(name: str, values: list[Any], source: str) -> list[Any]:
    if values and all(type(value) in (bool, int, float) for value in values):
        changed = [type(value)(1 - value if value in (0, 1) else value / 2) for value in values]
        return [changed, [*changed[:1], *values[1:]], [*values[:-1], *changed[-1:]]]
    if not values:
        return [[0], [1]] if "layer" in name else []
    if not all(value is None or isinstance(value, str) for value in values):
        return []
    found = []
    kinds = _kinds_of_layers(source)
    for kind in kinds:
        rest = values if None not in values else [next(iter(kinds))] * len(values)
        found += [[kind] * len(values), [kind, *rest[1:]], [*rest[:-1], kind]]
    return found


def _kinds_of_layers(source: str) -> list[str]:
    from transformers.configuration_utils import ALLOWED_LAYER_TYPES

    return [kind for kind in ALLOWED_LAYER_TYPES if re.search(rf"[\"']{kind}[\"']", source)]


def _said(value: Any) -> str:
    text = str(value) if not isinstance(value, float) else f"{value:g}"
    return text if len(text) <= 60 else f"{text[:57]}..."
