"""What a checkpoint says of how to generate with it: the ids of tokens that end an answer, and the
sampling its makers recommend. Read from generation_config.json or a GGUF file's metadata.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dflash_moe.errors import CheckpointError, shown
from dflash_moe.model.checkpoint import MAX_CONFIG_BYTES
from dflash_moe.model.checkpoint_files import find_gguf, read_json
from dflash_moe.model.formats.gguf_header import read_gguf_header
from dflash_moe.model.refusals import is_file

FILE_NAME = "generation_config.json"
# Files of chat models name the end of a turn or message beside the end of text.
_GGUF_STOPS = tuple(f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom"))
_GGUF_SAMPLING = {"temp": "temperature", "top_p": "top_p", "top_k": "top_k", "min_p": "min_p"}
_SAMPLING = tuple(_GGUF_SAMPLING.values())


@dataclass(frozen=True, slots=True)
class GenerationSettings:
    """`sampling` has the fields of `SamplingParams` that are recommended, and is empty where
    nothing is.
    """

    stop_token_ids: frozenset[int] = frozenset()
    sampling: Mapping[str, float] = field(default_factory=dict)


def read_generation_settings(path: Path) -> GenerationSettings:
    """Returns the settings of the checkpoint at `path`. Raises CheckpointError naming file, key and
    value for what is no token id or no number.
    """
    parts = find_gguf(path)
    if parts:
        metadata, origin = read_gguf_header(parts[0], 0).metadata, str(parts[0])
        stops = [(key, metadata[key]) for key in _GGUF_STOPS if key in metadata]
        stored = {name: metadata.get(f"general.sampling.{key}") for key, name in _GGUF_SAMPLING.items()}
    elif is_file(path / FILE_NAME):
        found, origin = read_json(path / FILE_NAME, MAX_CONFIG_BYTES), str(path / FILE_NAME)
        listed = found.get("eos_token_id")
        stops = [("eos_token_id", one) for one in (listed if isinstance(listed, list) else [listed]) if one is not None]
        # Where sampling is off the other values are transformers' own.
        stored = {name: found.get(name) for name in _SAMPLING} if found.get("do_sample") is True else {}
    else:
        return GenerationSettings()
    return GenerationSettings(frozenset(_token_id(origin, *one) for one in stops), _numbers(origin, stored))


def _token_id(origin: str, key: str, value: Any) -> int:
    if type(value) is not int or value < 0:
        raise CheckpointError(f"{origin}: {key} is {shown(value)}, expected the id of a token")
    return value


def _numbers(origin: str, stored: Mapping[str, Any]) -> dict[str, float]:
    given = {name: value for name, value in stored.items() if value is not None}
    for name, value in given.items():
        if type(value) not in (int, float):
            raise CheckpointError(f"{origin}: {name} is {shown(value)}, expected a number")
    return given
