"""The raw ping-pongs beside which `bench ipc` puts transports.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import pytest

from dflash_moe import _measure
from dflash_moe.bench.ipc import FLOOR_OF, IpcParams, run_ipc
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


def test_tls_stands_beside_plain_tcp_of_the_same_rounds():
    done = run_ipc(IpcParams(payloads=(64,), kinds=("tcp", "tls"), batches=1, max_rounds=8, calls=()))
    plain, encrypted = done.rows
    assert "without_us" not in plain
    assert encrypted["adds_to"] == "tcp"
    assert encrypted["without_us"] > 0
