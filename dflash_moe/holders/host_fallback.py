"""The last holder of shards whose worker is lost: this process, which computes them on the host's
processor from the mapped checkpoint (decision 57).

Nothing is mapped before a worker is missed. For each worker there is then a stand-in of its own, a
`LocalWorker` with all of the worker's shards, which stays from then on. The client asks it only
where no worker can be asked.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from dflash_moe.config.remedies import fallback_is_off
from dflash_moe.errors import CheckpointError, DflashError
from dflash_moe.holders.audit.contents import checksum_text
from dflash_moe.holders.events import StandInsChanged
from dflash_moe.model.checkpoint import Checkpoint
from dflash_moe.model.checkpoint_files import SeenFiles
from dflash_moe.model.refusals import in_one_line
from dflash_moe.placement.fallback import gaps, host_kernel_set
from dflash_moe.placement.held_shards import holders_by_shard
from dflash_moe.protocol.failures import is_passing
from dflash_moe.store.machine_panels import ONLY_PANELS, PanelsMissing
from dflash_moe.telemetry.spaced_log import SpacedLog
from dflash_moe.topology import HOST
from dflash_moe.topology.addresses import Address
from dflash_moe.topology.numerics import DEFAULT_NUMERICS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dflash_moe import _core
    from dflash_moe.holders.events import HolderEvents
    from dflash_moe.holders.holder import Holder
    from dflash_moe.holders.holder_lists import HolderLists, Where
    from dflash_moe.holders.path_keeper import PathKeeper
    from dflash_moe.holders.placed_experts import PlacedExperts
    from dflash_moe.placement.held_shards import HeldShard

log = logging.getLogger(__name__)

Result = TypeVar("Result")

# The store reads a stand-in's mapped shards in the background, for their checksums. It is asked at
# this interval whether it has read the next one, so that a shard which must be compared before
# calls may use it waits so much longer at most.
LOOK_S = 0.05
# What lacked descriptors or memory is tried again after this time.
AGAIN_S = 0.1
# A thread that is told to end does so within this time, unless it is loading an expert.
STOP_S = 5.0


def stand_in_name(worker: str) -> str:
    """Returns what the stand-in for a worker is called; no worker's name has a colon."""
    return f"{HOST}:{worker}"


@dataclass(slots=True)
class _StandIn:
    """The stand-in for one worker. `shards` are those that it can compute."""

    worker: str
    shards: list[HeldShard]
    thread: threading.Thread | None = None
    is_being_made: bool = False
    member: Holder | None = None
    # Why it could not be made, or why shards were taken from it again.
    failure: str = ""
    # What this process lacks at this time, so that it is not made yet.
    setback: str = ""
    num_checked: int = 0
    refused: set[Where] = field(default_factory=set)


class HostFallback:
    """The stand-ins of one runtime. Any thread may call; `call_off` and `close` end it."""

    def __init__(
        self, client: _core.Client, placed: PlacedExperts, paths: PathKeeper, holders: HolderLists, events: HolderEvents
    ) -> None:
        """Notes how the files of the checkpoint are before any worker reads them. Raises
        CheckpointError where a fallback was asked for by name and this host has no weights, and
        where this process lacks descriptors to look at them.
        """
        self._client, self._placed, self._paths, self._holders = client, placed, paths, holders
        self._events = events
        self._fleet = placed.fleet
        self._model = Path(placed.spec.path)
        # Why there is none, empty where there may be.
        self.reason = fallback_is_off(placed.settings)
        self._lock = threading.Lock()
        self._is_over = threading.Event()
        self._stand_ins: dict[str, _StandIn] = {}
        # By "weights: ..." or class: why shards have none.
        self.gaps: dict[str, int] = {}
        self._files: SeenFiles | None = None
        if self.reason:
            return
        try:
            self._files = SeenFiles(self._model)
            if placed.settings.host_fallback == "mapped":
                Checkpoint.open(self._model).refuse_stub()
        except CheckpointError as error:
            if placed.settings.host_fallback == "mapped" or is_passing(error):
                raise error.reworded(f"host.fallback: mapped: {error}") from None
            self.reason = str(error)

    def start(self) -> None:
        """Takes the plan, now that every worker has said its class. Nothing is mapped."""
        if self.reason:
            return
        placement, layers = self._placed.placement, self._placed.spec.layers
        isa = host_kernel_set(self._placed.settings)
        without: set[Where] = set()
        for layer, shard, reason in gaps(layers, placement, self._placed.topology, isa):
            without.add((layer.index, shard.shard_id))
            self.gaps[reason] = self.gaps.get(reason, 0) + 1
        for reason, count in self.gaps.items():
            log.info("the host stands in for %d shards less: %s", count, reason)
        for name, shards in self._placed.held.items():
            if self._fleet.members[name].session is None:
                continue
            own = [
                replace(one, layout="mapped", is_replica=True)
                for one in shards
                if not one.is_replica and _where(one) not in without
            ]
            if own:
                self._stand_ins[name] = _StandIn(name, own)

    def miss(self, worker: str) -> None:
        """Says that a worker is lost, shows no progress or answers nothing. The stand-ins for
        shards that nobody else holds now are made in threads of their own.
        """
        if self.reason or self._is_over.is_set():
            return
        if self._is_any_made() and self._have_files_changed():
            self._withdraw_all()
            return
        states = {report["name"]: report["state"] for report in self._client.workers()}

        holders_of = self._holders_of()

        def is_missed(where: Where) -> bool:
            names = holders_of[where]
            return worker in names and all(name == worker or states.get(name) in ("lost", "suspect") for name in names)

        for one in self._stand_ins.values():
            if any(is_missed(_where(held)) for held in one.shards):
                self._begin(one)

    def why_not(self, worker: str) -> str:
        """Returns a clause on why the host does not compute a worker's experts, empty where it may,
        or where somebody has said that it must not.
        """
        with self._lock:
            one = self._stand_ins.get(worker)
            in_general = "" if self.reason else " or ".join(self.gaps)
            reason = one.failure or one.setback if one is not None else in_general
        return f"; the host's processor cannot stand in for it: {reason}" if reason else ""

    def _have_files_changed(self) -> bool:
        """Says whether it is certain that what stand-ins have mapped is not what workers loaded."""
        try:
            return self._files is not None and not self._files.are_unchanged()
        except DflashError as error:
            log.warning("whether the host may still stand in is not known at this time: %s", str(error))
            return False

    def _is_any_made(self) -> bool:
        with self._lock:
            return any(one.member is not None for one in self._stand_ins.values())

    def _withdraw_all(self) -> None:
        """Takes all stand-ins out: what they have mapped is not what the workers have loaded."""
        self.reason = f"the files of checkpoint {self._model} have changed since the workers loaded them"
        log.error("the host's processor stands in for no worker any more: %s", self.reason)
        for one in self._stand_ins.values():
            one.failure = self.reason
            for held in one.shards:
                self._holders.set_last_resort(_where(held), None)

    def prospects(self) -> tuple[set[str], set[str]]:
        """Returns the workers with shards for which a stand-in is being made, so that calls shall
        wait for it, and those with shards that have one, or would get one if they were missed.
        """
        with self._lock:
            making = [held for one in self._stand_ins.values() if one.is_being_made for held in one.shards]
            able = [held for one in self._stand_ins.values() if not one.failure and not self.reason for held in one.shards]
        holders_of = self._holders_of() if making or able else {}

        def holders(shards: list[HeldShard]) -> set[str]:
            return {name for held in shards for name in holders_of[_where(held)]}

        return holders(making), holders(able)

    def _holders_of(self) -> Mapping[Where, tuple[str, ...]]:
        """Returns the workers that hold each shard now; some may have been added or removed."""
        return holders_by_shard(self._placed.spec, self._placed.placement)

    def describe(self, workers: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
        """Returns what `stats()` reports: the calls, rows and pairs that stand-ins computed, how
        each of them stands, and why there is none or for how many shards none. `workers` are the
        counters of all holders by name.
        """
        found: dict[str, Any] = dict.fromkeys(("calls", "rows", "pairs"), 0)
        states = {}
        with self._lock:
            for one in self._stand_ins.values():
                counted = workers.get(stand_in_name(one.worker), {})
                for key in ("calls", "rows", "pairs"):
                    found[key] += counted.get(key, 0)
                states[one.worker] = _state_of(one)
        return {**found, "off": self.reason, "stand_ins": states, "shards_without": dict(self.gaps)}

    def call_off(self) -> None:
        """From now on none is made; never raises."""
        self._is_over.set()

    def close(self) -> None:
        """Waits for the threads of those that were being made; never raises. What they made belongs
        to the fleet.
        """
        until = time.monotonic() + STOP_S
        for one in self._stand_ins.values():
            if one.thread is not None and one.thread is not threading.current_thread():
                one.thread.join(max(0.0, until - time.monotonic()))

    # -- making one --------------------------------------------------------------------------------

    def _begin(self, one: _StandIn) -> None:
        with self._lock:
            if one.is_being_made or one.member is not None:
                return
            one.is_being_made, one.failure = True, ""
            one.thread = threading.Thread(
                target=self._run, args=(one,), name=f"dflash-{stand_in_name(one.worker)}", daemon=True
            )
        try:
            one.thread.start()
        except RuntimeError as error:  # as many threads as the system allows
            with self._lock:
                one.is_being_made, one.thread, one.failure = False, None, f"this process cannot start a thread for it: {error}"

    def _run(self, one: _StandIn) -> None:
        try:
            began = time.monotonic()
            member = self._when_possible(one, lambda: self._make(one))
            waiting = self._when_possible(one, lambda: self._join_unchanged(one, member))
            with self._lock:
                one.is_being_made = bool(waiting)
            log.warning("the host's processor stands in for worker %s after %.3f s", one.worker, time.monotonic() - began)
            self._events.note(StandInsChanged())
            self._check(one, member, waiting)
        except DflashError as error:
            level = logging.DEBUG if self._is_over.is_set() else logging.ERROR
            log.log(level, "the host's processor cannot stand in for worker %s: %s", one.worker, str(error))
            one.failure = str(error)
        except Exception as error:
            log.exception("the host's processor cannot stand in for worker %s", one.worker)
            one.failure = f"{type(error).__name__}: {error}"
        finally:
            with self._lock:
                one.is_being_made = False
            self._events.note(StandInsChanged())

    def _when_possible(self, one: _StandIn, step: Callable[[], Result]) -> Result:
        """Returns what `step` does; what this process lacks for it is waited for."""
        lacks = SpacedLog(log)
        while True:
            try:
                done = step()
            except Exception as error:
                if not is_passing(error) or self._is_over.is_set():
                    raise
                one.setback = in_one_line(error)
                lacks.warning("the host's processor cannot stand in for worker %s yet: %s", one.worker, one.setback)
                self._is_over.wait(AGAIN_S)
            else:
                one.setback = ""
                return done

    def _make(self, one: _StandIn) -> Holder:
        """Maps the shards and makes the stand-in known to the client, which asks it for nothing
        yet: from panels, which compute as fast as the worker did, or else from the checkpoint.
        Errors are those of a start.
        """
        if self._placed.settings.cache.has_panels:
            try:
                return self._make_of(one, ONLY_PANELS)
            except PanelsMissing as missing:
                log.debug("the stand-in for worker %s maps the checkpoint: %s", one.worker, str(missing))
        return self._make_of(one, "mapped")

    def _make_of(self, one: _StandIn, layout: str) -> Holder:
        name = stand_in_name(one.worker)
        member = self._fleet.new_holder(name, Address("loopback"), "loopback", DEFAULT_NUMERICS, layout)
        local = member.local = self._fleet.new_local(member, lost=one.worker)

        def take(*path: Any) -> None:
            self._fleet.admit(member)
            self._paths.introduce(member, *path, is_last_resort=True)

        try:
            checkpoint = Checkpoint.open(self._model)
            for held in one.shards:
                if self._is_over.is_set():
                    raise DflashError("the runtime was closed")
                local.load(
                    checkpoint, held.layer.ffn, layer=held.layer.index, shard=held.shard_id, experts=held.experts,
                    weight_dtype=held.weight_dtype, weights_fingerprint=held.weights_fingerprint, numerics=held.numerics,
                )  # fmt: skip
            with self._lock:
                self._placed.stand_in(name, one.shards)
            self._paths.make(member, take)
            one.member = member
        except BaseException:
            if member.name not in self._fleet.members:
                local.close()
            raise
        return member

    # -- equal bytes -------------------------------------------------------------------------------

    def _join_unchanged(self, one: _StandIn, member: Holder) -> list[HeldShard]:
        """Lets calls use those shards that the worker read from the very files which are mapped
        now, unchanged since before it read them. Returns the others, which have to be compared
        first.
        """
        worker = self._fleet.members.get(one.worker)
        if worker is None or not worker.address.is_started_by_host:
            return list(one.shards)
        if self._files is None or not self._files.are_unchanged():
            raise CheckpointError(
                f"checkpoint {self._model}: its files have changed since the workers loaded them, so that the host would "
                "compute with other weights; copy the former ones there again and start anew"
            )
        for held in one.shards:
            self._holders.set_last_resort(_where(held), member.client_index)
        return []

    def _check(self, one: _StandIn, member: Holder, waiting: list[HeldShard]) -> None:
        """Compares the content checksums of all shards with those of the worker as the background
        reader comes to know them: shards that wait for it join then, and those that differ are
        taken out.
        """
        unread = list(one.shards)
        must_wait = {_where(held) for held in waiting}
        while unread and not self._is_over.wait(LOOK_S):
            for held in list(unread):
                found, reason = self._compare(held, member)
                if found is None:
                    break  # shards are read in this order
                unread.remove(held)
                where = _where(held)
                if reason and (found is False or where in must_wait):
                    log.error("the host's processor does not stand in for worker %s: %s", one.worker, reason)
                    one.failure = reason
                    one.refused.add(where)
                    self._holders.set_last_resort(where, None)
                elif where in must_wait:
                    self._holders.set_last_resort(where, member.client_index)
                one.num_checked += 1

    def _compare(self, held: HeldShard, member: Holder) -> tuple[bool | None, str]:
        """Returns whether the mapped bytes of a shard are those of its worker, None where that is
        not known yet, and what is wrong. Bytes that the worker has not compared itself are no
        reason to take a shard out, but one not to let it join.
        """
        shard = f"weights of {held.layer.name}, shard {held.shard_id}"
        if member.local is None:
            return False, f"{shard}: the stand-in was closed"
        try:
            checksum, _ = member.local.ask_checksum(held.layer.index, held.shard_id)
        except CheckpointError as error:
            return False, f"{shard}: {error}"
        if checksum is None:
            return None, ""
        reference = self._fleet.shards.reference_checksum(held)
        if reference is None:
            return True, f"{shard}: the worker computed from its own mapped checkpoint, whose bytes nobody has compared"
        if checksum == reference:
            return True, ""
        return False, (
            f"{shard}: the worker loaded content checksum {checksum_text(reference)}, this host's own copy has "
            f"{checksum_text(checksum)}; copy the checkpoint to one of them again"
        )


def _where(held: HeldShard) -> Where:
    return held.layer.index, held.shard_id


def _state_of(one: _StandIn) -> str:
    checked = f"{one.num_checked} of {len(one.shards)} shards compared"
    if one.refused:
        return f"without {len(one.refused)} shards, {one.failure}"
    if one.failure:
        return f"failed: {one.failure}"
    if one.is_being_made:
        return f"being made, {one.setback or checked}"
    return f"ready, {checked}" if one.member is not None else "made when the worker is missed"
