"""`ExpertRuntime` offers the routed experts of a model, which run in other processes, as one
function. It starts and closes the workers, takes calls, switches modes and tells what happened.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import errno
import logging
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from dflash_moe import _core
from dflash_moe.config import Settings, on_worker_loss, resolve_settings
from dflash_moe.errors import ConfigError, DflashError, UnsupportedError, WorkerError, WorkerLost
from dflash_moe.experts import observe
from dflash_moe.experts.auto import WorkerForecast, log_explanation, mode_reason, worker_forecasts
from dflash_moe.experts.device_step import NAP_NS, DeviceStep, DeviceSteps
from dflash_moe.experts.device_tensors import DeviceTensors
from dflash_moe.experts.expert_call import BoundExperts, ExpertCall
from dflash_moe.experts.layer_table import LayerTable
from dflash_moe.experts.observe import WorkerProcess
from dflash_moe.experts.readiness import unready_reason
from dflash_moe.experts.runtime_parts import RuntimeParts
from dflash_moe.experts.step_replay import StepReplay
from dflash_moe.experts.tensors import HostTensors
from dflash_moe.holders.audit.contents import ContentsReport, compare_with_own_copy, held_checksums
from dflash_moe.holders.fleet import ChannelDecorator, LoadingReport
from dflash_moe.holders.kept_worker import WorkerState
from dflash_moe.holders.placed_experts import PlacedExperts, slices_of
from dflash_moe.holders.transports import check_paths
from dflash_moe.model.spec import LayerSpec, ModelSpec, model_spec
from dflash_moe.placement import Placement
from dflash_moe.placement.numerics import describe_numerics
from dflash_moe.protocol.devices import DeviceChoice
from dflash_moe.protocol.failures import system_failure
from dflash_moe.protocol.identity import choose_numerics
from dflash_moe.topology import HOST, Topology, WorkerSpec
from dflash_moe.topology.numerics import DEFAULT_NUMERICS

log = logging.getLogger(__name__)

Result = TypeVar("Result")

CLOSED = "this ExpertRuntime is closed; start another"


class ExpertRuntime:
    """The routed experts of one model on the workers of one topology. `start` makes it; it owns the
    workers it started until `close()`, which its `with` block calls. Any thread may call.

    Calls raise ConfigError (arguments), WorkerLost, WorkerTimeout, WorkerError and ProtocolError.
    """

    def __init__(self, placed: PlacedExperts, *, overrides: dict[str, Any]) -> None:
        """Builds the parts without starting anything; `ExpertRuntime.start` is what callers use."""
        self._placed = placed
        self._overrides = overrides
        self._fleet = placed.fleet
        self._parts = parts = RuntimeParts(placed)
        self._client, self._keeper, self._workers = parts.client, parts.paths, parts.workers
        self._elastic, self._fallback, self._audit = parts.elastic, parts.fallback, parts.audit
        self._finalizer = weakref.finalize(self, parts.end)
        self._table = LayerTable(placed.spec.layers)
        host = DeviceChoice.of_host(placed.topology.host)
        self._device = None if host.is_processor else DeviceTensors(host)
        self._tensors = HostTensors() if self._device is None else self._device
        # Only a host whose device is no processor has device steps.
        self._steps: DeviceSteps | None = None
        self._replay: StepReplay | None = None
        self._last_stats: dict[str, Any] = {}
        # These are the forecasts from when mode auto was last in force, for the log at the end.
        self._last_auto: tuple[WorkerForecast, ...] = ()
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
        """Starts and loads all workers of `topology` for `model`, which is a checkpoint directory
        or what `model_spec` made of one.

        `overrides` are settings by their Python names (mode, transport, dtype, batch_capacity ...);
        they win over environment and topology. `on_loading(holder, bytes of experts loaded, of how
        many)` is called now and then, from several threads. Errors: ConfigError, CheckpointError,
        UnsupportedError, ProtocolError, WorkerLost, WorkerTimeout; none of them leaves a process
        behind.
        """
        settings = resolve_settings(topology.stated_settings, **overrides)
        log.info("%s", on_worker_loss(settings))
        check_paths(topology, settings)
        spec = model if isinstance(model, ModelSpec) else model_spec(Path(model))
        placed = PlacedExperts(spec, topology, settings, channel_decorator=_channel_decorator)
        runtime = cls(placed, overrides=overrides)
        try:
            runtime._open(on_loading)
        except BaseException as error:
            runtime.close()
            if isinstance(error, RuntimeError) and "thread" in str(error):
                raise system_failure(
                    "a thread of the runtime could not be started", OSError(errno.EAGAIN, str(error))
                ) from None
            raise
        return runtime

    def _open(self, on_loading: LoadingReport | None) -> None:
        if self._device is not None:
            log.info("host.device: %s", self._device.device.name)
        layers = self._parts.open(on_loading)
        if self._device is not None:
            self._steps = DeviceSteps(
                self._client, self._device, self._fleet, self._table, layers=layers,
                nap_ns=0 if self._placed.threads.spin_ns else NAP_NS,
                timeout_s=lambda: self.settings.call_timeout_s, patience_s=lambda: self.call_limit_s,
            )  # fmt: skip
            self._replay = StepReplay(self._steps, lambda: self.settings.call_timeout_s)
        self._parts.run()
        self._is_open = True

    @property
    def call_limit_s(self) -> float:
        """The seconds after which every call has ended, in one way or another."""
        return _core.MAX_PATIENCE * self.settings.call_timeout_s + 1.0

    @property
    def has_remote_experts(self) -> bool:
        """Whether some experts are computed by others than the thread that waits for them."""
        return self._fleet.has_remote_experts

    def set_spinning(self, is_allowed: bool) -> None:
        """Says whether threads that wait for replies may spin, where they may at all. A host that
        computes something else meanwhile needs their core.
        """
        self._client.set_spinning(is_allowed and not self._placed.threads.is_oversubscribed)

    @property
    def host_pool(self) -> _core.HostPool:
        """The threads that the host's operators and the experts in its process share."""
        return self._fleet.host_pool

    @property
    def host_numerics(self) -> str:
        """The numerics class of the host's own linear layers on its processor: that of
        host.activations, and where nobody stated those, the workers' if this processor computes it,
        else the default. Raises UnsupportedError for one that was stated and is not computed here.
        """
        try:
            return choose_numerics(self._placed.topology.numerics_of(HOST), self.host_pool.isa, name=HOST)[0]
        except UnsupportedError:
            if self._placed.topology.host.activations is not None:
                raise
            return DEFAULT_NUMERICS

    def host_numerics_of(self, weight_format: str) -> str:
        """The class of the host's own matrices that are kept in this format, which a preset may
        choose; otherwise `host_numerics`.
        """
        return self._placed.dense_class(weight_format, self.host_pool.isa) or self.host_numerics

    @property
    def wire_dtypes(self) -> tuple[str, str]:
        """The dtypes of requests and of replies: those of the settings, else the model's own."""
        return self._placed.wire_dtypes

    @property
    def spec(self) -> ModelSpec:
        """The layers, formulas and fingerprint of the model."""
        return self._placed.spec

    @property
    def placement(self) -> Placement:
        """Where every expert is, and in which numerics class it is computed."""
        return self._placed.placement

    @property
    def settings(self) -> Settings:
        """The settings in force."""
        return self._placed.settings

    @property
    def layers(self) -> tuple[LayerSpec, ...]:
        """The layers with routed experts."""
        return tuple(self.spec.layers)

    @property
    def tensor_device(self) -> str:
        """The device, as torch writes it, on which a model for this runtime should lie: cpu, also
        for a simulated card, or cuda:N, also for HIP.
        """
        choice = DeviceChoice.of_host(self._placed.topology.host)
        return f"cuda:{choice.device}" if choice.has_own_memory else "cpu"

    @property
    def host_device(self) -> str:
        """The device of attention and router, as the topology writes it: cpu, cuda:N, hip:N or
        sim:N.
        """
        choice = DeviceChoice.of_host(self._placed.topology.host)
        return choice.backend if choice.is_processor else f"{choice.backend}:{choice.device}"

    def layer_index(self, layer: int | str) -> int:
        """Returns the index of a layer that is given by index or module name. Raises ConfigError
        for a dense or unknown layer.
        """
        return self._table.of(layer).layer

    def experts(self, layer: int | str, hidden_states: Any, topk_ids: Any, topk_weights: Any, out: Any = None) -> Any:
        """Returns the routed experts' weighted sum for every row, [num_tokens, out_size], of the
        kind and dtype of `hidden_states`.

        `hidden_states` is [num_tokens, in_size] in f32, f16 or bf16. `topk_ids` is [num_tokens,
        top_k] in int32 or int64: experts of the layer, or their number, which asks for none.
        `topk_weights` is [num_tokens, top_k] in floating point. All three are torch, NumPy or
        DLPack tensors on the CPU or on `host.device`, and are only borrowed. `out`, if given,
        receives the result; it is contiguous and has the result's shape and dtype. The call blocks
        without the GIL. Errors are those of the class.
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

    def bind(self, layer: int | str, hidden_states: Any, topk_ids: Any, topk_weights: Any, out: Any) -> BoundExperts:
        """Returns a call of `experts` that reads and writes these tensors each time that it is run.
        It keeps them alive; the caller fills them before each run. It is for loops over layers that
        use the same tensors again. Errors for arguments that do not fit are those of `experts`;
        UnsupportedError where the host's device is no processor.
        """
        if self._device is not None:
            raise UnsupportedError("bind: the host's device is no processor; call experts()")
        shape = self._table.of(layer)
        _, batch, _ = self._tensors.bind(shape, hidden_states, topk_ids, topk_weights, out)
        return BoundExperts(self._client, shape.layer, batch, self._explained)

    def submit(self, layer: int | str, hidden_states: Any, topk_ids: Any, topk_weights: Any, out: Any = None) -> ExpertCall:
        """Starts the call that `experts` would make and returns at once. The `ExpertCall` keeps the
        inputs alive, and the caller must not change them until the call is done. ConfigError, and
        WorkerLost for a worker that is lost already, may be raised here; `ExpertCall.result` raises
        all other errors.
        """
        shape = self._table.of(layer)
        result, batch, deliver = self._tensors.bind(shape, hidden_states, topk_ids, topk_weights, out)
        try:
            call = _core.Call(self._client, shape.layer, batch)
        except WorkerError as error:
            raise self._explained(error) from None
        return ExpertCall(layer, call, result, self._explained, deliver)

    def device_step(self, *, stream: int | None = None) -> AbstractContextManager[DeviceStep]:
        """Opens a `with` block in which the host's device makes the exchanges of expert calls by
        itself. Calls of this thread to `ExpertRuntime.experts` within the block become part of it.

        It is meant for decode steps: a call has at most 64 tokens, and each shard has a holder that
        is reached in shared memory or is in this process. Results count once the block was left
        without an error; after an error the caller repeats the step with plain `experts`, which
        `run_step` does by itself. Calls of other threads wait meanwhile. `stream` is the one that
        the caller's framework works on; torch's current stream is found without it. Errors:
        ConfigError, UnsupportedError with the reason, WorkerTimeout, WorkerLost.
        """
        if self._steps is None:
            self._require_open()
            raise ConfigError("device_step: host.device is cpu; steps run on a GPU host's device")
        return self._steps.open(stream)

    def run_step(
        self, work: Callable[[], Result], *, undo: Callable[[], None] = lambda: None, stream: int | None = None
    ) -> Result:
        """Returns `work()`, which makes the expert calls of one decode step in this thread: as a
        step of the host's device (`device_step`) where there can be one, else with plain calls.

        Where a worker of the step is lost, hangs or answers wrongly, `undo()` is called, which
        takes back what `work` did so far (the lengths of caches, for example), and then `work`
        again with plain calls, which ask other holders or wait for the worker's return. The bits
        are the same, and the next step is the device's again, with the holders that there are by
        then. Errors: those of `experts`, and what `work` raises itself.
        """
        if self._replay is None:
            self._require_open()
            return work()
        return self._replay.run(work, undo, stream)

    def set_mode(
        self,
        mode: str | None = None,
        *,
        stream_tokens: int | None = None,
        batch_capacity: int | None = None,
        dtype: str | None = None,
        reply_dtype: str | None = None,
    ) -> None:
        """Switches mode, slices and wire dtypes; what is not given stays as it is. It waits for the
        calls under way, and later calls wait for it: no longer than for workers that answer within
        `failure.suspect_ms`. One that is slower is waited for by calls that need it, and is lost
        like one that shows no progress.

        A switch changes the speed, and with a dtype the rounding on the wire, but nothing else.
        Errors: ConfigError for values that are not allowed or within a device step, WorkerTimeout
        where calls do not end, DflashError where this process lacks descriptors or memory; the
        former settings then stay in force.
        """
        wanted = {
            "mode": mode, "stream_tokens": stream_tokens, "batch_capacity": batch_capacity, "dtype": dtype,
            "reply_dtype": reply_dtype,
        }  # fmt: skip
        overrides = {**self._overrides, **{key: value for key, value in wanted.items() if value is not None}}
        settings = resolve_settings(self._placed.topology.stated_settings, **overrides)
        slices_of(settings)  # refuses what does not fit before any call is held up
        if self._steps is not None and self._steps.of_this_thread() is not None:
            raise ConfigError("set_mode: this thread is in a device step; leave it first")
        with self._between_calls():
            self._note_auto()
            self._keeper.change(settings)
            self._overrides = overrides

    @contextmanager
    def _between_calls(self) -> Iterator[None]:
        """Opens a block in which no call is under way. New calls wait for its end, each under its
        own deadline. Raises WorkerTimeout where the calls under way do not end in time.
        """
        self._client.hold(self.call_limit_s)
        try:
            yield
        finally:
            self._client.resume()

    def _note_auto(self) -> None:
        forecasts = worker_forecasts(self._client.forecasts())
        if any(chunk.is_auto for forecast in forecasts for chunk in forecast.chunks):
            self._last_auto = forecasts

    def _explained(self, error: WorkerError) -> DflashError:
        """Returns an error of the client with what else the runtime knows. Where the runtime was
        closed meanwhile, the error says so instead, because nothing is wrong with the worker.
        """
        if not self._finalizer.alive:
            text = f"the runtime was closed before this call was done; take results before close() ({error})"
            return DflashError(text, **{**error.fields(), "code": "closed"})
        if isinstance(error, WorkerLost):
            self._workers.ring()
        return observe.explain_loss(error, self._fleet, self._remedy_of)

    def _remedy_of(self, worker: str) -> str:
        return f"{self._workers.remedy_of(worker)}{self._fallback.why_not(worker)}"

    def stats(self) -> dict[str, Any]:
        """Returns the counters since start: `calls`, `rows`, `pairs`, `request_bytes`,
        `reply_bytes`, `floor_bytes`, `splits` and `waits` (s).

        The same counters and the workers' own times stand under `totals`, for each worker under
        `workers` and for each layer under `layers`. `auto` says what the cost model of every worker
        knows, chose and predicted since the mode was set (`WorkerForecast` as a dictionary), and
        `numerics` what computes in which class. The mode in use and its reason are there too. After
        `close()` the last values are returned.
        """
        if not self._finalizer.alive:
            return self._last_stats
        counted = observe.count_calls(self._client, self._fleet, [layer.index for layer in self.spec.layers])
        forecasts = worker_forecasts(self._client.forecasts())
        slices = self._placed.slices
        return {
            **counted["totals"],
            **counted,
            "fallback": self._fallback.describe(counted["workers"]),
            "mode": slices.mode,
            "mode_asked": self.settings.mode,
            "mode_reason": mode_reason(forecasts) if slices.is_measured else "as asked",
            "auto": {forecast.name: asdict(forecast) for forecast in forecasts},
            "slice_tokens": slices.slice_tokens,
            "window": slices.window,
            "wire_dtypes": self.wire_dtypes,
            "numerics": describe_numerics(self.spec.layers, self.placement, self.settings.numerics),
            "audit": self._audit.stats(),
            "transports": {member.name: member.transport for member in self._fleet.members.values()},
            **({} if self._replay is None else {"device_steps": self._replay.counts()}),
        }

    def worker_stats(self) -> dict[str, dict[str, int]]:
        """Asks every worker over its control connection for its own counters (calls, rows, bytes,
        compute_ns, queue_ns, memory), and returns them by its name. Errors: WorkerLost,
        WorkerTimeout; DflashError in a forked child.
        """
        self._require_open()
        return observe.ask_workers(self._fleet)

    def workers(self) -> list[WorkerState]:
        """Returns how every holder of experts stands: ready, or lost and why, how often it died,
        and when it is tried again. Raises DflashError in a forked child.
        """
        self._require_open()
        return self._workers.states()

    def unready_reason(self) -> str:
        """Returns why a call would not be computed now: a sentence that names the workers which are
        lost or show no progress, and what is done about them. It is empty where every shard has a
        holder that can be asked. Raises DflashError in a forked child.
        """
        self._require_open()
        return unready_reason(
            self._parts.holders.everybody(), self._client.workers(),
            layer_names={layer.index: layer.name for layer in self.layers}, remedy_of=self._remedy_of,
        )  # fmt: skip

    def release(self, name: str) -> None:
        """Starts or dials a worker again that was left alone because it died too often or would not
        do. Raises ConfigError for a worker that is not quarantined, DflashError in a forked child.
        """
        self._require_open()
        self._workers.release(name)

    def add_worker(self, spec: WorkerSpec | Mapping[str, Any] | str) -> None:
        """Adds a worker while calls go on: a WorkerSpec, a mapping with the keys of one worker of a
        topology, or YAML text of that. It blocks until the worker is a holder.

        The worker is started, or dialled where it has an address, and loads as many shards as fit:
        those first that nobody holds, then those with the most load for each holder. `memory`
        bounds its weights; without it they take at most half of what is free there. With `experts`
        it holds the shards of these, all of them.

        Errors, with which nothing has changed: ConfigError and TopologyError for a spec that does
        not fit, naming memory and shard or the field in which holders would disagree;
        ProtocolError, CheckpointError, UnsupportedError for a worker that will not do; WorkerLost,
        WorkerTimeout; DflashError in a forked child.
        """
        self._require_open()
        self._elastic.add(spec)

    def remove_worker(self, name: str, drain_s: float = 30.0, *, force: bool = False) -> None:
        """Removes a worker while calls go on. It gets no new rows that another holder can have, and
        finishes what it has. What is under way after `drain_s` seconds is asked of other holders.
        Then its session ends, and its process where the host started it; the method blocks until
        that is done.

        Raises ConfigError for an unknown worker, for one inside this process, for one that is being
        removed, and for the last ready holder of a shard, naming both. With `force` the shards then
        have no holder, and calls that need them raise WorkerLost until a worker is added that holds
        them. Other errors: UnsupportedError, WorkerTimeout; DflashError in a forked child.
        """
        self._require_open()
        self._elastic.remove(name, drain_s, force=force)

    def restart_worker(self, name: str, drain_s: float = 30.0, *, force: bool = False) -> None:
        """Ends a worker that the host started as `remove_worker` does, and starts it anew with what
        is installed now; it blocks until the worker holds its shards again. Doing so to one worker
        after the other upgrades all of them without a failed call, where each shard has two
        holders.

        Raises ConfigError as `remove_worker`, and for a worker that somebody else starts or that is
        not ready. With `force`, calls that need a shard with no other holder wait for the worker,
        at most `failure.park_s`. WorkerLost says that it is not back; it is then tried again like
        any worker that died. Other errors: WorkerTimeout; DflashError in a forked child.
        """
        self._require_open()
        self._elastic.restart(name, drain_s, force=force)

    def worker_processes(self) -> list[WorkerProcess]:
        """Returns one entry for every holder of experts. Holders inside this process report this
        process. Workers on other machines are asked, so that the errors of `worker_stats` apply;
        ConfigError once the runtime is closed.
        """
        self._require_open()
        return observe.list_processes(self._fleet, self._placed.held)

    def check_weights(self, report: ContentsReport = lambda _layer, _count, _total: None) -> int:
        """Compares the content checksums of the weights that every holder has loaded with those of
        the host's own copy of the checkpoint, and returns the number of shards compared.

        `report(layer, experts compared, of how many)` is called now and then. Errors:
        CheckpointError naming each layer and shard that differs, its holder and both values;
        UnsupportedError for a worker whose version knows no content checksums; WorkerLost,
        WorkerTimeout; DflashError in a forked child.
        """
        self._require_open()
        self._fleet.owner.require_here()
        return compare_with_own_copy(
            self._fleet.shards.ask_checksum,
            self._placed.held,
            Path(self.spec.path),
            timeout_s=self.settings.start_timeout_s,
            report=report,
        )

    def content_checksums(self) -> tuple[tuple[int, ...], ...]:
        """Returns the content checksum of every shard as its holder has it, by layer and shard. It
        waits for holders that still read mapped weights. Errors are those of `check_weights` but
        for the first.
        """
        self._require_open()
        self._fleet.owner.require_here()
        return held_checksums(
            self._fleet.shards.ask_checksum, self._placed.held, self.spec.layers, timeout_s=self.settings.start_timeout_s
        )

    def architecture_of(self, holder: str) -> str:
        """Returns what a holder of experts computes with: the kernel set of its processor, or the
        architecture of its card.
        """
        return self._fleet.architecture_of(holder)

    def take_traces(self) -> list[dict[str, int]]:
        """Returns the slices recorded since the last call of this method, each with the times of
        its stages on both sides in nanoseconds. Slices are recorded where the setting `profile` is
        on.
        """
        return self._client.take_traces()

    def _require_open(self) -> None:
        if not self._finalizer.alive:
            raise ConfigError(CLOSED)

    def close(self) -> None:
        """Ends all workers, within about a second. It never raises because a worker is already
        gone, and may be called again.
        """
        if not self._finalizer.alive:
            return
        if self._is_open:
            # A forked child owns neither workers nor counters, and the client refuses it.
            with suppress(DflashError):
                self._last_stats = self.stats()
                self._note_auto()
                log_explanation(self._last_auto)
        # The device must let go of the data paths' memory before these are closed.
        self._steps = self._replay = None
        self._finalizer()

    def __enter__(self) -> ExpertRuntime:
        self._require_open()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
