"""Makes a checkpoint of the first layers of another one, without copying weights: a folder with a
changed configuration and links to the files. Layers behind them are in the files and no part of the
model. It is for measurements of models that memory does not hold whole.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import json
import struct
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dflash_moe.errors import ConfigError
from dflash_moe.model.checkpoint import Checkpoint
from dflash_moe.model.formats.gguf_header import read_gguf_header
from dflash_moe.model.gguf_architectures.record import GgufFile

# The type of 32-bit counts in the metadata of GGUF files.
_UINT32 = 4


@contextmanager
def first_layers(path: Path, num_layers: int) -> Iterator[Path]:
    """Gives the block the path of a checkpoint with the first `num_layers` decoder layers of that
    at `path`. Raises ConfigError where it has fewer, or is a GGUF file of several parts.
    """
    checkpoint = Checkpoint.open(path)
    with tempfile.TemporaryDirectory(prefix="dflash_layers_") as folder:
        made = Path(folder) / checkpoint.path.stem
        made.mkdir()
        cut = _cut if checkpoint.metadata is None else _cut_gguf
        yield cut(checkpoint, num_layers, made)


def _cut(checkpoint: Checkpoint, num_layers: int, folder: Path) -> Path:
    config = checkpoint.config()
    for owner in (config, config.get("text_config")):
        if isinstance(owner, dict) and isinstance(total := owner.get("num_hidden_layers"), int):
            _check(checkpoint, num_layers, total)
            # What is said of each layer is said of the first ones.
            owner |= {key: value[:num_layers] for key, value in owner.items() if _is_of_layers(value, total)}
            owner["num_hidden_layers"] = num_layers
            break
    else:
        raise ConfigError(f"--layers: {checkpoint.path / 'config.json'} has no num_hidden_layers")
    for file in checkpoint.path.iterdir():
        if file.name != "config.json":
            (folder / file.name).symlink_to(file.resolve())
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def _is_of_layers(value: Any, total: int) -> bool:
    return isinstance(value, list) and len(value) == total


def _cut_gguf(checkpoint: Checkpoint, num_layers: int, folder: Path) -> Path:
    """Writes a first part that has the metadata alone, and has the file be the second one."""
    num_parts = len(checkpoint.files)
    if num_parts > 1:
        remedy = "join them by `llama-gguf-split --merge`"
        raise ConfigError(f"--layers: {checkpoint.path} is one of {num_parts} parts; {remedy}")
    name = str(checkpoint.config()["general.architecture"])
    file = GgufFile(checkpoint, name)
    _check(checkpoint, num_layers, file.num_layers())
    predicting = file.value("block_count") - file.num_layers()
    end = read_gguf_header(checkpoint.path, 0).metadata_end
    with checkpoint.path.open("rb") as stream:
        head = bytearray(stream.read(end))
    # Behind the magic and the version is the number of tensors.
    struct.pack_into("<Q", head, 8, 0)
    key = f"{name}.block_count".encode()
    entry = struct.pack("<Q", len(key)) + key + struct.pack("<I", _UINT32)
    at = head.find(entry)
    if at < 0:
        raise ConfigError(f"--layers: {checkpoint.path}: metadata {name}.block_count is no 32-bit count")
    struct.pack_into("<I", head, at + len(entry), num_layers + predicting)
    first = folder / f"{checkpoint.path.stem}-00001-of-00002.gguf"
    first.write_bytes(head)
    (folder / f"{checkpoint.path.stem}-00002-of-00002.gguf").symlink_to(checkpoint.path.resolve())
    return first


def _check(checkpoint: Checkpoint, num_layers: int, total: int) -> None:
    if num_layers > total:
        raise ConfigError(f"--layers {num_layers}: {checkpoint.path} has {total} layers")
