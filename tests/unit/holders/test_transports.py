"""The table of transports decides what reaches a worker, at both ends; a row more is all that a new
one needs.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from dflash_moe import _core
from dflash_moe.config import SETTINGS_BY_NAME
from dflash_moe.errors import ConfigError
from dflash_moe.experts.expert_runtime import ExpertRuntime
from dflash_moe.holders.transports import choose_transport, may_take_fabric
from dflash_moe.model.spec import ModelSpec
from dflash_moe.protocol.identity import CAPABILITIES
from dflash_moe.protocol.messages import Attach, Attached
from dflash_moe.protocol.paths import TRANSPORTS
from dflash_moe.protocol.schema import schema_of
from dflash_moe.topology import Topology, WorkerSpec, parse_address
from dflash_moe.workers import process
from dflash_moe.workers.listener import open_listener
from dflash_moe.workers.resident import ResidentWeights
from tests.checks import headers
from tests.expert_cases import Expected, make_batch, make_checkpoint, tiny_spec
from tests.fabrics import require_fabric


@pytest.mark.parametrize(
    ("address", "auto", "shared", "stream", "fabric"),
    [
        (None, "shared", "shared", "unix", None),
        ("unix", "unix", None, "unix", None),
        ("tcp", "tcp", None, "tcp", "fabric"),
        ("unix:///run/far", "shared", "shared", "unix", None),
        ("tcp://10.0.0.2:7171", "tcp", None, "tcp", "fabric"),
        ("loopback", "loopback", "loopback", "loopback", "loopback"),
    ],
)
def test_the_table_says_what_reaches_an_address(
    address: str | None, auto: str | None, shared: str | None, stream: str | None, fabric: str | None
) -> None:
    for setting, expected in (("auto", auto), ("shared", shared), ("stream", stream), ("fabric", fabric)):
        if expected is not None:
            assert choose_transport("far", parse_address(address), setting, fabric_clear=True) == expected
            continue
        with pytest.raises(ConfigError, match=f"transport {setting}: worker far is reached by .*, which does not offer it"):
            choose_transport("far", parse_address(address), setting)


def test_auto_looks_for_hardware_only_where_a_worker_may_be_reached_in_clear(monkeypatch: pytest.MonkeyPatch) -> None:
    def providers() -> list[SimpleNamespace]:
        looks.append(1)
        return [SimpleNamespace(name="verbs;ofi_rxm", is_fast=is_fast), SimpleNamespace(name="net", is_fast=False)]

    monkeypatch.setattr(_core, "fabric_providers", providers)
    cluster = WorkerSpec("far", address="tcp://10.0.0.2:7171", fabric_clear=True)
    for is_fast in (True, False):
        looks: list[int] = []
        for worker in (None, WorkerSpec("far", address="tcp://10.0.0.2:7171"), WorkerSpec("w0", fabric_clear=True)):
            assert not may_take_fabric(worker, "auto")
        assert not may_take_fabric(cluster, "stream")
        assert not looks
        assert may_take_fabric(cluster, "auto") == is_fast


def test_settings_and_capabilities_are_those_of_the_table() -> None:
    assert tuple(kind.name for kind in _core.transport_kinds()) == CAPABILITIES
    for kind in TRANSPORTS.values():
        assert SETTINGS_BY_NAME["transport"].check(kind.setting, "a test") == kind.setting


def test_messages_carry_what_a_handshake_may_hand_over() -> None:
    limits = headers.constants(Path(__file__).parents[3] / "csrc/transport/kinds.h")
    for message in (Attach, Attached):
        kinds = {field.name: field.kind for field in schema_of(message).fields}
        handover = kinds["offer" if message is Attach else "answer"]
        assert handover.num_bytes == limits["kMaxHandoverBytes"]


def test_every_kind_works_here_or_says_why_not() -> None:
    for kind in TRANSPORTS.values():
        if kind.name == "fabric":
            require_fabric()  # the last of the table
        kind.try_here()


def test_descriptors_given_to_a_handshake_are_gone_whatever_comes_of_it() -> None:
    import os

    terms = _core.PathTerms(_core.Geometry(2, 64, 64), 1)
    given = [os.open(os.devnull, os.O_RDONLY) for _ in range(3)]
    for use in (
        lambda number: _core.accept_path("shared", terms, b"", [number]),
        lambda number: _core.accept_path("unix", terms, b"x" * 4097, [number]),
        lambda number: _core.offer_path("unix", terms).complete(b"", [number]),
    ):
        number = given.pop()
        with pytest.raises(Exception, match=r"descriptors|bytes"):
            use(number)
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(number)


class ToyOffer:
    """What the table's unix does, behind a word that each end tells the other."""

    payload = b"the host's word"

    def __init__(self, inner: _core.PathOffer) -> None:
        self._inner = inner
        self.descriptors = inner.descriptors

    def complete(self, answer: bytes, descriptors: Sequence[int], secured: None) -> _core.Channel:
        assert answer == b"the worker's word"
        return self._inner.complete(b"", descriptors)


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A row `toy` before all others of the table, at both ends as far as they are this process."""
    row = SimpleNamespace(name="toy", setting="toy", reaches=["unix path"], is_dialled=False, is_clear=False)
    others = dict(TRANSPORTS)
    TRANSPORTS.clear()
    TRANSPORTS.update({"toy": row, **others})
    offer_path, accept_path = _core.offer_path, _core.accept_path

    def offer(kind: str, terms: _core.PathTerms) -> Any:
        return ToyOffer(offer_path("unix", terms)) if kind == "toy" else offer_path(kind, terms)

    def accept(kind: str, terms: _core.PathTerms, offered: bytes, descriptors: Sequence[int], secured: Any) -> Any:
        if kind != "toy":
            return accept_path(kind, terms, offered, descriptors, secured)
        assert offered == ToyOffer.payload
        accepted = accept_path("unix", terms, b"", descriptors)
        return SimpleNamespace(payload=b"the worker's word", descriptors=[], take_channel=accepted.take_channel)

    monkeypatch.setattr(_core, "offer_path", offer)
    monkeypatch.setattr(_core, "accept_path", accept)
    yield
    TRANSPORTS.clear()
    TRANSPORTS.update(others)


@pytest.fixture
def spec(tmp_path: Path) -> ModelSpec:
    return tiny_spec(make_checkpoint(tmp_path / "tiny"))


@pytest.mark.usefixtures("toy")
def test_a_row_more_is_a_transport_more_for_both_ends_and_a_whole_runtime(spec: ModelSpec, tmp_path: Path) -> None:
    address = parse_address(f"unix://{tmp_path}/far.sock")
    listener = open_listener(address, worker="far", key=None)
    identity = process._identify("far", Path(spec.path), threads=1, memory_limit=0, isa="")

    def serve() -> None:
        caller = listener.next_caller()
        if caller is not None:
            process._serve_caller(caller, identity, listener, ResidentWeights())

    worker = threading.Thread(target=serve)
    worker.start()
    try:
        topology = Topology.parse(f"version: 1\nworkers: [{{name: far, threads: 1, address: '{address}'}}]\n")
        with ExpertRuntime.start(topology, model=spec) as runtime:
            assert runtime.stats()["transports"] == {"far": "toy"}
            batch = make_batch(20)
            expected = Expected(runtime.placement, spec)
            for layer in (0, 1):
                assert np.array_equal(runtime.experts(layer, *batch), expected.experts(layer, batch))
    finally:
        listener.close()
        worker.join(30)
    assert not worker.is_alive()
