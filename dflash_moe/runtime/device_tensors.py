"""A GPU host's tensors: their device opened once, taken over by DLPack, and staged in pinned memory
for the data paths.

Tensors of the processor stand in for those of a simulated card.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dflash_moe import _core
from dflash_moe.errors import ConfigError, UnsupportedError
from dflash_moe.protocol.devices import DeviceChoice
from dflash_moe.runtime.tensors import ITEM_BYTES, CallArguments, TensorBinder, check_call, out_text

SIMULATED = {"cuda": 0, "hip": 1}  # the simulator's device by vendor
DLPACK_CPU, DLPACK_CUDA = 1, 2
ALIGNMENT = 64  # of each array in a staging block


def open_host_device(choice: DeviceChoice) -> _core.HostDevice:
    """The device of `host.device`. ConfigError for one that does not exist, UnsupportedError for
    one that cannot be used.
    """
    if choice.backend == "sim":
        if choice.device != 0:
            raise ConfigError(
                f"host.device sim:{choice.device} does not exist; the simulator has one card of each vendor, sim:0 with "
                "host.simulate"
            )
        return _core.HostDevice(backend="sim", device=SIMULATED[choice.simulate])
    return _core.HostDevice(backend=choice.backend, device=choice.device)


@dataclass(frozen=True, slots=True)
class StagedCall:
    """A call whose rows lie in pinned memory; `deliver()` once its result is there."""

    device: _core.HostDevice
    block: _core.StagingBlock
    result: tuple[int, int, int]  # (device's address, host's address, bytes)
    owners: object  # the tensors

    def deliver(self) -> None:
        """Copies the result to the caller's tensor."""
        self.device.copy_in([self.result])


class _OnDevice:
    """Keeps the views of a call's tensors alive, and says that its addresses are the device's."""

    __slots__ = ("views",)

    def __init__(self, *views: object) -> None:
        self.views = views


class DeviceTensors:
    """Binds and stages the tensors of calls. Any thread."""

    def __init__(self, choice: DeviceChoice) -> None:
        self.choice = choice
        self.device = open_host_device(choice)
        self._binder = TensorBinder()
        # that tensors are taken over for: the device's own, or a step's
        self.stream = self.device.stream
        self._is_simulated = choice.backend == "sim"

    def take_over_for(self, stream: int) -> None:
        """Tensors are from now on made safe for work on this stream; CUDA's default one, 0 to
        drivers, is 1 in DLPack.
        """
        self.stream = 1 if stream == 0 and self.device.dlpack_device[0] == DLPACK_CUDA else stream

    def bind(
        self, in_size: int, out_size: int, hidden_states: Any, topk_ids: Any, topk_weights: Any, out: Any
    ) -> tuple[Any, CallArguments]:
        """Like `TensorBinder.bind`; tensors on the host's device are taken too."""
        tensors = (hidden_states, topk_ids, topk_weights)
        if self._is_simulated or all(_dlpack_type(tensor) == DLPACK_CPU for tensor in tensors):
            return self._binder.bind(in_size, out_size, *tensors, out)
        return self._bind_on_device(in_size, out_size, *tensors, out)

    def stage(self, in_size: int, out_size: int, arguments: CallArguments) -> tuple[StagedCall | None, CallArguments]:
        """Brings a bound call's tensors to pinned memory and says where; (None, `arguments`) for
        the machine's tensors.
        """
        hidden, row_stride, dtype, num_tokens, ids, ids_are_64bit, weights, weights_dtype, top_k, out, owners = arguments
        if not self._is_simulated and not isinstance(owners, _OnDevice):
            return None, arguments
        row_bytes = in_size * ITEM_BYTES[dtype]
        sizes = (
            num_tokens * row_bytes,
            num_tokens * top_k * (8 if ids_are_64bit else 4),
            num_tokens * top_k * ITEM_BYTES[weights_dtype],
            num_tokens * out_size * ITEM_BYTES[dtype],
        )
        places = [0]
        for size in sizes:
            places.append(places[-1] + -(-size // ALIGNMENT) * ALIGNMENT)
        block = self.device.staging(places[-1])
        rows_at, ids_at, weights_at, out_at = (block.address + place for place in places[:-1])
        pieces = [(ids, ids_at, sizes[1]), (weights, weights_at, sizes[2])]
        if row_stride == row_bytes or num_tokens == 1:
            pieces.append((hidden, rows_at, sizes[0]))
        else:
            pieces += [(hidden + row * row_stride, rows_at + row * row_bytes, row_bytes) for row in range(num_tokens)]
        self.device.copy_out(pieces)
        staged: CallArguments = (
            rows_at, row_bytes, dtype, num_tokens, ids_at, ids_are_64bit, weights_at, weights_dtype, top_k, out_at, block,
        )  # fmt: skip
        return StagedCall(self.device, block, (out, out_at, sizes[3]), owners), staged

    def _bind_on_device(
        self, in_size: int, out_size: int, hidden: Any, ids: Any, weights: Any, out: Any
    ) -> tuple[Any, CallArguments]:
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
        # its memory is free of earlier work once our stream has taken it over
        out_view = self._view("out", result)
        if out_view.shape != shape or out_view.dtype != rows.dtype or (out_view.strides != (out_size, 1) and shape[0] > 1):
            raise ConfigError(out_text(out_view.shape, out_view.dtype, shape, rows.dtype))
        row_stride = rows.strides[0] * ITEM_BYTES[rows.dtype]
        return result, (
            rows.address, row_stride, rows.dtype, shape[0], id_view.address, id_view.dtype == "i64", weight_view.address,
            weight_view.dtype, id_view.shape[1], out_view.address, _OnDevice(*views, out_view, hidden, ids, weights, result),
        )  # fmt: skip

    def _view(self, name: str, tensor: Any) -> _core.DlpackView:
        """The tensor, safe to use for work on our stream. ConfigError naming it where it is
        somewhere else.
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
    """A torch tensor whose memory holds its numbers side by side; other kinds are taken as they
    are.
    """
    if hasattr(tensor, "is_neg") and tensor.is_neg():  # lazily negated
        tensor = tensor.resolve_neg()
    return tensor.contiguous() if hasattr(tensor, "is_contiguous") and not tensor.is_contiguous() else tensor


def _refuse_gradients(hidden: Any, weights: Any) -> None:
    if getattr(hidden, "requires_grad", False) or getattr(weights, "requires_grad", False):
        raise ConfigError("hidden_states or topk_weights require grad; experts() has no backward: use detach()")


def _like(hidden: Any, shape: tuple[int, int]) -> Any:
    """A fresh array of the caller's framework on the caller's device."""
    if hasattr(hidden, "new_empty"):
        return hidden.new_empty(shape)
    namespace = getattr(hidden, "__array_namespace__", None)
    if namespace is None:
        raise UnsupportedError(f"out: {type(hidden).__name__} has no __array_namespace__; give the result's array as out=")
    return namespace().empty(shape, dtype=hidden.dtype, device=hidden.device)
