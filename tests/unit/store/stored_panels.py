"""A small checkpoint and panels of it, for the tests of the store.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import os
from pathlib import Path
from zlib import crc32

from blake3 import blake3

from dflash_moe.model.checkpoint_files import SeenFiles
from dflash_moe.store.panel_file import PanelGroup, PanelLayout, PanelShape
from dflash_moe.store.panel_store import CheckpointPanels, ExpertPieces, PanelStore

LAYOUT = PanelLayout(1, 16, "plain", "q4_k", "q6_k", 6000, 24)
SHAPE = PanelShape(64, 32, 64, 2)
MODEL = "f" * 64
GROUP = PanelGroup(blake3(b"layer 0").hexdigest(), 4, 3, LAYOUT, SHAPE)


def group(number: int) -> PanelGroup:
    """Returns the group of another layer."""
    return PanelGroup(blake3(b"layer %d" % number).hexdigest(), 4, 3, LAYOUT, SHAPE)


def piece(expert: int) -> bytes:
    return bytes((expert * 7 + at) % 251 for at in range(LAYOUT.piece_bytes))


def pieces(expert: int) -> ExpertPieces:
    data = piece(expert)
    source = blake3(b"source %d" % expert).hexdigest()
    return ExpertPieces([memoryview(data)[:6000], data[6000:6012], data[6012:], b""], expert, crc32(data), source)


def never() -> bool:
    return False


def at_once() -> bool:
    return True


def make_checkpoint(folder: Path) -> Path:
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(bytes(100))
    return folder


def opened(tmp_path: Path, *, max_bytes: int | None = 1 << 30) -> PanelStore:
    return PanelStore.open(tmp_path / "store", max_bytes=max_bytes, allow_network=False)


def of_model(store: PanelStore, checkpoint: Path) -> CheckpointPanels:
    return store.of_checkpoint(SeenFiles(checkpoint), MODEL, checkpoint)


def files(tmp_path: Path) -> list[str]:
    """Returns the names of all files in the store but for the lock."""
    found = [path for path in (tmp_path / "store").rglob("*") if path.is_file() and path.name != "lock"]
    return sorted(path.name for path in found)


def overwrite(path: Path, offset: int, data: bytes) -> None:
    """Changes bytes of a file that nobody may write."""
    os.chmod(path, 0o600)
    with open(path, "r+b") as file:
        file.seek(offset)
        file.write(data)
    os.chmod(path, 0o400)
