"""What keeps a host from computing rows again for a moment, and what keeps it from that for good.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import errno
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import Mock

import pytest

from dflash_moe import _core
from dflash_moe.errors import CheckpointError, DflashError
from dflash_moe.holders.audit.host_twin import HostTwin
from dflash_moe.holders.audit.row_questions import RowQuestion, drawn_rows
from dflash_moe.model.checkpoint import Checkpoint
from dflash_moe.placement import plan_placement
from dflash_moe.placement.held_shards import HeldShard, shards_by_holder
from dflash_moe.topology import Topology
from tests.expert_cases import make_checkpoint, tiny_spec

ISA = _core.best_isa()


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_checkpoint(tmp_path)


@pytest.fixture
def held(model: Path) -> HeldShard:
    spec = tiny_spec(model)
    return shards_by_holder(spec, plan_placement(spec.layers, Topology.local(num_workers=1)))["w0"][0]


@pytest.fixture
def question(held: HeldShard) -> RowQuestion:
    return drawn_rows(held)[0]


@contextmanager
def without_descriptors() -> Iterator[None]:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


@pytest.mark.parametrize("is_opened", [False, True], ids=["opening", "mapping"])
def test_a_host_without_descriptors_computes_again_once_it_has_some(
    model: Path, held: HeldShard, question: RowQuestion, *, is_opened: bool
) -> None:
    right = HostTwin(model, ISA).compute(held, question)
    assert right is not None
    twin = HostTwin(model, ISA)
    if is_opened:
        twin._opened()
    with without_descriptors():
        assert twin.compute(held, question) is None
    assert "Too many open files" in twin.setback
    assert twin.failure == ""
    assert twin.computes(held)
    assert twin.compute(held, question) == right
    assert twin.setback == ""


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        OSError(errno.ENOMEM, "Cannot allocate memory"),
        DflashError("weights do not fit", code="out_of_memory"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_a_host_without_memory_computes_again_once_it_has_some(
    model: Path, held: HeldShard, question: RowQuestion, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    twin = HostTwin(model, ISA)
    with monkeypatch.context() as patch:
        patch.setattr(Checkpoint, "open", Mock(side_effect=error))
        assert twin.compute(held, question) is None
    assert twin.setback
    assert twin.computes(held)
    assert twin.compute(held, question) is not None


def test_a_damaged_checkpoint_is_not_tried_again(model: Path, held: HeldShard, question: RowQuestion) -> None:
    weights = next(model.glob("*.safetensors"))
    weights.write_bytes(weights.read_bytes()[:100])
    twin = HostTwin(model, ISA)
    assert twin.compute(held, question) is None
    assert "truncated" in twin.failure
    assert twin.setback == ""
    assert not twin.computes(held)


def test_a_checkpoint_that_is_gone_is_not_tried_again(tmp_path: Path, held: HeldShard, question: RowQuestion) -> None:
    twin = HostTwin(tmp_path / "nowhere", ISA)
    assert twin.compute(held, question) is None
    assert "no such directory" in twin.failure
    assert not twin.computes(held)


def test_another_error_is_the_callers(
    model: Path, held: HeldShard, question: RowQuestion, monkeypatch: pytest.MonkeyPatch
) -> None:
    twin = HostTwin(model, ISA)
    monkeypatch.setattr(Checkpoint, "open", Mock(side_effect=OSError(errno.EIO, "Input/output error")))
    with pytest.raises(OSError, match="Input/output"):
        twin.compute(held, question)
    monkeypatch.setattr(Checkpoint, "open", Mock(side_effect=CheckpointError("a: cannot be read: Input/output error")))
    assert twin.compute(held, question) is None
    assert twin.failure
