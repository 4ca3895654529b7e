"""The name of an expert's source bytes: equal for equal bytes wherever they lie, another one for
any changed byte, and read without mapping anything.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from dflash_moe.errors import CheckpointError
from dflash_moe.model.checkpoint import Checkpoint
from dflash_moe.store.source_digest import num_experts, source_digest
from dflash_moe.store.stored_experts import never
from dflash_moe.testing.tiny import tiny_checkpoint


def digests(path: Path, spec) -> list[str | None]:
    checkpoint = Checkpoint.open(path)
    return [
        source_digest(checkpoint, layer.ffn, expert, never)
        for layer in spec.layers
        for expert in range(num_experts(checkpoint, layer.ffn))
    ]


def test_equal_bytes_have_one_name_and_every_changed_byte_another(tmp_path: Path) -> None:
    spec = tiny_checkpoint(tmp_path / "model", num_experts=4, num_layers=2)
    first = digests(tmp_path / "model", spec)
    assert len(first) == len(set(first)) == 8
    shutil.copytree(tmp_path / "model", tmp_path / "copy")
    assert digests(tmp_path / "copy", spec) == first
    checkpoint = Checkpoint.open(tmp_path / "copy")
    name = spec.layers[1].ffn.down_tensor.tensor_name(2)
    info = checkpoint.tensors[name]
    for offset in (0, info.num_bytes // 2, info.num_bytes - 1):
        with open(checkpoint.files[info.file], "r+b") as file:
            file.seek(info.offset + offset)
            byte = file.read(1)[0]
            file.seek(-1, 1)
            file.write(bytes([byte ^ 1]))
        changed = digests(tmp_path / "copy", spec)
        assert [one != other for one, other in zip(changed, first, strict=True)] == [place == 6 for place in range(8)]
        with open(checkpoint.files[info.file], "r+b") as file:
            file.seek(info.offset + offset)
            file.write(bytes([byte]))


def test_whoever_is_told_to_end_gets_nothing_and_a_file_cut_off_is_named(tmp_path: Path) -> None:
    spec = tiny_checkpoint(tmp_path / "model")
    checkpoint = Checkpoint.open(tmp_path / "model")
    assert source_digest(checkpoint, spec.layers[0].ffn, 0, lambda: True) is None
    path = checkpoint.files[0]
    with open(path, "r+b") as file:
        file.truncate(path.stat().st_size // 2)
    with pytest.raises(CheckpointError, match=r"ends at byte [0-9]+, its header promises"):
        [source_digest(checkpoint, layer.ffn, 0, never) for layer in spec.layers]
