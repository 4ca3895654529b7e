"""The format of a file of panels: consecutive experts of one layer, each in one piece that is read
or mapped as it lies.

A prefix of 64 bytes (magic, version, length and BLAKE3 of the payload) comes before the payload,
JSON of a closed schema, which is padded to 4 KiB. Then come the pieces, ascending, at multiples of
4 KiB, the granularity of pages and of O_DIRECT. The file's name is the BLAKE3 of the payload, so
that header and name vouch for each other, and the payload's sums for the pieces.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import os
import struct
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from blake3 import blake3

from dflash_moe.errors import CheckpointError
from dflash_moe.store import closed_json
from dflash_moe.store.folder import MENDED

MAGIC = b"DFLPANEL"
FILE_VERSION = 1
SUFFIX = ".panels"
# Magic, version, bytes of the payload, its BLAKE3; the rest is zeros.
PREFIX = struct.Struct("<8sII32s16s")
BLOCK_BYTES = 4096
# A header of 4,096 experts takes half of this.
MAX_PAYLOAD_BYTES = 1 << 20
MAX_EXPERTS = 4096
# Files are cut near this size: large enough that a model of 16 GB has 250 of them, small enough
# that one is packed and written within a second, and removed without losing much.
PANEL_FILE_BYTES = 64 << 20
MAX_EXPERTS_IN_FILE = 1024
# No expert of a known model takes a thousandth of it; sums of such sizes stay exact in JSON.
MAX_PIECE_BYTES = 1 << 40
MAX_SIZE = 1 << 24

_FORMAT = closed_json.matching(r"[a-z0-9_]{1,32}")
_HEX_64 = closed_json.matching(r"[0-9a-f]{64}")
_LAYOUT = {
    "version": closed_json.whole(1, (1 << 31) - 1),
    "width": closed_json.whole(1, 1024),
    "order": closed_json.one_of("plain", "bf16_pairs"),
    "gate_up": _FORMAT,
    "down": _FORMAT,
    "expert_bytes": closed_json.whole(1, MAX_PIECE_BYTES),
    "bias_bytes": closed_json.whole(0, MAX_PIECE_BYTES),
}
_SHAPE = {
    "in_size": closed_json.whole(1, MAX_SIZE),
    "intermediate_size": closed_json.whole(1, MAX_SIZE),
    "out_size": closed_json.whole(1, MAX_SIZE),
    "num_matrices": closed_json.whole(1, 2),
}
_EXPERT = closed_json.row_of(
    closed_json.whole(BLOCK_BYTES, MAX_PIECE_BYTES * MAX_EXPERTS),
    closed_json.whole(1, 2 * MAX_PIECE_BYTES),
    closed_json.matching(r"[0-9a-f]{16}"),
    closed_json.whole(0, (1 << 32) - 1),
    _HEX_64,
)
_PAYLOAD = {
    "layout": lambda value: bool(closed_json.fields(value, _LAYOUT, "layout")),
    "shape": lambda value: bool(closed_json.fields(value, _SHAPE, "shape")),
    "model": closed_json.matching(r"[!-~]{1,128}"),
    "layer": _HEX_64,
    "first": closed_json.whole(0, MAX_SIZE),
    "experts": closed_json.list_of(_EXPERT, 1, MAX_EXPERTS),
}


@dataclass(frozen=True, slots=True)
class PanelLayout:
    """How the panels of an expert lie in its piece. Machines and kernel sets that agree in all of
    it share files.
    """

    # The core's number for the bytes of all layouts, and the outputs of one panel.
    version: int
    width: int
    order: str  # "plain" or "bf16_pairs"
    # Resident formats of the matrices.
    gate_up: str
    down: str
    # Of one expert: all its panels, and its biases behind them.
    expert_bytes: int
    bias_bytes: int

    @property
    def piece_bytes(self) -> int:
        """The bytes of one expert, without what fills its last block."""
        return self.expert_bytes + self.bias_bytes

    def __str__(self) -> str:
        return "-".join(map(str, asdict(self).values()))


@dataclass(frozen=True, slots=True)
class PanelShape:
    """The sizes of an expert's matrices, in elements. Without a gate there is one in front."""

    in_size: int
    intermediate_size: int
    out_size: int
    num_matrices: int  # 1 or 2 that read the input


@dataclass(frozen=True, slots=True)
class StoredExpert:
    """One expert of a file: where its piece lies, and what vouches for it."""

    offset: int
    num_bytes: int
    content_checksum: int  # of its source, 64 bits
    panels_sum: int  # of its piece, 32 bits
    source: str  # BLAKE3 of its source's bytes, in hexadecimal


@dataclass(frozen=True, slots=True)
class PanelGroup:
    """The experts that one file is to hold: `count` of them from the id `first`, of one layer."""

    layer: str  # 64 hexadecimal digits that name all experts of the layer
    first: int
    count: int
    layout: PanelLayout
    shape: PanelShape

    @property
    def key(self) -> str:
        """What an index calls the group."""
        return f"{self.layer}/{self.first}+{self.count}/{self.layout}"

    @property
    def stride_bytes(self) -> int:
        """The distance between the pieces of two experts."""
        return in_blocks(self.layout.piece_bytes)


@dataclass(frozen=True, slots=True)
class PanelHeader:
    """What a file says of itself."""

    layout: PanelLayout
    shape: PanelShape
    model: str
    layer: str
    first: int
    experts: tuple[StoredExpert, ...]

    def difference(self, group: PanelGroup, model: str) -> str:
        """Returns a clause on where this is not what `group` of a model needs, empty where it
        is.
        """
        found = (self.layout, self.shape, self.model, self.layer, self.first, len(self.experts))
        wanted = (group.layout, group.shape, model, group.layer, group.first, group.count)
        names = ("layout", "shape", "model", "layer", "first", "count")
        for name, one, other in zip(names, found, wanted, strict=True):
            if one != other:
                return f"{name} is {one}, expected {other}"
        return ""


def in_blocks(num_bytes: int) -> int:
    """Returns the bytes of the blocks that so many bytes take."""
    return -(-num_bytes // BLOCK_BYTES) * BLOCK_BYTES


def experts_per_file(piece_bytes: int, num_experts: int) -> int:
    """Returns n, by which a layer's experts are cut into files: expert e is in file e // n,
    whichever experts a worker holds. `piece_bytes` are those of one expert.
    """
    return min(max(1, PANEL_FILE_BYTES // in_blocks(piece_bytes)), MAX_EXPERTS_IN_FILE, num_experts)


def first_offset(group: PanelGroup, model: str) -> int:
    """Returns where the first piece lies. Headers of the group are no longer, whatever its sums."""
    longest = StoredExpert(MAX_PIECE_BYTES * MAX_EXPERTS, 2 * MAX_PIECE_BYTES, 0, (1 << 32) - 1, "0" * 64)
    header = PanelHeader(group.layout, group.shape, model, group.layer, group.first, (longest,) * group.count)
    return in_blocks(PREFIX.size + len(_payload(header)))


def encode_header(header: PanelHeader) -> tuple[str, bytes]:
    """Returns the name of a file and the bytes with which it begins, without padding. Raises
    ValueError for what no header may hold.
    """
    payload = _payload(header)
    _decode_payload(payload)
    digest = blake3(payload).digest()
    return f"{digest.hex()}{SUFFIX}", PREFIX.pack(MAGIC, FILE_VERSION, len(payload), digest, bytes(16)) + payload


def read_header(descriptor: int, path: Path) -> PanelHeader:
    """Reads the header of an open file, whose name is that of `path`. Raises CheckpointError naming
    the path where anything in it is not as it must be, or a piece would lie outside the file.
    """
    try:
        magic, version, num_bytes, digest, rest = PREFIX.unpack(read_at(descriptor, PREFIX.size, 0))
        if magic != MAGIC or any(rest):
            raise ValueError(f"it begins with {magic!r}, expected {MAGIC!r}")
        if version != FILE_VERSION:
            raise ValueError(f"its version is {version}, this program reads {FILE_VERSION}")
        if num_bytes > MAX_PAYLOAD_BYTES:
            raise ValueError(f"its header has {num_bytes} bytes, at most {MAX_PAYLOAD_BYTES} are read")
        payload = bytes(read_at(descriptor, num_bytes, PREFIX.size))
        found = blake3(payload).digest()
        if found != digest or path.name != f"{digest.hex()}{SUFFIX}":
            says = f"the header says {digest.hex()}, the name must be the same"
            raise ValueError(f"its header's BLAKE3 is {found.hex()}, {says}")
        header = _decode_payload(payload)
        end = in_blocks(header.experts[-1].offset + header.experts[-1].num_bytes)
        if header.experts[0].offset < PREFIX.size + num_bytes:
            raise ValueError(f"its first piece is at {header.experts[0].offset}, within the header")
        if os.fstat(descriptor).st_size != end:
            raise ValueError(f"it has {os.fstat(descriptor).st_size} bytes, expected {end}")
    except (ValueError, OSError) as error:
        raise CheckpointError(f"{path}: {error}; {MENDED}") from None
    return header


def read_at(descriptor: int, num_bytes: int, offset: int) -> memoryview:
    """Reads so many bytes. Raises ValueError where the file ends before, and OSError."""
    found = memoryview(bytearray(num_bytes))
    done = 0
    while done < num_bytes:
        count = os.preadv(descriptor, [found[done:]], offset + done)
        if count == 0:
            raise ValueError(f"it ends at byte {offset + done}, expected {offset + num_bytes} at least")
        done += count
    return found


def _payload(header: PanelHeader) -> bytes:
    fields = asdict(header)
    fields["experts"] = [
        [one.offset, one.num_bytes, f"{one.content_checksum:016x}", one.panels_sum, one.source] for one in header.experts
    ]
    return closed_json.encode(fields)


def _decode_payload(payload: bytes) -> PanelHeader:
    value = closed_json.fields(closed_json.decode(payload), _PAYLOAD, "its header")
    layout, shape = PanelLayout(**value["layout"]), PanelShape(**value["shape"])
    experts = tuple(StoredExpert(row[0], row[1], int(row[2], 16), *row[3:]) for row in value["experts"])
    _check_places(experts, layout)
    return PanelHeader(layout, shape, value["model"], value["layer"], value["first"], experts)


def _check_places(experts: Sequence[StoredExpert], layout: PanelLayout) -> None:
    free: Any = BLOCK_BYTES
    for number, one in enumerate(experts):
        if one.num_bytes != layout.piece_bytes:
            raise ValueError(f"its piece {number} has {one.num_bytes} bytes, its layout {layout.piece_bytes}")
        if one.offset % BLOCK_BYTES or one.offset < free:
            wanted = f"a multiple of {BLOCK_BYTES} from {free} on"
            raise ValueError(f"its piece {number} is at {one.offset}, expected {wanted}")
        free = one.offset + one.num_bytes
