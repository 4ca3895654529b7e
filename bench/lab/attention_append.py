"""Measures what it costs to store the keys and values of a step's tokens in one layer: in one call,
as the engine does it, and with a call for each token.

Both are measured with the core's call alone, and where torch is installed with the engine's
function around it, which is what a call for each token would cost a model.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from bench.lab.attention_pages import LayerStack, Rows
from dflash_moe.bench.results import timing_fields

# So many times all tokens are stored in one measurement.
REPEATS = 50

Store = Callable[[np.ndarray], None]


@dataclass(slots=True)
class AppendCase:
    """`store` writes as many tokens as there are sequences to one layer, each to its slot."""

    name: str
    through: str
    stack: LayerStack
    tokens: int
    calls: int
    store: Store
    samples_s: list[float] = field(default_factory=list)
    rounds: int | None = None
    offset: int = 0

    @property
    def label(self) -> str:
        """The name of the case in reports of progress."""
        return f"{self.name} {self.stack.kv_dtype} through {self.through}, {self.calls} calls"

    def measure(self, *, keep: bool) -> None:
        """Stores the next tokens of sequences that lie far apart, REPEATS times."""
        apart = self.stack.num_tokens // self.tokens
        samples = []
        for _ in range(REPEATS):
            self.offset = (self.offset + 1) % apart
            slots = np.arange(self.tokens, dtype=np.int64) * apart + self.offset
            started = time.perf_counter()
            self.store(slots)
            samples.append(time.perf_counter() - started)
        if keep:
            self.samples_s += samples

    def row(self) -> dict[str, Any] | None:
        """Returns the result row. `us` is that of all tokens together."""
        if not self.samples_s:
            return None
        timing = timing_fields(self.samples_s, per_round=REPEATS)
        return {
            "name": self.name,
            "through": self.through,
            "kv_dtype": self.stack.kv_dtype,
            "tokens": self.tokens,
            "calls": self.calls,
            "us": timing["median_s"] * 1e6,
            "bytes_per_s": self.tokens * self.stack.shape.token_bytes(self.stack.kv_dtype) / timing["median_s"],
            **timing,
        }

    @staticmethod
    def ratios(cases: Sequence[AppendCase]) -> list[dict[str, Any]]:
        """Returns how many times as fast one call is as a call for each token."""
        rows = [row for case in cases if (row := case.row()) is not None]
        whole = {row["through"]: row for row in rows if row["calls"] == 1}
        return [
            {"kv_dtype": row["kv_dtype"], "through": row["through"], "tokens": row["tokens"],
             "speedup": row["median_s"] / whole[row["through"]]["median_s"]}
            for row in rows if row["calls"] > 1 and row["through"] in whole
        ]  # fmt: skip


def append_cases(stack: LayerStack, tokens: int) -> list[AppendCase]:
    """Returns both ways of storing `tokens` tokens, through the core and through the engine."""
    width = stack.shape.num_kv_heads * stack.shape.head_size
    keys, values = Rows.random(tokens, width, stack.kv_dtype, 5), Rows.random(tokens, width, stack.kv_dtype, 6)
    through = {"core": _core_stores(stack, keys, values)}
    if importlib.util.find_spec("torch") is not None and importlib.util.find_spec("transformers") is not None:
        through["engine"] = _engine_stores(stack, keys, values)
    return [
        AppendCase(name, where, stack, tokens, calls, store)
        for where, stores in through.items()
        for name, calls, store in zip(("append_token_batch", "append_each_token"), (1, tokens), stores, strict=True)
    ]


def _core_stores(stack: LayerStack, keys: Rows, values: Rows) -> tuple[Store, Store]:
    layer = stack.layers[0]

    def together(slots: np.ndarray) -> None:
        layer.append(slots.ctypes.data, len(slots), *keys.described, *values.described)

    def each(slots: np.ndarray) -> None:
        slot, (key, key_stride, dtype), (value, value_stride, _) = slots.ctypes.data, keys.described, values.described
        for at in range(len(slots)):
            layer.append(
                slot + 8 * at, 1, key + key_stride * at, key_stride, dtype, value + value_stride * at, value_stride, dtype
            )

    return together, each


def _engine_stores(stack: LayerStack, keys: Rows, values: Rows) -> tuple[Store, Store]:
    import torch

    from dflash_moe.operators.paged_attention import append

    layer, shape = stack.layers[0], stack.shape

    def states(rows: Rows) -> Any:
        """Returns [1, num_kv_heads, num_rows, head_size], as attention modules have them."""
        is_bits = rows.dtype == "bf16"
        tensor = torch.from_numpy(rows.array.view(np.int16) if is_bits else rows.array)
        tensor = tensor.view(torch.bfloat16) if is_bits else tensor
        return tensor.view(1, -1, shape.num_kv_heads, shape.head_size).transpose(1, 2)

    key, value = states(keys), states(values)

    def together(slots: np.ndarray) -> None:
        append(layer, torch.from_numpy(slots), key, value)

    def each(slots: np.ndarray) -> None:
        every = torch.from_numpy(slots)
        for at in range(len(slots)):
            append(layer, every[at : at + 1], key[:, :, at : at + 1], value[:, :, at : at + 1])

    return together, each
