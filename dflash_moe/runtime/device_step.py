"""Device steps: the exchanges of a decode step on the host's device, without the host in between
(docs/architecture.md).

A step is a transaction with one deadline: its results count only once leaving its `with` block
raised nothing.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import TYPE_CHECKING, Any

from dflash_moe import _core
from dflash_moe.errors import ConfigError, DflashError, ProtocolError, UnsupportedError, WorkerError, WorkerLost, WorkerTimeout
from dflash_moe.runtime.device_tensors import DeviceTensors

if TYPE_CHECKING:
    from dflash_moe.runtime.call_gate import CallGate
    from dflash_moe.runtime.fleet import Fleet, LayerShards
    from dflash_moe.runtime.path_renewal import PathRenewal

log = logging.getLogger(__name__)

MAX_CALLS = 512  # of a step (kMostStepCalls)
LOOK_S = 0.005  # between two looks at workers and deadline: a hang-up must be acted on within 0.1 s
GIVE_UP_S = 10.0  # for kernels that do not end once they were told to
NAP_NS = 20_000  # of the thread that wakes workers, where cores are too few to spin
NOWHERE, CLOSED = 0, 11  # codes: no failure; ended by the host's word

_DETAILS = {1: "its index is wrong", 2: "its header is damaged", 3: "it answers something else", 4: "its checksum differs"}


class DeviceStep:
    """The exchanges of one step; made by `ExpertRuntime.device_step`. For the thread that entered
    it.

    Leaving raises what went wrong in any of its calls: WorkerLost, WorkerTimeout, WorkerError,
    ProtocolError, ConfigError.
    """

    def __init__(
        self,
        client: _core.Client,
        lease: _core.StepLease,
        tensors: DeviceTensors,
        *,
        sizes: Mapping[int, tuple[str, int, int]],
        timeout_s: float,
        stream: int | None,
        nap_ns: int,
        on_exit: Callable[[bool], None],
    ) -> None:
        """`sizes`: (name, in size, out size) by layer. `on_exit(has failed)` is called once,
        whatever happens.
        """
        self.thread = threading.get_ident()
        self._client = client
        self._tensors = tensors
        self._sizes = sizes
        self._deadline = time.monotonic() + timeout_s
        self._timeout_s = timeout_s
        self._on_exit = on_exit
        self._owners: list[object] = []  # tensors of queued calls
        self._reason: DflashError | None = None  # why the host ended it
        self._aborted_at = 0.0
        self._formerly = tensors.stream
        try:
            self._step = _core.DeviceStep(
                tensors.device, lease, budget_s=2 * timeout_s + 1, stream=stream, nap_ns=nap_ns
            )  # fmt: skip
        except BaseException:
            client.end_step(None)
            raise
        if stream is not None:
            tensors.take_over_for(stream)

    def experts(self, layer: int, hidden_states: Any, topk_ids: Any, topk_weights: Any, out: Any = None) -> Any:
        """Like `ExpertRuntime.experts`, of at most 64 tokens; queued on the device, where later
        work finds the result.
        """
        _, in_size, out_size = self._sizes[layer]
        result, arguments = self._tensors.bind(in_size, out_size, hidden_states, topk_ids, topk_weights, out)
        if arguments[3]:
            self._step.add(layer, *arguments[:10])
            self._owners.append(arguments[10])
            # a simulated device works only when waited for, the framework at once
            if self._tensors.device.stream == 0:
                self._settle()
        return result

    def _settle(self) -> None:
        """Until everything queued is done; ends the step's waits where a worker is lost or the
        deadline passes.
        """
        while not self._step.wait(LOOK_S):
            if self._reason is None:
                self._look()
            elif time.monotonic() > self._aborted_at + GIVE_UP_S:
                text = f"{self._tensors.device.name} did not end a device step; restart the process"
                raise WorkerError(text) from self._reason

    def _look(self) -> None:
        try:
            self._client.judge_step()
        except WorkerLost as error:
            self._abort(error)
        if time.monotonic() > self._deadline and self._reason is None:
            text = f"not answered within {self._timeout_s:g} s, the deadline of a device step; raise ipc.call_timeout_s"
            self._abort(WorkerTimeout(text))

    def _abort(self, reason: DflashError) -> None:
        self._reason, self._aborted_at = reason, time.monotonic()
        self._step.abort()

    def __enter__(self) -> DeviceStep:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if kind is not None and not issubclass(kind, Exception):  # Ctrl-C waits for nobody
            self._abort(WorkerError("the device step was interrupted"))
        report: _core.StepReport | None = None
        try:
            self._settle()
            report = self._step.end()
        except BaseException:
            self._drop()
            raise
        finally:
            self._client.end_step(report)
            self._tensors.stream = self._formerly
            self._owners.clear()
            self._on_exit(report is None or report.code != NOWHERE)
        if report.code != NOWHERE and (kind is None or issubclass(kind, Exception)):
            raise self._failure(report) from error

    def _drop(self) -> None:
        """After an error of the device or Ctrl-C: its kernels end, or it counts as hung."""
        self._step.abort()
        until = time.monotonic() + GIVE_UP_S
        with suppress(DflashError):
            while not self._step.wait(LOOK_S) and time.monotonic() < until:
                continue
            self._step.end()
            return
        self._step.give_up()

    def _failure(self, report: _core.StepReport) -> DflashError:
        layer, token = f"layer {self._sizes[report.layer][0]}", f"token {report.detail}"
        where = f"worker {report.worker}, {layer}" if report.worker else layer
        if self._reason is not None and report.code in (CLOSED, 6):
            names_it = report.worker and str(self._reason).startswith(f"worker {report.worker} ")
            return type(self._reason)(f"{layer if names_it else where}: {self._reason}")
        if report.code == 1:
            return ConfigError(f"{layer}, {token}: topk_ids must not be negative")
        if report.code == 3:
            return ProtocolError(f"{where}: a reply is not used because {_DETAILS.get(report.detail, 'it is malformed')}")
        if report.code == 5:
            return WorkerLost(f"worker {report.worker} was lost: it closed its end ({layer})")
        if report.code == 6:
            return WorkerTimeout(f"{where}: not answered in time, says the device")
        if report.code == 7:
            what = "a finite hidden state does not fit the wire dtype; set ipc.dtype to f32" if report.worker else (
                "the sum of its experts does not fit its dtype; run the model in bf16 or f32"
            )  # fmt: skip
            return WorkerError(f"{layer}, {token}: {what}")
        return WorkerError(f"{where}: {report.text or 'it answered with an error'}")


class DeviceSteps:
    """Opens the steps of one runtime, one at a time: with the gate shut, all calls done and all
    data paths fresh.
    """

    def __init__(
        self,
        client: _core.Client,
        tensors: DeviceTensors,
        gate: CallGate,
        fleet: Fleet,
        paths: PathRenewal,
        *,
        layers: Sequence[LayerShards],
        nap_ns: int,
        timeout_s: Callable[[], float],
    ) -> None:
        """`layers` with their shards, as `Client.define_layer` takes them."""
        self._client = client
        self._tensors = tensors
        self._gate = gate
        self._fleet = fleet
        self._layers = layers
        self._nap_ns = nap_ns
        self._timeout_s = timeout_s
        self._paths = paths
        self._are_layers_defined = False
        self._step: DeviceStep | None = None
        _warn_of_shared_card(tensors, fleet)

    def of_this_thread(self) -> DeviceStep | None:
        """The open step, if this thread entered it."""
        step = self._step
        return step if step is not None and step.thread == threading.get_ident() else None

    @contextmanager
    def open(self, stream: int | None) -> Iterator[DeviceStep]:
        """A step on `stream`, else on that of torch. Errors as `ExpertRuntime.device_step`; the
        runtime is then as before.
        """
        with self._begin(stream) as step:
            yield step

    def _begin(self, stream: int | None) -> DeviceStep:
        self._gate.lock.acquire()
        try:
            if self._step is not None:
                raise ConfigError("device_step: a step is open already; leave it first")
            self._define_layers()
            self._paths.renew_unfit()
            self._paths.quiesce()
            self._step = self._opened(_torch_stream(self._tensors) if stream is None else stream)
            return self._step
        except BaseException:
            if self._step is None:
                self._gate.is_shut = bool(self._paths.worn_out)
            self._gate.lock.release()
            raise

    def _opened(self, stream: int | None) -> DeviceStep:
        lease = self._client.begin_step(MAX_CALLS)
        try:
            return self._make(lease, stream)
        except DflashError as error:
            self._paths.retire_all()
            if not isinstance(error, UnsupportedError) or self._fleet.may_open_replies:
                raise
            reason = str(error)
        log.warning("device steps: %s; asking the workers for segments without the seal against writing", reason)
        self._fleet.may_open_replies = True
        self._paths.renew_unfit()
        self._paths.quiesce()
        try:
            return self._make(self._client.begin_step(MAX_CALLS), stream)
        except DflashError:
            self._paths.retire_all()
            raise

    def _make(self, lease: _core.StepLease, stream: int | None) -> DeviceStep:
        sizes = {layer.index: (layer.name, layer.ffn.in_size, layer.ffn.out_size) for layer, _ in self._layers}
        return DeviceStep(
            self._client, lease, self._tensors, sizes=sizes, timeout_s=self._timeout_s(), stream=stream, nap_ns=self._nap_ns,
            on_exit=self._leave,
        )  # fmt: skip

    def _leave(self, has_failed: bool) -> None:
        self._step = None
        if has_failed:
            self._paths.retire_all()
        self._gate.is_shut = bool(self._paths.worn_out)
        self._gate.lock.release()

    def _define_layers(self) -> None:
        if self._are_layers_defined:
            return
        for layer, shards in self._layers:
            _core.DeviceStep.define_layer(
                self._tensors.device, layer=layer.index, in_size=layer.ffn.in_size, out_size=layer.ffn.out_size,
                num_experts=layer.num_experts, shards=shards,
            )  # fmt: skip
        self._are_layers_defined = True


def _warn_of_shared_card(tensors: DeviceTensors, fleet: Fleet) -> None:
    """Processes take turns on a card, about 2 ms each, and a step's waiting kernel uses up its turn
    (decision 17).
    """
    for member in fleet.members.values():
        if member.local is None and member.is_on_this_machine and member.device == tensors.choice:
            log.warning(
                "worker %s computes on %s, the host's own card, in another process: in a device step every kernel of it waits "
                "until the step's waiting kernel loses its turn; give the worker `address: loopback`, or use no device_step()",
                member.name, tensors.device.name,
            )  # fmt: skip


def _torch_stream(tensors: DeviceTensors) -> int | None:
    """The stream that torch uses now on the host's device; None where there is none, and the
    device's own queue serves.
    """
    torch = sys.modules.get("torch")
    if tensors.device.stream == 0 or torch is None or not torch.cuda.is_available():
        return None
    return int(torch.cuda.current_stream(tensors.device.dlpack_device[1]).cuda_stream)
