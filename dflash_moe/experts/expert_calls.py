"""The way of one call: tensors become a batch, the client has it computed, and the result becomes a
tensor. On a host whose device is no processor, calls may also be part of a step of that device.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, TypeVar

from dflash_moe import _core
from dflash_moe.errors import ConfigError, DflashError, UnsupportedError, WorkerError
from dflash_moe.experts.device_step import NAP_NS, DeviceStep, DeviceSteps
from dflash_moe.experts.device_tensors import DeviceTensors
from dflash_moe.experts.expert_call import BoundExperts, ExpertCall
from dflash_moe.experts.layer_table import LayerTable
from dflash_moe.experts.step_replay import StepReplay
from dflash_moe.experts.tensors import HostTensors
from dflash_moe.protocol.devices import DeviceChoice

if TYPE_CHECKING:
    from dflash_moe.holders.fleet import LayerShards
    from dflash_moe.holders.placed_experts import PlacedExperts

Result = TypeVar("Result")


# Completes an error of the client with what the runtime knows. Who keeps one keeps the runtime.
Explained = Callable[[WorkerError], DflashError]


class ExpertCalls:
    """The calls of one runtime. Any thread may call. What `ExpertRuntime` says of its methods holds
    for those of the same names here; calls that go on after their method take what explains their
    errors.
    """

    def __init__(self, client: _core.Client, placed: PlacedExperts) -> None:
        self._client = client
        self._placed = placed
        self.table = LayerTable(placed.spec.layers)
        host = DeviceChoice.of_host(placed.topology.host)
        self._device = None if host.is_processor else DeviceTensors(host)
        # Taken once, because each call would look them up again.
        self._bound = HostTensors().bind if self._device is None else self._device.bind
        self._run = client.run
        # Only a host whose device is no processor has device steps, from `open` to `close`.
        self._steps: DeviceSteps | None = None
        self._replay: StepReplay | None = None

    @property
    def device_name(self) -> str:
        """What the host's device is called, empty where it is the processor."""
        return self._device.device.name if self._device is not None else ""

    @property
    def limit_s(self) -> float:
        """The seconds after which every call has ended, in one way or another."""
        return _core.MAX_PATIENCE * self._timeout_s() + 1.0

    def _timeout_s(self) -> float:
        return self._placed.settings.call_timeout_s

    def open(self, layers: Sequence[LayerShards]) -> None:
        """Lets the host's device make steps. `layers` are those that the client was told of."""
        if self._device is not None:
            self._steps = DeviceSteps(
                self._client, self._device, self._placed.fleet, self.table, layers=layers,
                nap_ns=0 if self._placed.threads.spin_ns else NAP_NS, timeout_s=self._timeout_s,
                patience_s=lambda: self.limit_s,
            )  # fmt: skip
            self._replay = StepReplay(self._steps, self._timeout_s)

    def close(self) -> None:
        """Has the device let go of the data paths' memory, before these are closed."""
        self._steps = self._replay = None

    def experts(self, layer: int | str, hidden_states: Any, topk_ids: Any, topk_weights: Any, out: Any) -> Any:
        """As `ExpertRuntime.experts`, which explains errors outside of steps."""
        if self._steps is not None and (step := self._steps.of_this_thread()) is not None:
            return step.experts(layer, hidden_states, topk_ids, topk_weights, out)
        shape = self.table.of(layer)
        result, batch, deliver = self._bound(shape, hidden_states, topk_ids, topk_weights, out)
        self._run(shape.layer, batch)
        if deliver is not None:
            deliver()
        return result

    def bind(
        self, layer: int | str, hidden_states: Any, topk_ids: Any, topk_weights: Any, out: Any, explained: Explained
    ) -> BoundExperts:
        """As `ExpertRuntime.bind`."""
        if self._device is not None:
            raise UnsupportedError("bind: the host's device is no processor; call experts()")
        shape = self.table.of(layer)
        _, batch, _ = self._bound(shape, hidden_states, topk_ids, topk_weights, out)
        return BoundExperts(self._client, shape.layer, batch, explained)

    def submit(
        self, layer: int | str, hidden_states: Any, topk_ids: Any, topk_weights: Any, out: Any, explained: Explained
    ) -> ExpertCall:
        """As `ExpertRuntime.submit`."""
        shape = self.table.of(layer)
        result, batch, deliver = self._bound(shape, hidden_states, topk_ids, topk_weights, out)
        try:
            call = _core.Call(self._client, shape.layer, batch)
        except WorkerError as error:
            raise explained(error) from None
        return ExpertCall(layer, call, result, explained, deliver)

    @property
    def is_in_step(self) -> bool:
        """Whether the calling thread is in a step of the device."""
        return self._steps is not None and self._steps.of_this_thread() is not None

    def device_step(self, stream: int | None) -> AbstractContextManager[DeviceStep]:
        """As `ExpertRuntime.device_step`."""
        if self._steps is None:
            raise ConfigError("device_step: host.device is cpu; steps run on a GPU host's device")
        return self._steps.open(stream)

    def run_step(self, work: Callable[[], Result], undo: Callable[[], None], stream: int | None) -> Result:
        """As `ExpertRuntime.run_step`."""
        return work() if self._replay is None else self._replay.run(work, undo, stream)

    def step_counts(self) -> dict[str, Any]:
        """Returns what `stats()` reports of device steps, nothing where there are none."""
        return {} if self._replay is None else {"device_steps": self._replay.counts()}
