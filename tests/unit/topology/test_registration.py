"""What a topology may say of workers that register, and what it is told where that cannot be.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import pytest

from dflash_moe.errors import TopologyError
from dflash_moe.topology import Topology
from dflash_moe.topology.write import to_yaml

LISTEN = "listen: 'tcp://0.0.0.0:7170'"


def parse(registration: str, address: str = "registered") -> Topology:
    section = f"registration: {{{registration}}}\n" if registration else ""
    return Topology.parse(f"version: 1\n{section}workers: [{{name: w0, address: {address}}}, {{name: w1}}]\n")


@pytest.mark.parametrize("more", ["", ", names: any, expect: 3", ", names: [w0, w5], max_pending: 9"])
def test_a_section_is_read_and_written_back(more: str) -> None:
    found = parse(LISTEN + more)
    again = Topology.parse(to_yaml(found)).registration
    assert found.registration is not None
    assert again is not None
    assert (again.names, again.expect, again.max_pending) == (
        found.registration.names, found.registration.expect, found.registration.max_pending,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("registration", "address", "said"),
    [
        ("", "registered", "worker w0 has address: registered, and there is no registration"),
        ("expect: 1", "registered", "registration has no listen"),
        ("listen: 'tcp://0.0.0.0:0'", "registered", "registration.listen: .* port of 1..65535"),
        (LISTEN, "unix", "no worker has address: registered, and there are no names"),
        (LISTEN + ", expect: 2", "registered", "2 workers are expected and 1 names may register"),
        (LISTEN + ", names: [w5]", "registered", "worker w0 has address: registered and is not among them"),
        (LISTEN + ", names: [w0, w1]", "registered", "worker w1 is among them, and its address is None"),
        (LISTEN + ", names: [host]", "registered", "'host' is no name of a worker"),
        (LISTEN + ", names: [w0, w0]", "registered", "different names"),
        (LISTEN + ", require_key_per_worker: 3", "registered", "allowed: true, false"),
        (LISTEN + ", max_pending: 1", "registered", "whole numbers 2..1024"),
    ],
)
def test_nonsense_is_refused_with_its_line(registration: str, address: str, said: str) -> None:
    with pytest.raises(TopologyError, match=rf"<string>:\d+: .*{said}"):
        parse(registration, address)
