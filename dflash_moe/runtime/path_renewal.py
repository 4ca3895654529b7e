"""Fresh data paths for workers whose slots are quarantined or whose segments a failed device step
retired, between two calls.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import logging
from typing import Any

from dflash_moe import _core
from dflash_moe.errors import WorkerLost
from dflash_moe.runtime.call_gate import CallGate
from dflash_moe.runtime.data_path import SlotPlan
from dflash_moe.runtime.fleet import Fleet, Member

log = logging.getLogger(__name__)

MIN_USABLE_SLOTS = 2  # fewer, and the data path is renewed: the rest is quarantined after time-outs


class PathRenewal:
    """Knows which data paths are `worn_out`, and renews them with the gate shut and no call under
    way.

    Whoever renews holds the gate's lock. `drop_client` ends it: the channels of a closed runtime
    close with its client.
    """

    def __init__(self, client: _core.Client, fleet: Fleet, gate: CallGate, *, patience_s: float) -> None:
        """`patience_s`: by then every call has ended."""
        # workers whose data path must be renewed before the next call
        self.worn_out: set[str] = set()
        self._client: _core.Client | None = client
        self._fleet = fleet
        self._gate = gate
        self._patience_s = patience_s

    def quiesce(self) -> None:
        """Shuts the gate and waits for the calls under way."""
        self._gate.quiesce(seconds=self._patience_s)

    def renew(self, member: Member, slots: SlotPlan) -> None:
        """A path with these slots instead of the former one. WorkerLost, WorkerTimeout."""
        channel, generation, _ = self._fleet.attach(member, slots)
        if self._client is not None:
            self._client.replace_channel(member.client_index, channel, generation)
        log.info("worker %s: data path renewed, generation %d", member.name, generation)

    def pass_gate(self) -> None:
        """Slow path of a call: waits while another thread renews data paths, or renews them
        itself.
        """
        with self._gate.stepping_back():
            if self.worn_out:
                self.renew_worn_out()

    def renew_worn_out(self) -> None:
        """Renews what is worn out and opens the gate."""
        self.quiesce()
        for name in sorted(self.worn_out):
            member = self._fleet.members[name]
            try:
                if member.slots is not None:
                    self.renew(member, member.slots)
            except WorkerLost as error:  # the calls that need it say so; the others go on
                if self._client is not None:
                    self._client.mark_lost(member.client_index, str(error))
            self.worn_out.discard(name)
        self._gate.is_shut = False

    def renew_unfit(self) -> None:
        """Also paths with a slot whose reply never came: a device step uses all of them."""
        owing = (one for one in self._reports() if one["quarantined_slots"] and one["state"] != "lost")
        self.worn_out.update(one["name"] for one in owing)
        self.renew_worn_out()

    def retire_all(self) -> None:
        """After a failed step every path that still works gets fresh segments before its next
        call.
        """
        lost = {report["name"] for report in self._reports() if report["state"] == "lost"}
        self.worn_out.update(name for name in self._fleet.members if name not in lost)

    def note_worn_out(self) -> None:
        """After a failed call: shuts the gate if that left a worker too few slots."""
        for report in self._reports():
            member = self._fleet.members.get(report["name"])
            if member is None or member.slots is None or report["state"] == "lost":
                continue
            if member.slots.num_slots - int(report["quarantined_slots"]) < MIN_USABLE_SLOTS:
                self.worn_out.add(member.name)
                self._gate.is_shut = True

    def drop_client(self) -> None:
        """The runtime is closed: there is nothing to renew any more."""
        self._client = None

    def _reports(self) -> list[dict[str, Any]]:
        return self._client.workers() if self._client is not None else []
