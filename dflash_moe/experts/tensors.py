"""Binds torch, NumPy and DLPack tensors of the processor to the one value that a call travels as,
and makes a result of the same kind.

torch is looked up only if the caller already imported it. Rows with a stride are taken as they are,
and are copied only where the elements of a row are not adjacent. This is the hot path, so that each
kind has one function without loops and without temporary objects but the result.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from dflash_moe import _core
from dflash_moe.errors import ConfigError, UnsupportedError
from dflash_moe.experts.layer_table import LayerShape

# Binding makes three things of a call: the tensor that will be the result, the tensors as the core
# takes them, and the function that copies the result there after the call, or None where the core
# writes it there itself.
BoundCall = tuple[Any, _core.TokenBatch, Callable[[], None] | None]

_NUMPY_DTYPES = {"float32": "f32", "float16": "f16", "bfloat16": "bf16", "int32": "i32", "int64": "i64"}
ITEM_BYTES = {"f32": 4, "f16": 2, "bf16": 2, "i32": 4, "i64": 8}
FLOATS = ("f32", "f16", "bf16")
INTS = ("i32", "i64")


class HostTensors:
    """Binds the tensors of calls of a host that computes on its processor. Any thread may call."""

    def __init__(self) -> None:
        # These three are set once the caller has imported torch; until then no tensor is torch's.
        self._torch: Any = None
        self._tensor_type: Any = ()
        self._torch_dtypes: dict[Any, str] = {}

    def bind(self, layer: LayerShape, hidden_states: Any, topk_ids: Any, topk_weights: Any, out: Any) -> BoundCall:
        """Binds the arguments of `ExpertRuntime.experts`, whose shapes and dtypes apply. The call
        keeps the tensors alive. Raises ConfigError naming argument, shape and dtype, and
        UnsupportedError for tensors of a device.
        """
        if self._torch is None and "torch" in sys.modules:
            self._adopt_torch()
        if isinstance(hidden_states, self._tensor_type):
            return self._bind_torch(layer, hidden_states, topk_ids, topk_weights, out)
        return _bind_others(layer, hidden_states, topk_ids, topk_weights, out)

    def _adopt_torch(self) -> None:
        torch = sys.modules["torch"]
        if not hasattr(torch, "bfloat16"):
            # Another thread is still importing torch.
            return
        names = {"float32": "f32", "float16": "f16", "bfloat16": "bf16", "int32": "i32", "int64": "i64"}
        self._torch_dtypes = {getattr(torch, name): ours for name, ours in names.items()}
        self._tensor_type = torch.Tensor
        self._torch = torch

    def _bind_torch(self, layer: LayerShape, hidden: Any, ids: Any, weights: Any, out: Any) -> BoundCall:
        _, in_size, out_size = layer
        tensor_type, dtypes, torch = self._tensor_type, self._torch_dtypes, self._torch
        if not isinstance(ids, tensor_type) or not isinstance(weights, tensor_type):
            raise ConfigError(_kinds_text(hidden, ids, weights))
        hidden_shape, ids_shape = hidden.shape, ids.shape
        dtype, ids_dtype, weights_dtype = dtypes.get(hidden.dtype, ""), dtypes.get(ids.dtype, ""), dtypes.get(weights.dtype, "")
        check_call(in_size, hidden_shape, ids_shape, weights.shape, dtype, ids_dtype, weights_dtype, hidden, ids, weights)
        if not (hidden.is_cpu and ids.is_cpu and weights.is_cpu):
            raise UnsupportedError(
                f"device: hidden_states on {hidden.device}, topk_ids on {ids.device}, topk_weights on {weights.device}; "
                "CPU tensors are expected; for others name their device in host.device of the topology"
            )
        if not (hidden.layout is ids.layout is weights.layout is torch.strided):
            raise ConfigError(
                f"layout: hidden_states is {hidden.layout}, topk_ids {ids.layout}, topk_weights {weights.layout}; all must be "
                "dense: use .to_dense()"
            )
        if (hidden.requires_grad or weights.requires_grad) and torch.is_grad_enabled():
            raise ConfigError("hidden_states or topk_weights require grad; experts() has no backward: use torch.no_grad()")
        # The memory of lazily negated tensors holds the opposite numbers.
        if hidden.is_neg() or weights.is_neg() or ids.is_neg():
            hidden, ids, weights = hidden.resolve_neg(), ids.resolve_neg(), weights.resolve_neg()
        num_tokens = hidden_shape[0]
        item_bytes = ITEM_BYTES[dtype]
        row_stride, element_stride = hidden.stride()
        if (element_stride != 1 and in_size != 1) or (row_stride < in_size and num_tokens > 1):
            hidden = hidden.contiguous()
            row_stride = in_size
        if not ids.is_contiguous():
            ids = ids.contiguous()
        if not weights.is_contiguous():
            weights = weights.contiguous()
        if out is None:
            # new_empty() takes the device of `hidden`, never torch's default device.
            out = hidden.new_empty((num_tokens, out_size))
        elif not isinstance(out, tensor_type) or not out.is_cpu:
            raise ConfigError(f"out: found {type(out).__name__}, expected a CPU tensor like hidden_states")
        elif out.dtype != hidden.dtype or tuple(out.shape) != (num_tokens, out_size) or not out.is_contiguous():
            raise ConfigError(out_text(tuple(out.shape), out.dtype, (num_tokens, out_size), hidden.dtype))
        elif out.is_neg() or (out.requires_grad and torch.is_grad_enabled()):
            raise ConfigError("out: found a lazily negated tensor or one that requires grad, expected plain memory to write to")
        batch = _core.TokenBatch(
            hidden.data_ptr(), row_stride * item_bytes, dtype, num_tokens, ids_shape[1], ids.data_ptr(), ids_dtype == "i64",
            weights.data_ptr(), weights_dtype, out.data_ptr(), (hidden, ids, weights, out),
        )  # fmt: skip
        return out, batch, None


def check_call(
    in_size: int,
    hidden_shape: Any,
    ids_shape: Any,
    weights_shape: Any,
    dtype: str,
    ids_dtype: str,
    weights_dtype: str,
    hidden: Any,
    ids: Any,
    weights: Any,
) -> None:
    """Checks the shapes and dtypes of a call, in one condition where all is well. Raises
    ConfigError that names the argument, what was found and what is expected. The last three
    arguments are the tensors themselves, for the message only.
    """
    if (
        len(hidden_shape) == 2
        and hidden_shape[1] == in_size
        and len(ids_shape) == 2
        and ids_shape[0] == hidden_shape[0]
        and ids_shape[1] > 0
        and weights_shape == ids_shape
        and dtype in FLOATS
        and ids_dtype in INTS
        and weights_dtype in FLOATS
    ):
        return
    for name, tensor, ours, allowed in (
        ("hidden_states", hidden, dtype, FLOATS),
        ("topk_ids", ids, ids_dtype, INTS),
        ("topk_weights", weights, weights_dtype, FLOATS),
    ):
        if ours not in allowed:
            raise ConfigError(f"{name}: found dtype {getattr(tensor, 'dtype', ours)}, expected one of {', '.join(allowed)}")
    if len(hidden_shape) != 2 or hidden_shape[1] != in_size:
        raise ConfigError(f"hidden_states: found shape {list(hidden_shape)}, expected [num_tokens, {in_size}]")
    if len(ids_shape) != 2 or ids_shape[0] != hidden_shape[0] or ids_shape[1] == 0:
        raise ConfigError(f"topk_ids: found shape {list(ids_shape)}, expected [{hidden_shape[0]}, top_k] with top_k >= 1")
    raise ConfigError(f"topk_weights: found shape {list(weights_shape)}, expected {list(ids_shape)} like topk_ids")


def _kinds_text(hidden: Any, ids: Any, weights: Any) -> str:
    return (
        f"tensors must be of one kind: hidden_states is {type(hidden).__name__}, topk_ids {type(ids).__name__}, "
        f"topk_weights {type(weights).__name__}"
    )


def out_text(found_shape: tuple[int, ...], found_dtype: Any, shape: tuple[int, ...], dtype: Any) -> str:
    return (
        f"out: found shape {list(found_shape)} dtype {found_dtype}, expected a contiguous tensor of shape {list(shape)} "
        f"dtype {dtype}"
    )


class _View:
    """A borrowed array of the CPU: its address, shape, strides in elements, and dtype. `owner`
    keeps it alive. `is_odd` says that its strides are no whole numbers of elements.
    """

    __slots__ = ("address", "dtype", "is_odd", "owner", "shape", "strides")

    def __init__(self, name: str, value: Any) -> None:
        if isinstance(value, np.ndarray):
            self.address = int(value.__array_interface__["data"][0])
            self.shape = value.shape
            item_bytes = value.itemsize
            # An array may be one field of records, as in `records["weight"]`. Its elements are then
            # a record's bytes apart, which need not be a multiple of their own size, and need not
            # be aligned. Strides are counted in elements below, so such an array is copied first.
            self.is_odd = self.address % item_bytes != 0 or any(stride % item_bytes for stride in value.strides)
            self.strides = tuple(stride // item_bytes for stride in value.strides)
            self.dtype = _NUMPY_DTYPES.get(value.dtype.name, value.dtype.name)
            if not value.dtype.isnative:
                raise ConfigError(f"{name}: found a byte-swapped dtype {value.dtype}, expected native byte order")
            self.owner: object = value
            return
        if not hasattr(value, "__dlpack__"):
            raise ConfigError(f"{name}: found {type(value).__name__}, expected a torch, NumPy or DLPack tensor")
        self.is_odd = False
        view = _core.DlpackView(value.__dlpack__())
        self.address, self.shape, self.strides, self.dtype = view.address, view.shape, view.strides, view.dtype
        self.owner = (view, value)

    @property
    def is_contiguous(self) -> bool:
        if self.is_odd:
            return False
        expected = 1
        for extent, stride in zip(reversed(self.shape), reversed(self.strides), strict=True):
            if extent > 1 and stride != expected:
                return False
            expected *= extent
        return True


def _contiguous(name: str, value: Any, view: _View) -> _View:
    if view.is_contiguous:
        return view
    if isinstance(value, np.ndarray):
        return _View(name, np.ascontiguousarray(value))
    raise UnsupportedError(f"{name}: found strides {list(view.strides)}; make the DLPack tensor contiguous first")


def _bind_others(layer: LayerShape, hidden: Any, ids: Any, weights: Any, out: Any) -> BoundCall:
    _, in_size, out_size = layer
    rows, id_view, weight_view = _View("hidden_states", hidden), _View("topk_ids", ids), _View("topk_weights", weights)
    check_call(
        in_size, rows.shape, id_view.shape, weight_view.shape, rows.dtype, id_view.dtype, weight_view.dtype, rows, id_view,
        weight_view,
    )  # fmt: skip
    num_tokens = rows.shape[0]
    row_stride, element_stride = rows.strides
    if rows.is_odd or (element_stride != 1 and in_size != 1) or (row_stride < in_size and num_tokens > 1):
        rows = _contiguous("hidden_states", hidden, rows)
        row_stride = in_size
    id_view, weight_view = _contiguous("topk_ids", ids, id_view), _contiguous("topk_weights", weights, weight_view)
    result, out_view = _output(hidden, rows.dtype, (num_tokens, out_size), out)
    batch = _core.TokenBatch(
        rows.address, row_stride * ITEM_BYTES[rows.dtype], rows.dtype, num_tokens, id_view.shape[1], id_view.address,
        id_view.dtype == "i64", weight_view.address, weight_view.dtype, out_view.address,
        (rows.owner, id_view.owner, weight_view.owner, out_view.owner),
    )  # fmt: skip
    return result, batch, None


def _output(hidden: Any, dtype: str, shape: tuple[int, int], out: Any) -> tuple[Any, _View]:
    if out is not None:
        view = _View("out", out)
        if view.dtype != dtype or tuple(view.shape) != shape or not view.is_contiguous:
            raise ConfigError(out_text(tuple(view.shape), view.dtype, shape, dtype))
        if isinstance(out, np.ndarray) and not out.flags.writeable:
            raise ConfigError("out: found a read-only array, expected a writable one")
        return out, view
    if isinstance(hidden, np.ndarray):
        made = np.empty(shape, dtype=hidden.dtype)
        return made, _View("out", made)
    names = {"f32": np.float32, "f16": np.float16}
    namespace = getattr(hidden, "__array_namespace__", None)
    if dtype not in names:
        raise UnsupportedError(f"out: a {dtype} result for {type(hidden).__name__} must be given by the caller as out=")
    array = np.empty(shape, dtype=names[dtype])
    # The result shares the array's memory, so it is complete once the call is.
    result = namespace().from_dlpack(array) if namespace is not None else array
    return result, _View("out", array)
