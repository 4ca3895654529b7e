"""Panels that are written before any start are those that a worker maps: through memory for a few
experts, once, and only where there is room.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import shutil

import pytest

from dflash_moe import _core
from dflash_moe.config.cache import CacheSettings
from dflash_moe.errors import CheckpointError, ConfigError, DflashError, UnsupportedError
from dflash_moe.model import checkpoint_files
from dflash_moe.model.checkpoint import Checkpoint
from dflash_moe.store.expert_store import ExpertStore
from dflash_moe.store.folder import CacheFolder
from dflash_moe.store.warming import WantedExperts, Warming
from tests.expert_cases import NUM_EXPERTS, make_checkpoint, tiny_spec
from tests.unit.store.stored_panels import files, never, opened

LAYER_BYTES = NUM_EXPERTS * 73_728


@pytest.fixture(autouse=True)
def _files_are_old(monkeypatch):
    monkeypatch.setattr(checkpoint_files, "SETTLED_NS", 0)


@pytest.fixture
def model(tmp_path):
    return make_checkpoint(tmp_path / "model")


def warming(store, model, *, numerics=("f32-canonical",), isa="scalar"):
    wanted = [
        WantedExperts(layer.ffn, tuple(range(NUM_EXPERTS)), "f32", name)
        for layer in tiny_spec(model).layers
        for name in numerics
    ]
    return Warming(store, Checkpoint.open(model), wanted, isa=isa)


@pytest.mark.parametrize("threads", [1, 3, 100])
def test_a_worker_maps_what_was_written(tmp_path, store, model, threads):
    made = warming(store, model)
    assert (made.num_files, made.num_left, made.num_bytes) == (2, 2, 2 * LAYER_BYTES)
    told = []
    made.require_room()
    made.write(threads=threads, report=lambda done, whole: told.append((done, whole)))
    assert made.num_left == 0
    assert told == [(LAYER_BYTES, 2 * LAYER_BYTES), (2 * LAYER_BYTES, 2 * LAYER_BYTES)]
    assert all(one.fault == "" for one in store.verify(_core.checksum))
    worker = ExpertStore(isa="scalar", threads=1, weights_layout="stored", cache=CacheSettings(tmp_path / "store"))
    for layer in tiny_spec(model).layers:
        worker.load(
            Checkpoint.open(model), layer.ffn, (1, 3), name="w", weight_dtype="f32", weights_fingerprint=layer.index,
            numerics="f32-canonical",
        ).give_back()  # fmt: skip
    assert worker.panel_counters() == {"panel_bytes_mapped": 4 * 73_728, "panel_bytes_written": 0, "panel_shards_left": 0}
    worker.close()


def test_what_is_there_is_not_written_again(tmp_path, store, model):
    warming(store, model).write(threads=1)
    before = files(tmp_path)
    assert warming(store, model).num_left == 0
    # Nor is it for another holder of the same layer, or for a copy of the checkpoint.
    assert warming(store, model, numerics=("f32-canonical", "f32-canonical")).num_files == 2
    copy = shutil.copytree(model, tmp_path / "copy")
    assert warming(store, copy).num_left == 0
    assert set(before) <= set(files(tmp_path))


def test_files_that_were_changed_just_now_are_not_kept(store, model, monkeypatch):
    monkeypatch.setattr(checkpoint_files, "SETTLED_NS", 1 << 62)
    with pytest.raises(UnsupportedError, match="nothing of it is kept"):
        warming(store, model)


def test_a_model_that_does_not_fit_is_refused_before_anything_is_written(tmp_path, model, monkeypatch):
    small = opened(tmp_path, max_bytes=LAYER_BYTES)
    with pytest.raises(ConfigError, match=r"this model takes 1\.1 MiB, and all models may take 576\.0 KiB; raise `cache.max_b"):
        warming(small, model).require_room()
    small.close()
    store = opened(tmp_path)
    monkeypatch.setattr(CacheFolder, "free_bytes", lambda _: 1000)
    with pytest.raises(ConfigError, match=r"1\.1 MiB are to be written and 1000 bytes are free there; name another folder"):
        warming(store, model).require_room()
    store.close()
    assert files(tmp_path) == []


def test_a_disk_that_fills_up_is_one_error_and_what_was_written_stays(tmp_path, store, model, monkeypatch, caplog):
    made = warming(store, model)
    rooms = iter(["", "there is no room any more"])
    monkeypatch.setattr(store, "make_room", lambda *_: next(rooms))
    with pytest.raises(DflashError, match="1 of 2 files are not written; the log says why"):
        made.write(threads=2)
    assert "there is no room any more" in caplog.text
    assert warming(store, model).num_left == 1


def test_a_weight_that_cannot_be_read_ends_it(store, model):
    made = warming(store, model)
    with (model / "model.safetensors").open("r+b") as file:
        file.truncate(4096)
    with pytest.raises((CheckpointError, DflashError)):
        made.write(threads=2)


def test_another_width_is_another_file(tmp_path, store, model):
    warming(store, model).write(threads=1)
    best = _core.best_isa()
    if best in ("reference", "scalar"):
        pytest.skip("this processor has one width")
    made = warming(store, model, isa=best)
    assert made.num_left == 2
    made.write(threads=2)
    assert len(files(tmp_path)) == 5
    assert warming(store, model).num_left == 0
    assert store.collect(0, is_over=never).num_files == 4
