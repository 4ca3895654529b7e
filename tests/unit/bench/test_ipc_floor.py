"""The raw ping-pongs beside which `bench ipc` puts transports.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import os

import pytest

from dflash_moe import _measure
from dflash_moe.bench.ipc import CHANNEL_SPINS, FLOOR_OF, HABITS, IpcParams, run_ipc
from dflash_moe.errors import ConfigError

# Nothing is pinned, so that a machine of one core does as well.
ANYWHERE = (-1, -1)


@pytest.mark.parametrize("kind", sorted(set(FLOOR_OF.values())))
def test_every_floor_gives_a_time_for_each_round(kind):
    # The second payload needs several records of TLS, and more than a socket's buffer.
    for payload_bytes in (1, 1 << 20):
        samples = _measure.ipc_floor(kind, payload_bytes, 3, 1, ANYWHERE)
        assert len(samples) == 3
        assert min(samples) > 0


def test_an_unknown_floor_is_refused_by_name():
    with pytest.raises(ConfigError, match="'quic' is none of spin, futex, unix, tcp, tls"):
        _measure.ipc_floor("quic", 8, 1, 0, ANYWHERE)


@pytest.mark.parametrize("kind", ["unix", "tcp"])
@pytest.mark.parametrize("habit", HABITS)
def test_a_habit_of_sockets_carries_payloads_beyond_their_buffers(kind, habit):
    assert len(_measure.ipc_floor(kind, 1 << 20, 3, 1, ANYWHERE, habit)) == 3
    with pytest.raises(ConfigError, match="'sleeps' is none of bare, two reads, polls"):
        _measure.ipc_floor(kind, 8, 1, 0, ANYWHERE, "sleeps")


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="a channel that spins needs two cores")
def test_every_step_from_the_bare_socket_to_the_channel_has_a_row():
    done = run_ipc(IpcParams(kinds=(), batches=1, max_rounds=20, calls=(), adds=("unix",)))
    assert [row["step"] for row in done.rows] == [*HABITS, *CHANNEL_SPINS]
    bare = done.rows[0]["p50_us"]
    assert {row["bare_us"] for row in done.rows} == {bare}


def test_tls_stands_beside_plain_tcp_of_the_same_rounds():
    done = run_ipc(IpcParams(payloads=(64,), kinds=("tcp", "tls"), batches=1, max_rounds=8, calls=(), adds=()))
    plain, encrypted = done.rows
    assert "without_us" not in plain
    assert encrypted["adds_to"] == "tcp"
    assert encrypted["without_us"] > 0
