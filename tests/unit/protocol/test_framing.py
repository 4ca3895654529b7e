"""Frames: limits, deadlines and descriptors.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator

import pytest

from dflash_moe.errors import ProtocolError, WorkerTimeout
from dflash_moe.protocol.framing import _TCP_RTO_MAX_MS, LONGEST_PAUSE_MS, Connection, PeerGone
from dflash_moe.protocol.messages import Bye, Progress

Ends = tuple[Connection, Connection]


@pytest.fixture
def ends() -> Iterator[Ends]:
    left, right = (Connection(sock) for sock in socket.socketpair())
    yield left, right
    left.close()
    right.close()


def soon() -> float:
    return time.monotonic() + 5


def test_messages_keep_their_order_and_boundaries(ends: Ends) -> None:
    left, right = ends
    for counter in range(100):
        left.send(Progress(counter=counter, resident_bytes=0), deadline=soon())
    got = [right.receive(deadline=soon(), waiting_for="progress") for _ in range(100)]
    assert [message.counter for message in got if isinstance(message, Progress)] == list(range(100))


@pytest.mark.parametrize("length", [0, 64 * 1024 + 1, 2**32 - 1])
def test_a_frame_length_outside_the_limit_is_refused_before_it_is_read(length: int) -> None:
    raw, other = socket.socketpair()
    with raw:
        raw.sendall(length.to_bytes(4, "little"))
        connection = Connection(other)
        with pytest.raises(ProtocolError, match=f"length {length} is outside"):
            connection.receive(deadline=soon(), waiting_for="x")
        connection.close()


def test_receive_passes_its_deadline_with_the_thing_waited_for(ends: Ends) -> None:
    with pytest.raises(WorkerTimeout, match="waiting for the moon"):
        ends[0].receive(deadline=time.monotonic() + 0.05, waiting_for="the moon")


def test_send_to_a_reader_that_never_reads_passes_its_deadline(ends: Ends) -> None:
    def send_many() -> None:
        for _ in range(100000):
            ends[0].send(Bye(reason="x" * 200), deadline=time.monotonic() + 0.05)

    with pytest.raises(WorkerTimeout, match="sending"):
        send_many()


def test_hang_up_is_peer_gone_on_both_operations(ends: Ends) -> None:
    ends[1].close()
    with pytest.raises(PeerGone):
        ends[0].receive(deadline=soon(), waiting_for="x")
    with pytest.raises(PeerGone):
        ends[0].send(Bye(), deadline=soon())


def test_descriptors_arrive_close_on_exec_with_their_message(ends: Ends) -> None:
    reader, writer = os.pipe()
    ends[0].send(Bye(), deadline=soon(), descriptors=[writer])
    os.close(writer)
    ends[1].receive(deadline=soon(), waiting_for="bye")
    (received,) = ends[1].take_descriptors(1)
    assert not os.get_inheritable(received)
    os.write(received, b"hi")
    assert os.read(reader, 2) == b"hi"
    os.close(received)
    os.close(reader)


def test_a_missing_or_extra_descriptor_is_a_protocol_error_and_is_closed(ends: Ends) -> None:
    before = len(os.listdir("/proc/self/fd"))
    ends[0].send(Bye(), deadline=soon(), descriptors=[0, 1])
    ends[1].receive(deadline=soon(), waiting_for="bye")
    with pytest.raises(ProtocolError, match="announced 1 descriptors, 2 arrived"):
        ends[1].take_descriptors(1)
    assert len(os.listdir("/proc/self/fd")) <= before  # fewer, where garbage of earlier tests went
    with pytest.raises(ProtocolError, match="announced 1 descriptors, 0 arrived"):
        ends[1].take_descriptors(1)


def test_a_flood_of_descriptors_is_refused(ends: Ends) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        ends[0].send(Bye(), deadline=soon(), descriptors=[0, 1, 2])

    def receive_all() -> None:
        for _ in range(5):
            ends[1].receive(deadline=soon(), waiting_for="bye")

    with pytest.raises(ProtocolError, match="descriptors arrived unasked"):
        receive_all()
    ends[1].close()
    assert len(os.listdir("/proc/self/fd")) <= before - 1


def test_tcp_pauses_before_it_sends_again_only_so_long() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()) as dialled:
        try:
            usual_ms = dialled.getsockopt(socket.IPPROTO_TCP, _TCP_RTO_MAX_MS)
        except OSError:
            pytest.skip("this kernel has no TCP_RTO_MAX_MS, which came with Linux 6.15")
        connection = Connection(dialled.dup())
        assert dialled.getsockopt(socket.IPPROTO_TCP, _TCP_RTO_MAX_MS) == LONGEST_PAUSE_MS < usual_ms
        connection.close()


def test_what_has_come_and_was_not_received_is_news() -> None:
    ours, theirs = socket.socketpair()
    connection = Connection(ours)
    assert not connection.has_news()
    theirs.send(b"x")
    assert connection.has_news()
    assert connection.has_news()
    connection.discard()
    assert not connection.has_news()
    theirs.close()
    assert connection.has_news()
    connection.close()
    assert connection.has_news()
