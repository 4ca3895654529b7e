"""What a lossy cable does to packets: loss, delay, rate, and a queue with an end.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import subprocess
import sys

import pytest

from bench.campaigns.faults.lossy_cable import MOST_UNDER_WAY, QUEUE_BYTES, WELL, Direction, LossyCable, Quality, RemoteCable
from bench.campaigns.faults.lossy_cable import why_not as why_no_cable
from bench.campaigns.faults.two_machines import HOST_ADDRESS, WORKER_ADDRESS, TwoMachines

PACKET = b"p" * 1000


def direction(quality: Quality) -> Direction:
    made = Direction("a seed")
    assert made.become(quality) == []
    return made


def test_a_cable_that_is_well_brings_packets_at_once_and_in_order() -> None:
    well = direction(WELL)
    for number in range(5):
        well.take(bytes([number]), 1.0)
    assert well.arrived(1.0) == [bytes([number]) for number in range(5)]
    assert (well.carried, well.dropped, well.next_arrival()) == (5, 0, None)


def test_the_share_that_is_lost_is_the_one_that_was_asked_for_and_the_same_in_every_run() -> None:
    lost = []
    for _ in range(2):
        lossy = direction(Quality(loss=0.3))
        for _ in range(10_000):
            lossy.take(PACKET, 1.0)
            lossy.arrived(1.0)
        assert lossy.carried + lossy.dropped == 10_000
        lost.append(lossy.dropped)
    assert lost[0] == lost[1]
    assert 2_800 < lost[0] < 3_200
    nothing = direction(Quality(loss=1.0))
    nothing.take(PACKET, 1.0)
    assert (nothing.next_arrival(), nothing.dropped) == (None, 1)


def test_a_late_packet_arrives_after_its_delay() -> None:
    late = direction(Quality(delay_s=0.25))
    late.take(PACKET, 1.0)
    assert late.next_arrival() == 1.25
    assert late.arrived(1.2) == []
    assert late.arrived(1.25) == [PACKET]


def test_a_slow_cable_sends_one_after_the_other_and_drops_what_its_queue_does_not_hold() -> None:
    slow = direction(Quality(bytes_per_s=1000.0))
    slow.take(PACKET, 1.0)
    slow.take(PACKET, 1.0)
    assert slow.arrived(2.0) == [PACKET]
    assert slow.next_arrival() == 3.0
    for _ in range(200):
        slow.take(PACKET, 1.0)
    assert slow.dropped == 202 - (QUEUE_BYTES // len(PACKET) + 1)
    assert len(slow.arrived(1e9)) == QUEUE_BYTES // len(PACKET)


def test_no_more_are_under_way_than_a_cable_holds() -> None:
    late = direction(Quality(delay_s=1.0))
    for _ in range(MOST_UNDER_WAY + 3):
        late.take(PACKET, 1.0)
    assert late.dropped == 3


def test_what_is_under_way_arrives_when_the_cable_changes() -> None:
    late = direction(Quality(delay_s=10.0, bytes_per_s=1.0))
    late.take(PACKET, 1.0)
    assert late.become(WELL) == [PACKET]
    late.take(PACKET, 1.0)
    assert late.arrived(1.0) == [PACKET]


# Nobody listens at this port, so that a machine which is reached refuses at once.
CONNECT = """
import socket, sys
try:
    socket.create_connection((sys.argv[1], 9), float(sys.argv[2]))
except OSError as error:
    print(type(error).__name__)
"""


def found_from(machines: TwoMachines, namespace: str, address: str, seconds: float) -> str:
    command = [*machines.within(namespace), sys.executable, "-c", CONNECT, address, str(seconds)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout.strip()


def test_each_direction_of_a_cable_is_what_it_was_told() -> None:
    if reason := why_no_cable():
        pytest.skip(reason)
    machines = TwoMachines()
    try:
        assert machines.make(has_link=False) == ""
        cable = LossyCable(machines, seed=0)
        try:
            remote = RemoteCable(cable.orders.dup().detach())
            for lost in (0, 1):
                remote.become(*(Quality(loss=float(lost == number)) for number in (0, 1)))
                for ends in ((machines.host, WORKER_ADDRESS), (machines.worker, HOST_ADDRESS)):
                    assert found_from(machines, *ends, 0.5) == "TimeoutError"
                counted = remote.become(WELL, WELL)
                assert min(counted["carried_packets"], counted["dropped_packets"]) >= 1
                assert found_from(machines, machines.host, WORKER_ADDRESS, 30.0) == "ConnectionRefusedError"
            remote.close()
        finally:
            cable.close()
    finally:
        machines.close()
