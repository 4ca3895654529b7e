"""The tensors of a GPU host: their device is opened once, DLPack takes them over, and pinned memory
stages them for the data paths.

A simulated card has no memory of its own, so that tensors of the processor stand in for its
tensors.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dflash_moe import _core
from dflash_moe.errors import ConfigError, UnsupportedError
from dflash_moe.experts.layer_table import LayerShape
from dflash_moe.experts.tensors import ITEM_BYTES, BoundCall, HostTensors, check_call, out_text
from dflash_moe.protocol.devices import DeviceChoice

# The simulator has one device for each vendor, with these numbers.
SIMULATED = {"cuda": 0, "hip": 1}
# These are device types of DLPack, as its DLDeviceType numbers them.
DLPACK_CPU, DLPACK_CUDA = 1, 2
# Each array in a staging block begins at a multiple of this many bytes, a cache line.
ALIGNMENT = 64


def open_host_device(choice: DeviceChoice) -> _core.HostDevice:
    """Opens the device that `host.device` names. Raises ConfigError for one that does not exist,
    and UnsupportedError for one that cannot be used.
    """
    if choice.backend == "sim":
        if choice.device != 0:
            raise ConfigError(
                f"host.device sim:{choice.device} does not exist; the simulator has one card of each vendor, sim:0 with "
                "host.simulate"
            )
        return _core.HostDevice(backend="sim", device=SIMULATED[choice.simulate])
    return _core.HostDevice(backend=choice.backend, device=choice.device)


class DeviceTensors:
    """Binds and stages the tensors of calls on the host's device, which it owns. Any thread may
    call.
    """

    def __init__(self, choice: DeviceChoice) -> None:
        self.choice = choice
        self.device = open_host_device(choice)
        self._host = HostTensors()
        # Tensors are taken over for work on this stream: the device's own, or that of an open step.
        self.stream = self.device.stream
        self._is_simulated = choice.backend == "sim"

    def take_over_for(self, stream: int) -> None:
        """Has tensors from now on made safe for work on this stream. Drivers call CUDA's default
        stream 0, DLPack calls it 1.
        """
        self.stream = 1 if stream == 0 and self.device.dlpack_device[0] == DLPACK_CUDA else stream

    def bind(self, layer: LayerShape, hidden_states: Any, topk_ids: Any, topk_weights: Any, out: Any) -> BoundCall:
        """Binds a call as `HostTensors.bind` does, and takes tensors on the host's device too:
        these are copied to pinned memory, and the last member of the result copies the output back.
        """
        result, batch, is_on_device = self._bind(layer, hidden_states, topk_ids, topk_weights, out)
        if not is_on_device or batch.num_tokens == 0:
            return result, batch, None
        staged, deliver = self._stage(layer, batch)
        return result, staged, deliver

    def bind_for_step(
        self, layer: LayerShape, hidden_states: Any, topk_ids: Any, topk_weights: Any, out: Any
    ) -> tuple[Any, _core.TokenBatch]:
        """Returns the result's tensor, and the call with the addresses where its tensors lie.
        Nothing is staged, because the device itself reads and writes them.
        """
        result, batch, _ = self._bind(layer, hidden_states, topk_ids, topk_weights, out)
        return result, batch

    def _bind(
        self, layer: LayerShape, hidden_states: Any, topk_ids: Any, topk_weights: Any, out: Any
    ) -> tuple[Any, _core.TokenBatch, bool]:
        """Returns the result's tensor, the call with the addresses where its tensors lie, and
        whether these are on the device.
        """
        tensors = (hidden_states, topk_ids, topk_weights)
        if self._is_simulated or all(_dlpack_type(tensor) == DLPACK_CPU for tensor in tensors):
            result, batch, _ = self._host.bind(layer, *tensors, out)
            return result, batch, self._is_simulated
        result, batch = self._bind_on_device(layer, *tensors, out)
        return result, batch, True

    def _stage(self, layer: LayerShape, batch: _core.TokenBatch) -> tuple[_core.TokenBatch, Callable[[], None]]:
        """Copies the inputs of a call to pinned memory. Returns the call with the addresses there,
        and a function that copies its output back to the device.
        """
        row_bytes = layer.in_size * ITEM_BYTES[batch.dtype]
        num_pairs = batch.num_tokens * batch.top_k
        sizes = (
            batch.num_tokens * row_bytes,
            num_pairs * (8 if batch.ids_are_64bit else 4),
            num_pairs * ITEM_BYTES[batch.weights_dtype],
            batch.num_tokens * layer.out_size * ITEM_BYTES[batch.dtype],
        )
        places = [0]
        for size in sizes:
            places.append(places[-1] + -(-size // ALIGNMENT) * ALIGNMENT)
        block = self.device.staging(places[-1])
        rows_at, ids_at, weights_at, out_at = (block.address + place for place in places[:-1])
        pieces = [(batch.topk_ids, ids_at, sizes[1]), (batch.topk_weights, weights_at, sizes[2])]
        if batch.row_stride_bytes == row_bytes or batch.num_tokens == 1:
            pieces.append((batch.hidden_states, rows_at, sizes[0]))
        else:
            pieces += [
                (batch.hidden_states + row * batch.row_stride_bytes, rows_at + row * row_bytes, row_bytes)
                for row in range(batch.num_tokens)
            ]
        self.device.copy_out(pieces)
        staged = _core.TokenBatch(
            rows_at, row_bytes, batch.dtype, batch.num_tokens, batch.top_k, ids_at, batch.ids_are_64bit, weights_at,
            batch.weights_dtype, out_at, (block, batch),
        )  # fmt: skip

        def deliver() -> None:
            """Copies the result to the caller's tensor. `staged` keeps both ends alive."""
            self.device.copy_in([(batch.output, staged.output, sizes[3])])

        return staged, deliver

    def _bind_on_device(self, layer: LayerShape, hidden: Any, ids: Any, weights: Any, out: Any) -> tuple[Any, _core.TokenBatch]:
        _, in_size, out_size = layer
        _refuse_gradients(hidden, weights)
        hidden, ids, weights = _dense(hidden), _dense(ids), _dense(weights)
        views = [self._view(*named) for named in (("hidden_states", hidden), ("topk_ids", ids), ("topk_weights", weights))]
        rows, id_view, weight_view = views
        check_call(
            in_size, rows.shape, id_view.shape, weight_view.shape, rows.dtype, id_view.dtype, weight_view.dtype, hidden, ids,
            weights,
        )  # fmt: skip
        for name, view in (("topk_ids", id_view), ("topk_weights", weight_view)):
            if view.strides != (view.shape[1], 1) and view.shape[0] > 1:
                raise UnsupportedError(f"{name}: found strides {list(view.strides)} on the device; make it contiguous first")
        if rows.strides[1] != 1 and in_size != 1:
            raise UnsupportedError(f"hidden_states: found strides {list(rows.strides)} on the device; make it contiguous first")
        shape = (rows.shape[0], out_size)
        result = _like(hidden, shape) if out is None else out
        # Taking the result's tensor over orders our stream behind all earlier work on its memory.
        out_view = self._view("out", result)
        if out_view.shape != shape or out_view.dtype != rows.dtype or (out_view.strides != (out_size, 1) and shape[0] > 1):
            raise ConfigError(out_text(out_view.shape, out_view.dtype, shape, rows.dtype))
        return result, _core.TokenBatch(
            rows.address, rows.strides[0] * ITEM_BYTES[rows.dtype], rows.dtype, shape[0], id_view.shape[1], id_view.address,
            id_view.dtype == "i64", weight_view.address, weight_view.dtype, out_view.address,
            (*views, out_view, hidden, ids, weights, result),
        )  # fmt: skip

    def _view(self, name: str, tensor: Any) -> _core.DlpackView:
        """Borrows a tensor, safe to use for work on our stream. Raises ConfigError naming the
        argument where the tensor is not on the host's device.
        """
        if not hasattr(tensor, "__dlpack_device__"):
            raise ConfigError(f"{name}: found {type(tensor).__name__}, expected a tensor on {self.device.name}")
        found = tuple(int(number) for number in tensor.__dlpack_device__())
        if found != self.device.dlpack_device:
            raise ConfigError(
                f"{name}: found on DLPack device {found}, the host's device {self.device.name} is {self.device.dlpack_device}; "
                "all tensors of a call must be there"
            )
        return _core.DlpackView(tensor.__dlpack__(stream=self.stream), self.device.dlpack_device)


def _dlpack_type(tensor: Any) -> int:
    return int(tensor.__dlpack_device__()[0]) if hasattr(tensor, "__dlpack_device__") else DLPACK_CPU


def _dense(tensor: Any) -> Any:
    """Returns a torch tensor whose memory holds its numbers side by side, copied where need be.
    Other kinds are returned as they are.
    """
    if hasattr(tensor, "is_neg") and tensor.is_neg():
        # The memory of a lazily negated tensor holds the opposite numbers.
        tensor = tensor.resolve_neg()
    return tensor.contiguous() if hasattr(tensor, "is_contiguous") and not tensor.is_contiguous() else tensor


def _refuse_gradients(hidden: Any, weights: Any) -> None:
    if getattr(hidden, "requires_grad", False) or getattr(weights, "requires_grad", False):
        raise ConfigError("hidden_states or topk_weights require grad; experts() has no backward: use detach()")


def _like(hidden: Any, shape: tuple[int, int]) -> Any:
    """Makes an array of the caller's framework on the device of `hidden`, with its dtype."""
    if hasattr(hidden, "new_empty"):
        return hidden.new_empty(shape)
    namespace = getattr(hidden, "__array_namespace__", None)
    if namespace is None:
        raise UnsupportedError(f"out: {type(hidden).__name__} has no __array_namespace__; give the result's array as out=")
    return namespace().empty(shape, dtype=hidden.dtype, device=hidden.device)
