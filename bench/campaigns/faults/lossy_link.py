"""The network between two machines loses packets, swallows those of one direction, delays them, or
carries next to nothing, for some seconds each, and is well again. A worker on the host's own
machine holds all shards too, so that calls are answered meanwhile, and the far worker serves again
by itself. Connections are encrypted as `ipc.encryption: auto` has it beyond one machine. All of it
comes once more while the mode is changed every second and the host runs out of descriptors.

The cable is one of ours (lossy_cable.py), because kernels often lack what would shape traffic. The
host's half runs in a network namespace (partitioned_host.py).
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from bench.campaigns.faults.campaign import Campaign, Run
from bench.campaigns.faults.lossy_cable import FAULTS, LossyCable, why_not
from bench.campaigns.faults.partitions import between, fault_rows, judge
from bench.campaigns.faults.two_machines import TwoMachines


def run(given: Run) -> None:
    """Has each of FAULTS come over the cable `given.size` times."""
    machines = TwoMachines()
    try:
        if reason := machines.make(has_link=False):
            raise OSError(reason)
        cable = LossyCable(machines, seed=given.seed)
        try:
            orders = cable.orders.fileno()
            events, found = between(given, machines, len(FAULTS), str(orders), descriptors=(orders,))
        finally:
            cable.close()
    finally:
        machines.close()
    judge(given, events, found)
    lossy = [one for one in events if any(quality.loss for quality in FAULTS[one["way"]])]
    given.claim("losses in which no packet was lost", sum(one["dropped_packets"] == 0 for one in lossy), at_most=0)
    given.claim("faults in which no packet passed", sum(one["carried_packets"] == 0 for one in events), at_most=0)
    for way in FAULTS:
        chosen = [one for one in events if one["way"] == way]
        fault_rows(given, way, "faults", chosen, ("carried_packets", "dropped_packets", "deaths"))
    given.row("all", **found)


CAMPAIGN = Campaign(
    "lossy-link", "the network between two machines loses, delays and slows packets", "faults of each of five kinds", 8, 1,
    run, why_not,
)  # fmt: skip
