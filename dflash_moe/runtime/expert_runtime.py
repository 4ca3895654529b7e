"""`ExpertRuntime`: routed experts in other processes behind one function. Start, call, observe,
switch modes, close.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
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
from dflash_moe.runtime.call_gate import MAX_PATIENCE, CallGate
from dflash_moe.runtime.data_path import SPARE_SLOTS, SlotPlan, plan_arena, slices_of
from dflash_moe.runtime.device_step import NAP_NS, DeviceStep, DeviceSteps
from dflash_moe.runtime.device_tensors import DeviceTensors
from dflash_moe.runtime.expert_call import ExpertCall
from dflash_moe.runtime.fleet import ChannelDecorator, Fleet, LoadingReport, Member, shapes_of, shards_by_holder
from dflash_moe.runtime.layer_table import LayerTable
from dflash_moe.runtime.observe import WorkerProcess
from dflash_moe.runtime.path_renewal import PathRenewal
from dflash_moe.runtime.tensors import TensorBinder
from dflash_moe.runtime.threads import thread_plan
from dflash_moe.runtime.transports import check_paths
from dflash_moe.topology import HOST, Topology

log = logging.getLogger(__name__)

CLOSED = "this ExpertRuntime is closed; start another"


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
        self._finalizer = weakref.finalize(self, self._fleet.close)
        self._slices = slices_of(settings)
        client = _core.Client(
            spin_ns=self._threads.spin_ns, call_timeout_s=settings.call_timeout_s, stall_timeout_s=settings.stall_timeout_s
        )
        self._client: _core.Client | None = client
        self._run: Callable[..., None] = client.run
        self._submit: Callable[..., _core.Call] = client.submit
        self._last_stats: dict[str, Any] = {}
        self._last_auto: tuple[WorkerForecast, ...] = ()  # when mode auto was last in force
        self._tensors: DeviceTensors | None = None  # of a host that is no processor
        self._steps: DeviceSteps | None = None  # likewise
        self._bind = TensorBinder().bind
        self._table = LayerTable(spec.layers)
        self._gate = CallGate()
        self._paths = PathRenewal(client, self._fleet, self._gate, patience_s=MAX_PATIENCE * settings.call_timeout_s + 1.0)
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
        host = DeviceChoice.of_host(self._topology.host)
        if not host.is_processor:
            self._tensors = DeviceTensors(host)
            self._bind = self._tensors.bind
            log.info("host.device: %s", self._tensors.device.name)
        self._fleet.add_members(self._topology, self._held, HOST)
        self._fleet.start(key)
        self._settle_classes()
        self._fleet.check_memory(self.placement.bytes_by_holder(), self._held)
        self._fleet.load(self._held, on_loading)
        plans = self._plan_slots()
        client = self._live_client()
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
        if self._tensors is not None:
            self._steps = DeviceSteps(
                client, self._tensors, self._gate, self._fleet, self._paths,
                layers=layers,
                nap_ns=0 if self._threads.spin_ns else NAP_NS,
                timeout_s=lambda: self.settings.call_timeout_s,
            )  # fmt: skip
        self._is_open = True

    def _settle_classes(self) -> None:
        """Cards have said what bf16 is with them: now it is known which classes meet in a layer."""
        placement = settle_classes(self.placement, {member.name: member.numerics for member in self._fleet.members.values()})
        if placement != self.placement:
            check_classes(self.spec.layers, placement, self._topology, self.settings.numerics)
            self.placement, self._held = placement, shards_by_holder(self.spec, placement)

    def _plan_slots(self) -> dict[str, SlotPlan]:
        shapes = {name: shapes_of(shards) for name, shards in self._held.items()}
        return plan_arena(shapes, self._slices, *self.wire_dtypes, self.settings.shared_bytes)

    def _window(self, member: Member) -> int:
        """Slices in flight, at most: where the arena was short, fewer slots than the plan asked
        for.
        """
        if member.slots is None:
            return self._slices.window
        return min(self._slices.window, member.slots.num_slots - SPARE_SLOTS)

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
        return self._table[layer][0]

    def experts(self, layer: int | str, hidden_states: Any, topk_ids: Any, topk_weights: Any, out: Any = None) -> Any:
        """Returns the routed experts' weighted sum for every row: [num_tokens, out_size], kind and
        dtype of `hidden_states`.

        `hidden_states` [num_tokens, in_size] f32, f16 or bf16; `topk_ids` [num_tokens, top_k] int32
        or int64, ids >= the number of experts are ignored; `topk_weights` [num_tokens, top_k]
        floating point. torch, NumPy or DLPack, on the CPU or on `host.device`. `out`, if given,
        receives the result. Blocks without the GIL.
        """
        entry = self._table[layer]
        if self._steps is not None and (step := self._steps.of_this_thread()) is not None:
            return step.experts(entry[0], hidden_states, topk_ids, topk_weights, out)
        result, arguments = self._bind(entry[1], entry[2], hidden_states, topk_ids, topk_weights, out)
        if not arguments[3]:
            return result
        staged = None
        if self._tensors is not None:
            staged, arguments = self._tensors.stage(entry[1], entry[2], arguments)
        gate = self._gate
        gate.active.append(None)
        try:
            if gate.is_shut:
                self._paths.pass_gate()
            self._run(entry[0], *arguments)
        except WorkerError as error:
            raise self._explained(error) from None
        finally:
            gate.active.pop()
        if staged is not None:
            staged.deliver()
        return result

    def submit(self, layer: int | str, hidden_states: Any, topk_ids: Any, topk_weights: Any, out: Any = None) -> ExpertCall:
        """Like `experts`, but returns at once. The inputs are kept, and must not be changed until
        the call is done.
        """
        entry = self._table[layer]
        result, arguments = self._bind(entry[1], entry[2], hidden_states, topk_ids, topk_weights, out)
        if not arguments[3]:
            return ExpertCall(layer, None, result, self._explained)
        staged = None
        if self._tensors is not None:
            staged, arguments = self._tensors.stage(entry[1], entry[2], arguments)
        gate = self._gate
        gate.active.append(None)
        try:
            if gate.is_shut:
                self._paths.pass_gate()
            call = ExpertCall(
                layer, self._submit(entry[0], *arguments), result, self._explained, None if staged is None else staged.deliver
            )
            gate.note_submitted(call)
        except WorkerError as error:
            raise self._explained(error) from None
        finally:
            gate.active.pop()
        return call

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
            raise ConfigError(
                CLOSED if self._client is None else "device_step: host.device is cpu; steps run on a GPU host's device"
            )
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
        with self._gate.lock:
            former = self._overrides, self.settings, self._slices
            try:
                self._paths.quiesce()
                self._overrides, self.settings, self._slices = overrides, settings, slices
                self._apply_policy()
            except BaseException:  # nothing may claim what is not in force
                self._overrides, self.settings, self._slices = former
                raise
            finally:
                self._gate.is_shut = bool(self._paths.worn_out)

    def _apply_policy(self) -> None:
        self._note_auto()
        plans = self._plan_slots()
        request_dtype, reply_dtype = self.wire_dtypes
        members = self._fleet.members.values()
        if not all(member.slots is not None and member.slots.holds(plans[member.name]) for member in members):
            # it would not answer, and nobody shall wait for that
            observe.refuse_lost(self._live_client())
            for member in members:  # all of them, so that the arena's limit holds
                self._paths.renew(member, plans[member.name])
        client = self._live_client()
        for member in members:
            client.set_policy(member.client_index, self._slices.slice_tokens, self._window(member), self._slices.is_measured)
            client.set_dtypes(member.client_index, request_dtype, reply_dtype)

    def _note_auto(self) -> None:
        forecasts = worker_forecasts(self._live_client().forecasts())
        if any(chunk.is_auto for forecast in forecasts for chunk in forecast.chunks):
            self._last_auto = forecasts

    def _explained(self, error: WorkerError) -> DflashError:
        """The same error with what else is known; a closed runtime takes no more results."""
        self._paths.note_worn_out()
        if not self._finalizer.alive:
            return DflashError(f"the runtime was closed before this call was done; take results before close() ({error})")
        return observe.explain_loss(error, self._fleet)

    def stats(self) -> dict[str, Any]:
        """Counters since start: `calls`, `rows`, `pairs`, `request_bytes`, `reply_bytes`,
        `floor_bytes`, `splits`, `waits` (s).

        The same and the workers' own times under `totals`, per worker under `workers`, per layer
        under `layers`; under `auto` what every worker's cost model knows, chose and predicted since
        the mode was set (`WorkerForecast` as a dictionary); under `numerics` what computes in which
        class; besides, the mode in use and why. After `close()` the last ones.
        """
        if self._client is None:
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
        self._live_client()
        return observe.ask_workers(self._fleet)

    def worker_processes(self) -> list[WorkerProcess]:
        """One entry per holder of experts; holders inside this process report this process."""
        return observe.list_processes(self._fleet, self._held)

    def take_traces(self) -> list[dict[str, int]]:
        """The recorded slices since the last call (setting `profile`): times of every step on both
        sides.
        """
        return self._live_client().take_traces()

    def _live_client(self) -> _core.Client:
        if self._client is None:
            raise ConfigError(CLOSED)
        return self._client

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
        self._run = self._submit = _refuse_closed
        self._finalizer()
        self._paths.drop_client()
        # its channels close with it, and what a device used of them
        self._client = self._steps = self._tensors = None
        self._bind = TensorBinder().bind

    def __enter__(self) -> ExpertRuntime:
        self._live_client()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def _refuse_closed(*_: Any) -> Any:
    raise ConfigError(CLOSED)
