"""`ExpertRuntime` offers the routed experts of a model, which run in other processes, as one
function. It starts and closes the workers, takes calls, switches modes and tells what happened.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import errno
import logging
import weakref
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from dflash_moe import _core
from dflash_moe.config import Settings, on_worker_loss, resolve_settings
from dflash_moe.errors import ConfigError, DflashError, WorkerError
from dflash_moe.experts.device_step import DeviceStep
from dflash_moe.experts.expert_call import BoundExperts, ExpertCall
from dflash_moe.experts.observe import WorkerProcess
from dflash_moe.experts.runtime_parts import RuntimeParts
from dflash_moe.holders.audit.contents import ContentsReport
from dflash_moe.holders.fleet import ChannelDecorator, LoadingReport
from dflash_moe.holders.holder import WorkerState
from dflash_moe.holders.transports import check_paths
from dflash_moe.model.spec import LayerSpec, ModelSpec
from dflash_moe.placement import Placement
from dflash_moe.protocol.failures import system_failure
from dflash_moe.store.kept_spec import kept_model_spec
from dflash_moe.topology import Topology, WorkerSpec

log = logging.getLogger(__name__)

Result = TypeVar("Result")

CLOSED = "this ExpertRuntime is closed; start another"


class ExpertRuntime:
    """The routed experts of one model on the workers of one topology. `start` makes it; it owns the
    workers it started until `close()`, which its `with` block calls. Any thread may call.

    Calls raise ConfigError (arguments), WorkerLost, WorkerTimeout, WorkerError and ProtocolError.
    """

    def __init__(self, parts: RuntimeParts) -> None:
        """Takes parts of which nothing is started; `ExpertRuntime.start` is what callers use."""
        self._parts = parts
        self._placed, self._fleet, self._client = parts.placed, parts.placed.fleet, parts.client
        self._calls = parts.calls
        self._finalizer = weakref.finalize(self, parts.end)

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
        spec = model if isinstance(model, ModelSpec) else kept_model_spec(Path(model), cache=settings.cache)
        parts = RuntimeParts(spec, topology, settings, overrides, channel_decorator=_channel_decorator)
        runtime = cls(parts)
        try:
            parts.open(on_loading)
            parts.run()
        except BaseException as error:
            runtime.close()
            if isinstance(error, RuntimeError) and "thread" in str(error):
                raise system_failure(
                    "a thread of the runtime could not be started", OSError(errno.EAGAIN, str(error))
                ) from None
            raise
        return runtime

    @property
    def call_limit_s(self) -> float:
        """The seconds after which every call has ended, in one way or another."""
        return self._calls.limit_s

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
        return self._placed.host_numerics

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
        choice = self._placed.host_device
        return f"cuda:{choice.device}" if choice.has_own_memory else "cpu"

    @property
    def host_device(self) -> str:
        """The device of attention and router, as the topology writes it: cpu, cuda:N, hip:N or
        sim:N.
        """
        return self._placed.host_device.name

    def layer_index(self, layer: int | str) -> int:
        """Returns the index of a layer that is given by index or module name. Raises ConfigError
        for a dense or unknown layer.
        """
        return self._calls.table.of(layer).layer

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
        try:
            return self._calls.experts(layer, hidden_states, topk_ids, topk_weights, out)
        except WorkerError as error:
            if self._calls.is_in_step:
                # A step says itself what failed in it, and of which cause.
                raise
            raise self._explained(error) from None

    def bind(self, layer: int | str, hidden_states: Any, topk_ids: Any, topk_weights: Any, out: Any) -> BoundExperts:
        """Returns a call of `experts` that reads and writes these tensors each time that it is run.
        It keeps them alive; the caller fills them before each run. It is for loops over layers that
        use the same tensors again. Errors for arguments that do not fit are those of `experts`;
        UnsupportedError where the host's device is no processor.
        """
        return self._calls.bind(layer, hidden_states, topk_ids, topk_weights, out, self._explained)

    def submit(self, layer: int | str, hidden_states: Any, topk_ids: Any, topk_weights: Any, out: Any = None) -> ExpertCall:
        """Starts the call that `experts` would make and returns at once. The `ExpertCall` keeps the
        inputs alive, and the caller must not change them until the call is done. ConfigError, and
        WorkerLost for a worker that is lost already, may be raised here; `ExpertCall.result` raises
        all other errors.
        """
        return self._calls.submit(layer, hidden_states, topk_ids, topk_weights, out, self._explained)

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
        self._require_open()
        return self._calls.device_step(stream)

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
        self._require_open()
        return self._calls.run_step(work, undo, stream)

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
        self._parts.modes.switch(wanted)

    def stats(self) -> dict[str, Any]:
        """Returns the counters since start: `calls`, `rows`, `pairs`, `request_bytes`,
        `reply_bytes`, `floor_bytes`, `splits` and `waits` (s).

        The same counters and the workers' own times stand under `totals`, for each worker under
        `workers` and for each layer under `layers`. `auto` says what the cost model of every worker
        knows, chose and predicted since the mode was set (`WorkerForecast` as a dictionary), and
        `numerics` what computes in which class. The mode in use and its reason are there too.
        `fabric_strangers` counts what reached this process's endpoints and was not from a worker's.
        After `close()` the last values are returned.
        """
        return self._parts.report.stats()

    def snapshot(self) -> dict[str, Any]:
        """Returns the counters that a server shows, and `dflash-moe top` a part of, without asking
        a worker (experts/snapshot.py). It has nothing by layer, and costs a fraction of `stats`.
        Raises DflashError in a forked child.
        """
        self._require_open()
        return self._parts.report.snapshot()

    def note_engine(self, stats: Callable[[], Mapping[str, Any]]) -> None:
        """Has snapshots tell of the engine over this runtime too, by the method `Engine.stats`,
        which is kept no longer than its engine.
        """
        self._parts.report.note_engine(stats)

    def worker_stats(self) -> dict[str, dict[str, int]]:
        """Asks every worker over its control connection for its own counters (calls, rows, bytes,
        compute_ns, queue_ns, memory), and returns them by its name. Errors: WorkerLost,
        WorkerTimeout; DflashError in a forked child.
        """
        self._require_open()
        return self._parts.report.worker_stats()

    def workers(self) -> list[WorkerState]:
        """Returns how every holder of experts stands: ready, or lost and why, how often it died,
        and when it is tried again. Raises DflashError in a forked child.
        """
        self._require_open()
        return self._parts.workers.states()

    def unready_reason(self) -> str:
        """Returns why a call would not be computed now: a sentence that names the workers which are
        lost or show no progress, and what is done about them. It is empty where every shard has a
        holder that can be asked. Raises DflashError in a forked child.
        """
        self._require_open()
        return self._parts.report.unready_reason()

    def release(self, name: str) -> None:
        """Starts or dials a worker again that was left alone because it died too often or would not
        do. Raises ConfigError for a worker that is not quarantined, DflashError in a forked child.
        """
        self._require_open()
        self._parts.workers.release(name)

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
        self._parts.elastic.add(spec)

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
        self._parts.elastic.remove(name, drain_s, force=force)

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
        self._parts.elastic.restart(name, drain_s, force=force)

    def worker_processes(self) -> list[WorkerProcess]:
        """Returns one entry for every holder of experts. Holders inside this process report this
        process. Workers on other machines are asked, so that the errors of `worker_stats` apply;
        ConfigError once the runtime is closed.
        """
        self._require_open()
        return self._parts.report.worker_processes()

    def check_weights(self, report: ContentsReport = lambda _layer, _count, _total: None) -> int:
        """Compares the content checksums of the weights that every holder has loaded with those of
        the host's own copy of the checkpoint, and returns the number of shards compared.

        `report(layer, experts compared, of how many)` is called now and then. Errors:
        CheckpointError naming each layer and shard that differs, its holder and both values;
        UnsupportedError for a worker whose version knows no content checksums; WorkerLost,
        WorkerTimeout; DflashError in a forked child.
        """
        self._require_open()
        return self._parts.report.check_weights(report)

    def content_checksums(self) -> tuple[tuple[int, ...], ...]:
        """Returns the content checksum of every shard as its holder has it, by layer and shard. It
        waits for holders that still read mapped weights. Errors are those of `check_weights` but
        for the first.
        """
        self._require_open()
        return self._parts.report.content_checksums()

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

    def _explained(self, error: WorkerError) -> DflashError:
        return self._parts.report.explained(error)

    def _require_open(self) -> None:
        if not self._finalizer.alive:
            raise ConfigError(CLOSED)

    def close(self) -> None:
        """Ends all workers, within about a second. It never raises because a worker is already
        gone, and may be called again.
        """
        if self._finalizer.alive:
            self._parts.note_end()
            self._finalizer()

    def __enter__(self) -> ExpertRuntime:
        self._require_open()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
