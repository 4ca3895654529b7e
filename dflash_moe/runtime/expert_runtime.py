"""`ExpertRuntime`: routed experts in other processes behind one function. Start, call, observe,
switch modes, close.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any

from dflash_moe import _core
from dflash_moe.config import Settings, on_worker_loss, resolve_settings
from dflash_moe.errors import ConfigError, DflashError, WorkerError
from dflash_moe.model.spec import LayerSpec, ModelSpec, model_spec
from dflash_moe.placement import Placement, plan_placement
from dflash_moe.placement.numerics import check_classes, describe_numerics, settle_classes
from dflash_moe.protocol.devices import DeviceChoice
from dflash_moe.runtime import observe
from dflash_moe.runtime.auto import WorkerForecast, cost_classes, log_explanation, mode_reason, worker_forecasts
from dflash_moe.runtime.contents import ContentsReport, compare_with_own_copy
from dflash_moe.runtime.device_step import NAP_NS, DeviceStep, DeviceSteps
from dflash_moe.runtime.device_tensors import DeviceTensors
from dflash_moe.runtime.expert_call import ExpertCall
from dflash_moe.runtime.fleet import ChannelDecorator, Fleet, LoadingReport, Member
from dflash_moe.runtime.held_shards import shapes_of, shards_by_holder
from dflash_moe.runtime.layer_table import LayerTable
from dflash_moe.runtime.observe import WorkerProcess
from dflash_moe.runtime.path_keeper import PathKeeper
from dflash_moe.runtime.tensors import HostTensors
from dflash_moe.runtime.threads import thread_plan
from dflash_moe.runtime.transports import check_paths
from dflash_moe.topology import HOST, Topology

log = logging.getLogger(__name__)

CLOSED = "this ExpertRuntime is closed; start another"
# Times call_timeout_s: by then every call has ended (kMaxPatience of csrc/client/engine.h).
MAX_PATIENCE = 20


class ExpertRuntime:
    """The routed experts of one model, on the workers of one topology. A context manager; any
    thread may call.

    Errors of calls: ConfigError (arguments), WorkerLost, WorkerTimeout, WorkerError, ProtocolError.
    """

    def __init__(
        self,
        spec: ModelSpec,
        placement: Placement,
        settings: Settings,
        topology: Topology,
        *,
        overrides: dict[str, Any],
        channel_decorator: ChannelDecorator | None,
    ) -> None:
        """Use `ExpertRuntime.start`."""
        self.spec = spec
        self.placement = placement
        self.settings = settings
        self._topology = topology
        self._overrides = overrides
        self._held = shards_by_holder(spec, placement)
        self._threads = thread_plan(topology, settings)
        self._fleet = Fleet(spec, settings, self._threads, channel_decorator)
        self._slices = slices_of(settings)
        self._client = _core.Client(
            spin_ns=self._threads.spin_ns, call_timeout_s=settings.call_timeout_s, stall_timeout_s=settings.stall_timeout_s
        )
        self._keeper = PathKeeper(self._client, self._fleet)
        self._finalizer = weakref.finalize(self, _end, self._keeper, self._fleet, self._client)
        self._table = LayerTable(spec.layers)
        host = DeviceChoice.of_host(topology.host)
        self._device = None if host.is_processor else DeviceTensors(host)
        self._tensors = HostTensors() if self._device is None else self._device
        self._steps: DeviceSteps | None = None  # of a host that is no processor
        self._last_stats: dict[str, Any] = {}
        self._last_auto: tuple[WorkerForecast, ...] = ()  # when mode auto was last in force
        self._is_open = False

    @classmethod
    def start(
        cls,
        topology: Topology,
        model: str | Path | ModelSpec,
        *,
        on_loading: LoadingReport | None = None,
        _channel_decorator: ChannelDecorator | None = None,
        **overrides: Any,
    ) -> ExpertRuntime:
        """Starts and loads all workers of `topology` for `model` (a checkpoint directory, or what
        `model_spec` made of one).

        `overrides` are settings by their Python names (mode, transport, dtype, batch_capacity ...);
        they win over environment and topology. `on_loading(holder, experts loaded, of how many)` is
        called now and then, by several threads. Errors: ConfigError, CheckpointError,
        UnsupportedError, ProtocolError, WorkerLost, WorkerTimeout; no process is left behind by any
        of them.
        """
        settings = resolve_settings(topology.ipc, **overrides)
        log.info("%s", on_worker_loss(settings))
        key = check_paths(topology, settings)
        spec = model if isinstance(model, ModelSpec) else model_spec(Path(model))
        placement = plan_placement(spec.layers, topology)
        check_classes(spec.layers, placement, topology, settings.numerics)
        runtime = cls(spec, placement, settings, topology, overrides=overrides, channel_decorator=_channel_decorator)
        try:
            runtime._open(on_loading, key)
        except BaseException:
            runtime.close()
            raise
        return runtime

    def _open(self, on_loading: LoadingReport | None, key: bytes | None) -> None:
        if self._device is not None:
            log.info("host.device: %s", self._device.device.name)
        self._fleet.add_members(self._topology, self._held, HOST)
        self._fleet.start(key)
        self._settle_classes()
        self._fleet.check_memory(self.placement.bytes_by_holder(), self._held)
        self._fleet.load(self._held, on_loading)
        plans = self._plan_slots()
        client = self._client
        request_dtype, reply_dtype = self.wire_dtypes
        for name, member in self._fleet.members.items():
            channel, generation, pulse_fd = self._fleet.attach(member, plans[name])
            member.client_index = client.add_worker(
                name=name,
                channel=channel,
                generation=generation,
                pulse_fd=pulse_fd,
                slice_tokens=self._slices.slice_tokens,
                window=self._window(member),
                request_dtype=request_dtype,
                reply_dtype=reply_dtype,
                is_measured=self._slices.is_measured,
            )
        classes = cost_classes(self.spec.layers)
        layers = self._fleet.shards_by_layer(self._held)
        for layer, shards in layers:
            client.define_layer(
                layer=layer.index,
                name=layer.name,
                in_size=layer.ffn.in_size,
                out_size=layer.ffn.out_size,
                num_experts=layer.num_experts,
                shards=shards,
                cost_class=classes[layer.index],
            )
        client.set_profile(bool(self.settings.profile))
        if self._device is not None:
            self._steps = DeviceSteps(
                client, self._device, self._fleet, self._table, layers=layers, nap_ns=0 if self._threads.spin_ns else NAP_NS,
                timeout_s=lambda: self.settings.call_timeout_s, patience_s=self._patience_s,
            )  # fmt: skip
        self._keeper.start()
        self._is_open = True

    def _settle_classes(self) -> None:
        """Cards have said what bf16 is with them: now it is known which classes meet in a layer."""
        placement = settle_classes(self.placement, {member.name: member.numerics for member in self._fleet.members.values()})
        if placement != self.placement:
            check_classes(self.spec.layers, placement, self._topology, self.settings.numerics)
            self.placement, self._held = placement, shards_by_holder(self.spec, placement)

    def _plan_slots(self) -> dict[str, _core.SlotPlan]:
        shapes = [shapes_of(shards) for shards in self._held.values()]
        plans = _core.plan_arena(shapes, self._slices, *self.wire_dtypes, self.settings.shared_bytes or 0)
        return dict(zip(self._held, plans, strict=True))

    def _window(self, member: Member) -> int:
        """Slices in flight, at most: where the arena was short, fewer slots than the plan asked
        for.
        """
        if member.slots is None:
            return self._slices.window
        return min(self._slices.window, member.slots.num_slots - _core.SPARE_SLOTS)

    def _patience_s(self) -> float:
        return MAX_PATIENCE * self.settings.call_timeout_s + 1.0

    @property
    def wire_dtypes(self) -> tuple[str, str]:
        """(request, reply): the settings', else the model's own."""
        request = self.settings.dtype or self.spec.dtype
        return request, self.settings.reply_dtype or request

    @property
    def layers(self) -> tuple[LayerSpec, ...]:
        """The layers with routed experts."""
        return tuple(self.spec.layers)

    @property
    def tensor_device(self) -> str:
        """Where a model for this runtime lies, as torch says: cpu (also for a simulated card) or
        cuda:N (HIP too).
        """
        choice = DeviceChoice.of_host(self._topology.host)
        return f"cuda:{choice.device}" if choice.has_own_memory else "cpu"

    def layer_index(self, layer: int | str) -> int:
        """The index of a layer given by index or module name; ConfigError for a dense or unknown
        one.
        """
        return self._table.of(layer).layer

    def experts(self, layer: int | str, hidden_states: Any, topk_ids: Any, topk_weights: Any, out: Any = None) -> Any:
        """Returns the routed experts' weighted sum for every row: [num_tokens, out_size], kind and
        dtype of `hidden_states`.

        `hidden_states` [num_tokens, in_size] f32, f16 or bf16; `topk_ids` [num_tokens, top_k] int32
        or int64, ids >= the number of experts are ignored; `topk_weights` [num_tokens, top_k]
        floating point. torch, NumPy or DLPack, on the CPU or on `host.device`. `out`, if given,
        receives the result. Blocks without the GIL.
        """
        if self._steps is not None and (step := self._steps.of_this_thread()) is not None:
            return step.experts(layer, hidden_states, topk_ids, topk_weights, out)
        shape = self._table.of(layer)
        result, batch, deliver = self._tensors.bind(shape, hidden_states, topk_ids, topk_weights, out)
        try:
            self._client.run(shape.layer, batch)
        except WorkerError as error:
            raise self._explained(error) from None
        if deliver is not None:
            deliver()
        return result

    def submit(self, layer: int | str, hidden_states: Any, topk_ids: Any, topk_weights: Any, out: Any = None) -> ExpertCall:
        """Like `experts`, but returns at once. The inputs are kept, and must not be changed until
        the call is done.
        """
        shape = self._table.of(layer)
        result, batch, deliver = self._tensors.bind(shape, hidden_states, topk_ids, topk_weights, out)
        try:
            call = _core.Call(self._client, shape.layer, batch)
        except WorkerError as error:
            raise self._explained(error) from None
        return ExpertCall(layer, call, result, self._explained, deliver)

    def device_step(self, *, stream: int | None = None) -> AbstractContextManager[DeviceStep]:
        """A `with` block whose expert calls the host's device exchanges by itself; `experts` of
        this thread, within it, too.

        For decode steps: at most 64 tokens a call, every holder in shared memory or this process.
        Results count once the block was left without an error; after one, repeat the step with
        plain `experts`. Other threads' calls wait. `stream`: that of the caller's framework;
        torch's current one is found. Errors: ConfigError, UnsupportedError with the reason,
        WorkerLost.
        """
        if self._steps is None:
            self._require_open()
            raise ConfigError("device_step: host.device is cpu; steps run on a GPU host's device")
        return self._steps.open(stream)

    def set_mode(
        self,
        mode: str | None = None,
        *,
        stream_tokens: int | None = None,
        batch_capacity: int | None = None,
        dtype: str | None = None,
        reply_dtype: str | None = None,
    ) -> None:
        """Switches mode, slices and wire dtypes between calls; what is not given stays. Waits for
        calls under way.

        Speed changes, and with a dtype the rounding on the wire; nothing else. ConfigError for
        values that are not allowed.
        """
        wanted = {
            "mode": mode, "stream_tokens": stream_tokens, "batch_capacity": batch_capacity, "dtype": dtype,
            "reply_dtype": reply_dtype,
        }  # fmt: skip
        overrides = {**self._overrides, **{key: value for key, value in wanted.items() if value is not None}}
        settings = resolve_settings(self._topology.ipc, **overrides)
        slices = slices_of(settings)
        if self._steps is not None and self._steps.of_this_thread() is not None:
            raise ConfigError("set_mode: this thread is in a device step; leave it first")
        with self._between_calls():
            former = self._overrides, self.settings, self._slices
            try:
                self._overrides, self.settings, self._slices = overrides, settings, slices
                self._apply_policy()
            except BaseException:  # nothing may claim what is not in force
                self._overrides, self.settings, self._slices = former
                raise

    @contextmanager
    def _between_calls(self) -> Iterator[None]:
        """No call is under way within the block; new ones wait, each under its own deadline."""
        self._client.hold(self._patience_s())
        try:
            yield
        finally:
            self._client.resume()

    def _apply_policy(self) -> None:
        self._note_auto()
        plans = self._plan_slots()
        request_dtype, reply_dtype = self.wire_dtypes
        members = self._fleet.members.values()
        if not all(member.slots is not None and member.slots.holds(plans[member.name]) for member in members):
            # A lost worker would not answer, and nobody shall wait for that.
            observe.refuse_lost(self._client)
            self._keeper.replace(plans)  # all of them, so that the arena's limit holds
        for member in members:
            self._client.set_policy(
                member.client_index, self._slices.slice_tokens, self._window(member), self._slices.is_measured
            )
            self._client.set_dtypes(member.client_index, request_dtype, reply_dtype)

    def _note_auto(self) -> None:
        forecasts = worker_forecasts(self._client.forecasts())
        if any(chunk.is_auto for forecast in forecasts for chunk in forecast.chunks):
            self._last_auto = forecasts

    def _explained(self, error: WorkerError) -> DflashError:
        """The same error with what else is known; a closed runtime takes no more results."""
        if not self._finalizer.alive:
            text = f"the runtime was closed before this call was done; take results before close() ({error})"
            return DflashError(text, **{**error.fields(), "code": "closed"})
        return observe.explain_loss(error, self._fleet)

    def stats(self) -> dict[str, Any]:
        """Counters since start: `calls`, `rows`, `pairs`, `request_bytes`, `reply_bytes`,
        `floor_bytes`, `splits`, `waits` (s).

        The same and the workers' own times under `totals`, per worker under `workers`, per layer
        under `layers`; under `auto` what every worker's cost model knows, chose and predicted since
        the mode was set (`WorkerForecast` as a dictionary); under `numerics` what computes in which
        class; besides, the mode in use and why. After `close()` the last ones.
        """
        if not self._finalizer.alive:
            return self._last_stats
        counted = observe.count_calls(self._client, self._fleet, [layer.index for layer in self.spec.layers])
        forecasts = worker_forecasts(self._client.forecasts())
        return {
            **counted["totals"],
            **counted,
            "mode": self._slices.mode,
            "mode_asked": self.settings.mode,
            "mode_reason": mode_reason(forecasts) if self._slices.is_measured else "as asked",
            "auto": {forecast.name: asdict(forecast) for forecast in forecasts},
            "slice_tokens": self._slices.slice_tokens,
            "window": self._slices.window,
            "wire_dtypes": self.wire_dtypes,
            "numerics": describe_numerics(self.spec.layers, self.placement, self.settings.numerics),
            "transports": {member.name: member.transport for member in self._fleet.members.values()},
        }

    def worker_stats(self) -> dict[str, dict[str, int]]:
        """Every worker's own counters (calls, rows, bytes, compute_ns, queue_ns, memory), asked
        over its control connection.
        """
        self._require_open()
        return observe.ask_workers(self._fleet)

    def worker_processes(self) -> list[WorkerProcess]:
        """One entry per holder of experts; holders inside this process report this process."""
        return observe.list_processes(self._fleet, self._held)

    def check_weights(self, report: ContentsReport = lambda _layer, _count, _total: None) -> int:
        """Compares the weights that every holder has loaded with the host's own copy of the
        checkpoint, byte by byte as content checksums see them; returns the number of shards.

        `report(layer, experts compared, of how many)` is called now and then. Errors:
        CheckpointError naming each layer and shard that differs, its holder and both values;
        UnsupportedError for a worker too old to tell; WorkerLost, WorkerTimeout.
        """
        self._require_open()
        self._fleet.owner.require_here()
        return compare_with_own_copy(
            self._fleet.ask_checksum, self._held, Path(self.spec.path), timeout_s=self.settings.start_timeout_s, report=report
        )

    def take_traces(self) -> list[dict[str, int]]:
        """The recorded slices since the last call (setting `profile`): times of every step on both
        sides.
        """
        return self._client.take_traces()

    def _require_open(self) -> None:
        if not self._finalizer.alive:
            raise ConfigError(CLOSED)

    def close(self) -> None:
        """Ends all workers; at most about a second, never raises because a worker is already gone.
        Safe to call again.
        """
        if not self._finalizer.alive:
            return
        if self._is_open:
            with suppress(DflashError):  # a forked child owns neither workers nor counters
                self._last_stats = self.stats()
                self._note_auto()
                log_explanation(self._last_auto)
        self._steps = None  # its device lets go of the data paths
        self._finalizer()

    def __enter__(self) -> ExpertRuntime:
        self._require_open()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def slices_of(settings: Settings) -> _core.SlicePlan:
    """What the settings make of calls. ConfigError where the stream's slice exceeds its maximum."""
    return _core.plan_slices(
        settings.mode,
        batch_capacity=settings.batch_capacity,
        stream_tokens=settings.stream_tokens,
        stream_tokens_max=settings.stream_tokens_max,
    )


def _end(keeper: PathKeeper, fleet: Fleet, client: _core.Client) -> None:
    """Ends a runtime that was closed or dropped; its channels go once the last call has left."""
    keeper.call_off()
    fleet.close()
    keeper.close()
    client.close()
