"""Device steps: the host's device exchanges rows with the workers by itself for a whole decode
step, without the host's processor in between (docs/howto/gpu_backends.md).

A step is a transaction with one deadline: its results count only once its `with` block was left
without an error.
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
from dflash_moe.experts.device_tensors import DeviceTensors

if TYPE_CHECKING:
    from dflash_moe.experts.layer_table import LayerTable
    from dflash_moe.holders.fleet import Fleet, LayerShards

log = logging.getLogger(__name__)

# A step has at most this many calls (kMostStepCalls of csrc/cards/device_exchange).
MAX_CALLS = 512
# A thread that waits for the device looks this often whether it was interrupted. The workers are
# watched by a thread of the core (csrc/client/step_watch.h).
LOOK_S = 0.005
# Kernels that do not end within this time after they were told to count as hung.
GIVE_UP_S = 10.0
# The thread that wakes workers sleeps this long between two looks where cores are too few to spin.
NAP_NS = 20_000
# This code of a step's report means that nothing failed.
NOWHERE = 0
# The names of codes are those of errors; "closed" means that the host ended the step.
_CODE_NAMES = {number: name for name, (number, _) in _core.error_codes().items()}

# The device reports by these numbers what it found wrong with a reply.
_DETAILS = {1: "its index is wrong", 2: "its header is damaged", 3: "it answers something else", 4: "its checksum differs"}


class DeviceStep:
    """The exchanges of one step. `ExpertRuntime.device_step` makes it, and only the thread that
    entered it uses it.

    Leaving the `with` block raises what went wrong in any of its calls: WorkerLost, WorkerTimeout,
    WorkerError, ProtocolError, ConfigError.
    """

    def __init__(
        self,
        client: _core.Client,
        lease: _core.StepLease,
        tensors: DeviceTensors,
        *,
        table: LayerTable,
        names: Mapping[int, str],
        timeout_s: float,
        stream: int | None,
        nap_ns: int,
        on_exit: Callable[[], None],
    ) -> None:
        """`names` gives the module names of the layers by index, for messages. `on_exit()` is
        called once when the block is left, whatever happened in it.
        """
        self.thread = threading.get_ident()
        self._client = client
        self._tensors = tensors
        self._table = table
        self._names = names
        self._on_exit = on_exit
        # The batches of queued calls keep the caller's tensors alive until the step has ended.
        self._batches: list[_core.TokenBatch] = []
        # Where the host ended the step, this is why, and when that was seen.
        self._reason: DflashError | None = None
        self._stopped_at = 0.0
        self._formerly = tensors.stream
        self._step = _core.DeviceStep(
            tensors.device, client, lease, timeout_s=timeout_s, budget_s=2 * timeout_s + 1, stream=stream, nap_ns=nap_ns,
            late=f"not answered within {timeout_s:g} s, the deadline of a device step; raise ipc.call_timeout_s",
        )  # fmt: skip
        if stream is not None:
            tensors.take_over_for(stream)

    def experts(self, layer: int | str, hidden_states: Any, topk_ids: Any, topk_weights: Any, out: Any = None) -> Any:
        """Takes the arguments of `ExpertRuntime.experts`, with at most 64 tokens, and returns the
        result's tensor at once: the exchange is queued on the step's stream, where later work finds
        the result. Raises WorkerLost or WorkerTimeout in a step that is given up already.
        """
        shape = self._table.of(layer)
        if (reason := self._why_stopped()) is not None:
            name = self._names[shape.layer]
            raise reason.reworded(f"layer {name}: {reason}", layer=shape.layer)
        result, batch = self._tensors.bind_for_step(shape, hidden_states, topk_ids, topk_weights, out)
        if batch.num_tokens:
            self._step.add(shape.layer, batch)
            self._batches.append(batch)
            # A simulated device computes only while somebody waits for it, but the framework of the
            # caller reads the result at once.
            if self._tensors.device.stream == 0:
                self._settle()
        return result

    def _settle(self) -> None:
        """Waits until everything queued is done. Where the step is given up and the device goes on
        for GIVE_UP_S nevertheless, it raises WorkerError.
        """
        while not self._step.wait(LOOK_S):
            if self._why_stopped() is not None and time.monotonic() > self._stopped_at + GIVE_UP_S:
                text = f"{self._tensors.device.name} did not end a device step; restart the process"
                raise WorkerError(text) from self._reason

    def _why_stopped(self) -> DflashError | None:
        """Returns why the device was told to give the step up, or None while it goes on."""
        if self._reason is None:
            try:
                self._step.check()
            except DflashError as error:
                self._reason, self._stopped_at = error, time.monotonic()
        return self._reason

    def _abort(self, reason: DflashError) -> None:
        self._reason, self._stopped_at = reason, time.monotonic()
        self._step.abort()

    def __enter__(self) -> DeviceStep:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if kind is not None and not issubclass(kind, Exception):
            # Ctrl-C does not wait for replies.
            self._abort(WorkerError("the device step was interrupted"))
        report: _core.StepReport | None = None
        try:
            self._settle()
            report = self._step.end()
            self._why_stopped()
        except BaseException:
            self._drop()
            raise
        finally:
            self._tensors.stream = self._formerly
            self._batches.clear()
            # The order matters: once the client ends the step, another thread may begin one.
            self._on_exit()
            self._client.end_step(report)
        if report.code != NOWHERE and (kind is None or issubclass(kind, Exception)):
            raise self._failure(report) from error

    def _drop(self) -> None:
        """Ends the step after an error of the device or Ctrl-C. It waits for the kernels to end,
        and abandons a step whose kernels do not.
        """
        self._step.abort()
        until = time.monotonic() + GIVE_UP_S
        with suppress(DflashError):
            while not self._step.wait(LOOK_S) and time.monotonic() < until:
                continue
            self._step.end()
            return
        self._step.give_up()

    def _failure(self, report: _core.StepReport) -> DflashError:
        """What a failed step raises."""
        code = _CODE_NAMES.get(report.code)
        layer, token = f"layer {self._names[report.layer]}", f"token {report.detail}"
        where = f"worker {report.worker}, {layer}" if report.worker else layer
        fields: dict[str, Any] = {"worker": report.worker or None, "layer": report.layer}
        if self._reason is not None and code in ("closed", "timeout"):
            names_it = report.worker and self._reason.worker == report.worker
            fields |= {name: value for name, value in self._reason.fields().items() if value is not None}
            return type(self._reason)(f"{layer if names_it else where}: {self._reason}", **fields)
        if code == "invalid_argument":
            return ConfigError(
                f"{layer}, {token}: an id of topk_ids is no expert of the layer, and not their number, which asks for none",
                token=report.detail,
                **fields,
            )
        if code == "protocol":
            what = _DETAILS.get(report.detail, "it is malformed")
            return ProtocolError(f"{where}: a reply is not used because {what}", **fields)
        if code == "worker_lost":
            return WorkerLost(f"worker {report.worker} was lost: it closed its end ({layer})", **fields)
        if code == "timeout":
            return WorkerTimeout(f"{where}: not answered in time, says the device", **fields)
        if code == "range":
            what = "a finite hidden state does not fit the wire dtype; set ipc.dtype to f32" if report.worker else (
                "the sum of its experts does not fit its dtype; run the model in bf16 or f32"
            )  # fmt: skip
            return WorkerError(f"{layer}, {token}: {what}", code=code, token=report.detail, **fields)
        return WorkerError(f"{where}: {report.text or 'it answered with an error'}", **fields)


class DeviceSteps:
    """Opens the steps of one runtime, one at a time.

    The client lets a step begin once all calls are done and no data path is worn. Calls of other
    threads then wait in the client until the step ends, each under its own deadline.
    """

    def __init__(
        self,
        client: _core.Client,
        tensors: DeviceTensors,
        fleet: Fleet,
        table: LayerTable,
        *,
        layers: Sequence[LayerShards],
        nap_ns: int,
        timeout_s: Callable[[], float],
        patience_s: Callable[[], float],
    ) -> None:
        """`layers` are all layers with their shards, as `Client.define_layer` takes them.
        `timeout_s()` is the limit of a step in seconds, and `patience_s()` that of the wait until
        it may begin; both are asked anew for every step, because settings can change between steps.
        """
        self._client = client
        self._tensors = tensors
        self._fleet = fleet
        self._table = table
        self._layers = layers
        self._names = {layer.index: layer.name for layer, _ in layers}
        self._nap_ns = nap_ns
        self._timeout_s = timeout_s
        self._patience_s = patience_s
        # The device's tables of the layers name the holders of the lease with this number.
        self._defined_id = 0
        # Why the device can have no steps at all.
        self._refusal: UnsupportedError | None = None
        # The open step. Only the thread that holds the client sets it.
        self._step: DeviceStep | None = None
        _warn_of_shared_card(tensors, fleet)

    def of_this_thread(self) -> DeviceStep | None:
        """Returns the open step if the calling thread entered it, else None."""
        step = self._step
        return step if step is not None and step.thread == threading.get_ident() else None

    @contextmanager
    def open(self, stream: int | None) -> Iterator[DeviceStep]:
        """Opens a `with` block of `begin`."""
        if self.of_this_thread() is not None:
            raise ConfigError("device_step: a step is open already; leave it first")
        try:
            with self.begin(stream, self._patience_s()) as step:
                yield step
        finally:
            self.abandon()

    def begin(self, stream: int | None, patience_s: float) -> DeviceStep:
        """Begins a step on `stream`, or where that is None on torch's current stream; it waits at
        most `patience_s` until it may begin. The caller's `with` block ends it. The errors are
        those of `ExpertRuntime.device_step`, and leave the runtime as it was.
        """
        if self._refusal is not None:
            raise self._refusal.reworded(str(self._refusal))
        if stream is None:
            stream = _torch_stream(self._tensors)
        step = self._try_to_begin(stream, patience_s) or self._try_to_begin(stream, patience_s)
        if step is None:
            # This is for the type checker: a second try raises instead of returning None.
            raise UnsupportedError("device_step: the device does not take the data paths' memory")
        return step

    def _try_to_begin(self, stream: int | None, patience_s: float) -> DeviceStep | None:
        """Returns the step, or None where the device refused memory that is sealed against writing.
        In that case all data paths are being renewed without the seal (docs/protocol.md, "Data
        paths"), and a second try either succeeds or raises.
        """
        lease = self._client.begin_step(MAX_CALLS, patience_s)
        try:
            self._define_layers(lease)
            self._step = DeviceStep(
                self._client, lease, self._tensors, table=self._table, names=self._names, timeout_s=self._timeout_s(),
                stream=stream, nap_ns=self._nap_ns, on_exit=self._leave,
            )  # fmt: skip
            return self._step
        except UnsupportedError as error:
            is_last_try = self._fleet.open_replies()
            self._client.end_step(None)
            if is_last_try:
                self._refusal = error
                raise
            text = "device steps: %s; asking the workers for segments without the seal against writing"
            log.warning(text, str(error))
            return None
        except BaseException:
            self._client.end_step(None)
            raise

    def abandon(self) -> None:
        """Ends a step that this thread began and never entered, because it was interrupted just
        then.
        """
        if (step := self.of_this_thread()) is not None:
            with suppress(DflashError), step:
                pass

    def _leave(self) -> None:
        self._step = None

    def _define_layers(self, lease: _core.StepLease) -> None:
        """Tells the device who answers for each shard, where that has changed."""
        if self._defined_id == lease.holders_id:
            return
        holders = lease.holders
        for layer, shards in self._layers:
            asked = [
                (shard, path, fingerprint, experts)
                for (shard, _, fingerprint, experts), path in zip(shards, holders[layer.index], strict=True)
            ]
            _core.DeviceStep.define_layer(
                self._tensors.device, layer=layer.index, in_size=layer.ffn.in_size, out_size=layer.ffn.out_size,
                num_experts=layer.num_experts, shards=asked,
            )  # fmt: skip
        self._defined_id = lease.holders_id


def _warn_of_shared_card(tensors: DeviceTensors, fleet: Fleet) -> None:
    """Warns of workers that compute on the host's own card in a process of their own. Processes
    take turns on a card, about 2 ms each, and the waiting kernel of a step uses up its turn
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
    """Returns the stream that torch uses now on the host's device. It is None where there is none,
    and the step then uses the device's own queue.
    """
    torch = sys.modules.get("torch")
    if tensors.device.stream == 0 or torch is None or not torch.cuda.is_available():
        return None
    return int(torch.cuda.current_stream(tensors.device.dlpack_device[1]).cuda_stream)
