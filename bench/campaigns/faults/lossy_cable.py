"""A cable between two network namespaces that loses packets, delays them and carries only so many
bytes a second, in each direction as it is told. It needs root, `ip` and /dev/net/tun, and nothing
that shapes traffic in the kernel.

Each end is a TUN device, and one thread of this process carries the packets between them. Neither
device offers to leave checksums or segments to the other end, so that each packet is a whole one of
at most 1,500 bytes, as on a real cable.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import fcntl
import json
import os
import random
import select
import socket
import struct
import threading
import time
from typing import Any

from bench.campaigns.faults.two_machines import TwoMachines
from bench.campaigns.faults.two_machines import why_not as why_no_machines

TUN = "/dev/net/tun"
TUNSETIFF, IFF_TUN_NO_PI = 0x400454CA, 0x1001
# `struct ifreq` of linux/if.h: the name, the flags, and what other requests need.
REQUEST = struct.Struct("16sH22x")
# The kernel numbers the devices, since other campaigns may make some at the same time.
NAME = b"dflash%d"
LONGEST_PACKET = 1 << 16
# So much waits for its turn to be sent, as in the buffer of a small router, which is half a second
# at 1 Mbit/s, and so many packets are under way. What comes then is dropped.
QUEUE_BYTES, MOST_UNDER_WAY = 64 << 10, 10_000
# So many packets are collected from one end before the other gets its turn.
AT_A_TIME = 64
# The thread looks so often whether it shall end.
LOOK_S = 0.1
# It takes an order within this time on a busy machine.
ORDER_S = 10.0


@dataclasses.dataclass(frozen=True, slots=True)
class Quality:
    """What one direction of the cable does to packets: the share of them that is lost, for how long
    each is under way, and the bytes that are sent in a second, where 0 is no limit.
    """

    loss: float = 0.0
    delay_s: float = 0.0
    bytes_per_s: float = 0.0


WELL = Quality()
# What is wrong with the cable to the worker, and with that to the host.
FAULTS = {
    "30 % lost": (Quality(loss=0.3), Quality(loss=0.3)), "requests lost": (Quality(loss=1.0), WELL),
    "replies lost": (WELL, Quality(loss=1.0)), "200 ms late": (Quality(delay_s=0.2), Quality(delay_s=0.2)),
    "1 Mbit/s": (Quality(bytes_per_s=1e6 / 8), Quality(bytes_per_s=1e6 / 8)),
}  # fmt: skip


class Direction:
    """The packets that go one way. One thread calls it; times are seconds of one clock."""

    def __init__(self, seed: str) -> None:
        self.quality = Quality()
        self.carried = self.dropped = 0
        self._drawn = random.Random(seed)
        # (when it arrives, packet), in the order of arrival.
        self._under_way: collections.deque[tuple[float, bytes]] = collections.deque()
        # When the last byte of those that were taken will have been sent.
        self._sent_by = 0.0

    def take(self, packet: bytes, now: float) -> None:
        """Takes a packet, and loses it or sends it on its way."""
        quality = self.quality
        backlog_s = max(0.0, self._sent_by - now)
        is_full = backlog_s * quality.bytes_per_s > QUEUE_BYTES or len(self._under_way) >= MOST_UNDER_WAY
        if is_full or self._drawn.random() < quality.loss:
            self.dropped += 1
            return
        self._sent_by = now + backlog_s + (len(packet) / quality.bytes_per_s if quality.bytes_per_s else 0.0)
        self._under_way.append((self._sent_by + quality.delay_s, packet))

    def arrived(self, now: float) -> list[bytes]:
        """Returns the packets that have arrived meanwhile."""
        found = []
        while self._under_way and self._under_way[0][0] <= now:
            found.append(self._under_way.popleft()[1])
        self.carried += len(found)
        return found

    def next_arrival(self) -> float | None:
        """Returns when the next packet arrives, None where none is under way."""
        return self._under_way[0][0] if self._under_way else None

    def become(self, quality: Quality) -> list[bytes]:
        """Changes the cable, counts anew, and returns what is under way, which arrives now."""
        found = [packet for _, packet in self._under_way]
        self._under_way.clear()
        self.quality, self._sent_by = quality, 0.0
        self.carried = self.dropped = 0
        return found


class LossyCable:
    """Joins the two machines for as long as it is open. `orders` is a socket for whoever tells it
    how to be (RemoteCable), in this process or in one that inherits the descriptor.
    """

    def __init__(self, machines: TwoMachines, *, seed: int) -> None:
        """Raises OSError with what could not be made."""
        with contextlib.ExitStack() as undo:
            self._devices = []
            for end in machines.ends():
                device = os.open(TUN, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
                undo.callback(os.close, device)
                self._devices.append(device)
                asked = fcntl.ioctl(device, TUNSETIFF, REQUEST.pack(NAME, IFF_TUN_NO_PI))
                machines.plug_in(asked[:16].rstrip(b"\0").decode(), end)
            self._ours, self.orders = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            undo.callback(self._ours.close)
            undo.callback(self.orders.close)
            self._directions = [Direction(f"{seed} {name}") for name in RemoteCable.DIRECTIONS]
            self._is_over = threading.Event()
            self._thread = threading.Thread(target=self._run, name="lossy-cable", daemon=True)
            self._thread.start()
            self._undo = undo.pop_all()

    def close(self) -> None:
        """Unplugs it: both devices are gone."""
        self._is_over.set()
        self._thread.join(ORDER_S)
        self._undo.close()

    def _run(self) -> None:
        poller = select.poll()
        for descriptor in (*self._devices, self._ours.fileno()):
            poller.register(descriptor, select.POLLIN)
        while not self._is_over.is_set():
            now = time.monotonic()
            for direction, device in zip(self._directions, reversed(self._devices), strict=True):
                self._deliver(device, direction.arrived(now))
            due = [at for one in self._directions if (at := one.next_arrival()) is not None]
            wait_s = min([LOOK_S, *(max(0.0, at - now) for at in due)])
            for descriptor, _ in poller.poll(1e3 * wait_s):
                if descriptor == self._ours.fileno():
                    self._obey()
                else:
                    self._collect(self._directions[self._devices.index(descriptor)], descriptor)

    def _collect(self, direction: Direction, device: int) -> None:
        # It is empty, or its namespace is going away.
        with contextlib.suppress(OSError):
            for _ in range(AT_A_TIME):
                direction.take(os.read(device, LONGEST_PACKET), time.monotonic())

    def _deliver(self, device: int, packets: list[bytes]) -> None:
        for packet in packets:
            with contextlib.suppress(OSError):
                os.write(device, packet)

    def _obey(self) -> None:
        qualities = [Quality(**one) for one in json.loads(self._ours.recv(LONGEST_PACKET))]
        counted = {
            "carried_packets": sum(one.carried for one in self._directions),
            "dropped_packets": sum(one.dropped for one in self._directions),
        }
        for direction, device, quality in zip(self._directions, reversed(self._devices), qualities, strict=True):
            self._deliver(device, direction.become(quality))
        self._ours.send(json.dumps(counted).encode())


class RemoteCable:
    """Tells a LossyCable how to be, through a descriptor of its `orders`, which this owns."""

    DIRECTIONS = ("to worker", "to host")

    def __init__(self, descriptor: int) -> None:
        self._orders = socket.socket(fileno=descriptor)
        self._orders.settimeout(ORDER_S)

    def become(self, to_worker: Quality, to_host: Quality) -> dict[str, Any]:
        """Changes both directions, and returns what was carried and dropped since the last time."""
        self._orders.send(json.dumps([dataclasses.asdict(one) for one in (to_worker, to_host)]).encode())
        return dict(json.loads(self._orders.recv(LONGEST_PACKET)))

    def close(self) -> None:
        """Closes the descriptor."""
        self._orders.close()


def why_not() -> str:
    """Returns why such a cable cannot be laid here, empty where it can."""
    if reason := why_no_machines():
        return reason
    machines = TwoMachines()
    try:
        if reason := machines.make(has_link=False):
            return reason
        LossyCable(machines, seed=0).close()
    except OSError as error:
        return f"a TUN device cannot be made ({TUN}): {error.strerror or error}"
    finally:
        machines.close()
    return ""
