"""Cosines and sines per sequence. A model computes them for all rows of a forward at once, and some
rotary types then look at the largest position among these rows; packed with others, a row would get
other values. Here each position is computed by the model's own module as part of its own sequence,
whose length is fixed when it is admitted.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import copy
import threading
from hashlib import blake2b
from typing import Any

import torch
from torch import nn

from dflash_moe.operators.step_context import StepContext, running_step

# Positions are computed in chunks of this many, always in tensors of the same shape, so that a
# position's values never depend on how many others are computed with it.
CHUNK = 256

# What a rotary module returns: one tensor or several, each [1, num_rows, ...].
Tables = tuple[torch.Tensor, ...]

# What a layer passes beside hidden states and positions, such as its type.
Arguments = tuple[Any, ...]

# Asks a module for float32.
_FLOAT32 = torch.zeros(1, 1, 1)

# The digests of so many chunks are kept, of 16 bytes for each block.
_MAX_DIGESTED = 1 << 12


class RotaryTables:
    """The tables of one rotary module, whose forward `stand_in` has give them."""

    def __init__(self, module: nn.Module) -> None:
        self._pristine = copy.deepcopy(module)
        self._device = next((buffer.device for buffer in module.buffers()), torch.device("cpu"))
        self._chunks: dict[tuple[Any, ...], tuple[Tables, bool]] = {}
        # What layers may pass, and whether that is known. Tables of unlike arguments differ.
        self._kinds = self._find_kinds()
        self._are_kinds_known = bool(self._kinds)
        # Whether the module wants more than hidden states and positions, such as the type of a
        # layer: then there is no single table for all layers.
        self.wants_arguments = () not in self._kinds
        # Whether a position's values differ between sequences that may become unlike long: then
        # their keys do too. Else all sequences read one table of all positions.
        self.depends_on_length = not self._are_kinds_known or self._looks_at_others()
        # Of each block, by length, chunk and tokens of a block, which divide a chunk.
        self._digests: dict[tuple[int, int, int], list[bytes]] = {}
        # Whether a forward pass has asked for its tables.
        self.is_used = False
        self._shared: dict[tuple[Any, ...], _SharedTables] = {}
        # Two halves of a step read and extend the same tables.
        self._lock = threading.Lock()

    def of(self, step: StepContext, x: torch.Tensor, *arguments: Any, **options: Any) -> Any:
        """Returns what the module would for each sequence of a step alone, given `x` and what
        follows positions.
        """
        self.is_used = True
        if step.last_position is not None:
            positions = torch.from_numpy(step.positions)
            tables, is_tuple = self._compute(x, positions, step.last_position, arguments, options)
            return tables if is_tuple else tables[0]
        with self._lock:
            if self._are_kinds_known and (*arguments, *options.values()) not in self._kinds:
                # Nobody has looked what these tables depend on, so each length has its own.
                self._are_kinds_known, self.wants_arguments, self.depends_on_length = False, True, True
            select = self._join_chunks if self.depends_on_length else self._select
            tables, is_tuple = select(step, x, arguments, options)
        return tables if is_tuple else tables[0]

    def shared(self, step: StepContext) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Returns the cosines and sines of all positions from 0 on that the step needs, dense
        float32 [num_positions, width], in which its rows are found by their positions. None where
        they have tables of their own: `cos_sin` gives these.
        """
        if step.last_position is not None:
            return None
        return self.up_to(_positions_of(step))

    def up_to(self, num_positions: int) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Returns the tables of at least so many positions from 0 on, as `shared` does for those of
        a step.
        """
        if self.depends_on_length:
            return None
        self.is_used = True
        with self._lock:
            shared = self._up_to(num_positions, _FLOAT32, (), {})
        if not shared.is_tuple or any(table.dtype != torch.float32 or table.ndim != 3 for table in shared.tables):
            return None
        cos, sin = shared.tables
        return cos[0, : shared.num_positions], sin[0, : shared.num_positions]

    def _select(self, step: StepContext, x: torch.Tensor, arguments: Any, options: Any) -> tuple[Tables, bool]:
        shared = self._up_to(_positions_of(step), x, arguments, options)
        if len(step.lengths) == 1:
            _, first, count = step.lengths[0]
            return tuple(table[:, first : first + count] for table in shared.tables), shared.is_tuple
        return tuple(table.index_select(1, step.position_ids[0]) for table in shared.tables), shared.is_tuple

    def _up_to(self, num_positions: int, x: torch.Tensor, arguments: Any, options: Any) -> _SharedTables:
        """Returns the tables that all sequences read, grown to so many positions."""
        key = (x.dtype, arguments, tuple(sorted(options.items())))
        shared = self._shared.get(key)
        if shared is None:
            shared = self._shared[key] = _SharedTables()
        while shared.num_positions < max(num_positions, 1):
            shared.append(*self._chunk(x, 0, shared.num_positions // CHUNK, arguments, options))
        return shared

    def _join_chunks(self, step: StepContext, x: torch.Tensor, arguments: Any, options: Any) -> tuple[Tables, bool]:
        if len(self._chunks) > 4 * CHUNK:
            # Tables of lengths that no sequence of this step has are not kept for ever.
            lengths = {length for length, _, _ in step.lengths}
            self._chunks = {key: value for key, value in self._chunks.items() if key[0] in lengths}
        parts: list[list[torch.Tensor]] = []
        is_tuple = True
        for length, first, count in step.lengths:
            at = first
            while at < first + count:
                key = (length, at // CHUNK, x.dtype, arguments, tuple(sorted(options.items())))
                if key not in self._chunks:
                    self._chunks[key] = self._chunk(x, length, at // CHUNK, arguments, options)
                tables, is_tuple = self._chunks[key]
                begin = at % CHUNK
                size = min(CHUNK - begin, first + count - at)
                parts.append([table[:, begin : begin + size] for table in tables])
                at += size
        columns = zip(*parts, strict=True)
        return tuple(column[0] if len(parts) == 1 else torch.cat(column, dim=1) for column in columns), is_tuple

    def cos_sin(self, step: StepContext) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the cosines and sines of a step in float32, each [num_rows, width]. A module
        may give both as one tensor of complex numbers.
        """
        tables = self.of(step, _FLOAT32)
        cos, sin = tables if isinstance(tables, tuple) else (tables.real, tables.imag)
        return cos[0], sin[0]

    def block_digest(self, length: int, block: int, block_tokens: int) -> bytes:
        """Names what the positions of a full block are rotated by in a sequence that may have
        `length` tokens: equal for two lengths where all their values in the block are.
        """
        if not self._are_kinds_known:
            return length.to_bytes(8, "little")
        per_chunk, chunk = CHUNK // block_tokens, block * block_tokens // CHUNK
        key = (length, chunk, block_tokens)
        if key not in self._digests:
            if len(self._digests) >= _MAX_DIGESTED:
                self._digests.clear()
            self._digests[key] = self._chunk_digests(length, chunk, block_tokens)
        return self._digests[key][block % per_chunk]

    def _chunk_digests(self, length: int, chunk: int, block_tokens: int) -> list[bytes]:
        """Returns the digest of each block of a chunk."""
        # Computed in the chunks in which a forward pass computes them: the shape decides the bits.
        tables = [table for kind in self._kinds for table in self._chunk(_FLOAT32, length, chunk, kind, {})[0]]
        rows = [(torch.view_as_real(table) if table.is_complex() else table).movedim(1, 0).cpu() for table in tables]
        found = []
        for begin in range(0, CHUNK, block_tokens):
            digest = blake2b(digest_size=16)
            for table in rows:
                digest.update(table[begin : begin + block_tokens].contiguous().view(torch.uint8).numpy())
            found.append(digest.digest())
        return found

    def are_alike(self, length: int, other: int) -> bool:
        """Says whether sequences of these lengths are rotated alike where both have positions."""
        return not self.depends_on_length or self._are_alike(length, other)

    def _are_alike(self, length: int, other: int) -> bool:
        # A module may choose its angles by the last position: beyond the length that the model was
        # trained with it takes other ones for all positions. So two lengths are alike if position 1
        # is rotated alike in both. It stands in every row, so that nothing but the last position,
        # which `_compute` appends, tells a length; there are CHUNK rows, as for the tables, because
        # a shape may decide bits.
        positions = torch.ones(CHUNK, dtype=torch.int64)
        for kind in self._kinds:
            near, far = (self._compute(_FLOAT32, positions, max(1, last - 1), kind, {})[0] for last in (length, other))
            if any(not torch.equal(a, b) for a, b in zip(near, far, strict=True)):
                return False
        return True

    def _chunk(self, x: torch.Tensor, length: int, chunk: int, arguments: Any, options: Any) -> tuple[Tables, bool]:
        positions = torch.arange(chunk * CHUNK, (chunk + 1) * CHUNK)
        if not self.depends_on_length:
            return self._compute(x, positions, 0, arguments, options)
        return self._compute(x, positions.clamp(max=length - 1), length - 1, arguments, options)

    def _compute(
        self, x: torch.Tensor, positions: torch.Tensor, last: int, arguments: Any, options: Any
    ) -> tuple[Tables, bool]:
        # A module of some types writes to itself, so that each computation gets a fresh copy; to
        # its configuration none does.
        config = getattr(self._pristine, "config", None)
        module = copy.deepcopy(self._pristine, {} if config is None else {id(config): config})
        given = torch.cat((positions, torch.tensor([max(last, int(positions[-1]))])))[None].to(self._device)
        out = module.forward(x[:1, :1].to(self._device), given, *arguments, **options)
        tables = out if isinstance(out, tuple) else (out,)
        return tuple(table[:, : len(positions)].contiguous() for table in tables), isinstance(out, tuple)

    def _looks_at_others(self) -> bool:
        """Says whether the values of a position depend on the largest one beside it."""
        limits = {
            CHUNK,
            *(int(value) for name, value in vars(self._pristine).items() if "max" in name and isinstance(value, int)),
        }
        config = getattr(self._pristine, "config", None)
        parameters = getattr(config, "rope_parameters", None) or {}
        nested = (
            [parameters, *(value for value in parameters.values() if isinstance(value, dict))]
            if isinstance(parameters, dict)
            else []
        )
        for fields in nested:
            original = fields.get("original_max_position_embeddings")
            limits |= {int(original)} if original else set()
        return any(not self._are_alike(2, 4 * limit + 2) for limit in sorted(limits))

    def _find_kinds(self) -> list[Arguments]:
        """Returns what layers may pass: nothing, or one of the types of layers that the module or
        its configuration names; what the module takes of these.
        """
        config = getattr(self._pristine, "config", None)
        named = getattr(self._pristine, "layer_types", None) or getattr(config, "layer_types", None) or ()
        kinds: list[Arguments] = [(), *((name,) for name in sorted({name for name in named if isinstance(name, str)}))]
        return list(filter(self._takes, kinds))

    def _takes(self, kind: Arguments) -> bool:
        try:
            self._compute(_FLOAT32, torch.ones(CHUNK, dtype=torch.int64), 1, kind, {})
        except Exception:  # noqa: BLE001 - a module of somebody else, asked for what it may not know
            return False
        return True


def _positions_of(step: StepContext) -> int:
    """Returns how many positions from 0 on the sequences of a step have."""
    return max((first + count for _, first, count in step.lengths), default=0)


class _SharedTables:
    """The tables of the positions from 0 on, each in one tensor, so that a step's rows are selected
    at once whatever the number of sequences. They grow by chunks.
    """

    def __init__(self) -> None:
        self.num_positions = 0
        self.tables: Tables = ()  # with room for more positions
        self.is_tuple = True

    def append(self, chunk: Tables, is_tuple: bool) -> None:
        """Appends the tables of the next `CHUNK` positions."""
        begin, end = self.num_positions, self.num_positions + CHUNK
        if not self.tables or self.tables[0].shape[1] < end:
            former = self.tables
            # Tensors of inference mode could not be written outside of it later.
            with torch.inference_mode(False):
                self.tables = tuple(table.new_empty((table.shape[0], 2 * end, *table.shape[2:])) for table in chunk)
            for table, content in zip(self.tables, former, strict=False):
                table[:, :begin] = content
        for table, content in zip(self.tables, chunk, strict=True):
            table[:, begin:end] = content
        self.num_positions, self.is_tuple = end, is_tuple


def find_rotary_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Returns the modules of a model that make cosines and sines of positions, by name."""
    found = {}
    for name, module in model.named_modules():
        buffers = [buffer for buffer in module._buffers if buffer.endswith("inv_freq")]
        if buffers and not any(True for _ in module.children()):
            found[name] = module
    return found


def stand_in(module: nn.Module, tables: RotaryTables) -> None:
    """Has the forward of a rotary module give the tables of the step that a thread computes. A
    model may hold the module in several places and read its attributes, so that it stays and its
    class changes.
    """

    def forward(
        _module: nn.Module, x: torch.Tensor, position_ids: torch.Tensor | None = None, *arguments: Any, **options: Any
    ) -> Any:
        del position_ids  # Those of the step.
        return tables.of(running_step(), x, *arguments, **options)

    kind = type(module)
    module.__class__ = type(kind.__name__, (kind,), {"forward": forward})
