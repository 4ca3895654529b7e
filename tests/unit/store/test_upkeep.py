"""What is kept is listed, read again, and removed in an order: never what somebody uses.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import os
import threading
from dataclasses import replace
from zlib import crc32

import pytest

from dflash_moe.store.folder import INDEX, PANELS
from tests.unit.store.stored_panels import (
    GROUP,
    LAYOUT,
    MODEL,
    files,
    group,
    make_checkpoint,
    never,
    of_model,
    opened,
    overwrite,
    pieces,
)

# A header block and three experts, each in two blocks.
FILE_BYTES = 4096 + 3 * 8192


@pytest.fixture
def checkpoint(tmp_path):
    return make_checkpoint(tmp_path / "model")


def keep(store, checkpoint, wanted=GROUP):
    """Writes a group; returns the name of its file."""
    with of_model(store, checkpoint).write(wanted, pieces, is_over=never) as found:
        return found.path.name


def used_at(store, checkpoint, when):
    os.utime(store.folder.path / INDEX / of_model(store, checkpoint)._name, (when, when))


def panels_of(store):
    return set(store.folder.sizes(PANELS))


def test_what_is_kept_is_listed(store, checkpoint):
    assert store.entries() == []
    keep(store, checkpoint)
    keep(store, checkpoint, replace(GROUP, layout=replace(LAYOUT, width=32)))
    used_at(store, checkpoint, 1000)
    (one,) = store.entries()
    assert (one.model, one.path, one.is_current, one.num_files, one.used_at) == (MODEL, str(checkpoint), True, 2, 1000)
    assert one.num_bytes == store.num_bytes() == 2 * FILE_BYTES
    assert one.layouts == ("1-16-plain-q4_k-q6_k-6000-24", "1-32-plain-q4_k-q6_k-6000-24")
    (checkpoint / "model.safetensors").unlink()
    assert not store.entries()[0].is_current
    for index in (store.folder.path / INDEX).iterdir():
        index.unlink()
    (one,) = store.entries()
    assert (one.model, one.path, one.num_files) == (MODEL, "", 2)


def test_use_is_noted_once(store, checkpoint):
    keep(store, checkpoint)
    used_at(store, checkpoint, 1000)
    panels = of_model(store, checkpoint)
    panels.find(GROUP).close()
    assert store.entries()[0].used_at > 1000
    used_at(store, checkpoint, 1000)
    panels.find(GROUP).close()
    assert store.entries()[0].used_at == 1000


def test_all_bytes_are_read_again(tmp_path, store, checkpoint):
    names = [keep(store, checkpoint, group(number)) for number in range(3)]
    assert [one.fault for one in store.verify(crc32)] == ["", "", ""]
    path = store.folder.path / PANELS / names[1]
    overwrite(path, 4096 + 8192 + 17, b"\xff")
    overwrite(store.folder.path / PANELS / names[2], 5, b"x")
    faults = {one.name: one.fault for one in store.verify(crc32) if one.fault}
    assert set(faults) == set(names[1:])
    assert faults[names[1]].startswith(f"{path}: the panels of expert 5 sum up to ")
    assert {f"{name}.damaged" for name in names[1:]} < set(files(tmp_path))
    assert len(list(store.verify(crc32))) == 1


def test_what_nobody_can_use_goes_first_and_in_any_case(tmp_path, store, checkpoint):
    kept = keep(store, checkpoint)
    set_aside = of_model(store, checkpoint).write(group(1), pieces, is_over=never)
    of_model(store, checkpoint).set_aside(set_aside)
    keep(store, checkpoint, replace(GROUP, layout=replace(LAYOUT, width=8)))
    gone = make_checkpoint(tmp_path / "gone")
    keep(store, gone, group(2))
    (gone / "model.safetensors").unlink()
    removed = store.collect(1 << 30, known={(1, 16)}, is_over=never)
    assert (removed.num_files, removed.num_bytes, removed.num_in_use) == (3, 3 * FILE_BYTES, 0)
    assert panels_of(store) == {kept}
    assert [one.path for one in store.entries()] == [str(checkpoint)]


def test_what_was_used_least_recently_goes_next(tmp_path, store):
    checkpoints = [make_checkpoint(tmp_path / f"model{number}") for number in range(3)]
    names = [keep(store, one, group(number)) for number, one in enumerate(checkpoints)]
    for when, number in enumerate((1, 2, 0)):
        used_at(store, checkpoints[number], 1000 + when)
    assert store.collect(2 * FILE_BYTES, is_over=never).num_files == 1
    assert panels_of(store) == {names[0], names[2]}
    assert store.collect(FILE_BYTES, is_over=never).num_files == 1
    assert panels_of(store) == {names[0]}
    assert len(store.entries()) == 1
    assert store.collect(0, is_over=never).num_files == 1
    assert files(tmp_path) == []


def test_what_is_in_use_stays(store, checkpoint):
    name = keep(store, checkpoint)
    with of_model(store, checkpoint).find(GROUP):
        removed = store.collect(0, is_over=never)
        assert (removed.num_files, removed.num_in_use) == (0, 1)
        assert store.remove(None, is_over=never).num_in_use == 1
    assert panels_of(store) == {name}
    assert store.collect(1 << 30, is_over=never).num_files == 1, "its index was removed"


def test_a_full_budget_makes_room_but_not_from_the_same_checkpoint(tmp_path, checkpoint, caplog):
    store = opened(tmp_path, max_bytes=2 * FILE_BYTES)
    other = make_checkpoint(tmp_path / "other")
    keep(store, other)
    names = {keep(store, checkpoint, group(1)), keep(store, checkpoint, group(2))}
    assert panels_of(store) == names
    for _ in range(2):
        assert of_model(store, checkpoint).write(group(3), pieces, is_over=never) is None
    assert panels_of(store) == names
    assert len(caplog.records) == 1
    assert "28.0 KiB more do not fit the budget of 56.0 KiB, of which 56.0 KiB are taken" in caplog.text


def test_the_budget_is_half_of_what_is_free_and_held(tmp_path, checkpoint, monkeypatch):
    store = opened(tmp_path, max_bytes=None)
    keep(store, checkpoint)
    monkeypatch.setattr(store.folder, "free_bytes", lambda: 3 * FILE_BYTES)
    assert store.budget() == 2 * FILE_BYTES


@pytest.mark.parametrize("by", ["path", "fingerprint", "all"])
def test_a_model_is_removed(tmp_path, store, checkpoint, by):
    keep(store, checkpoint)
    removed = store.remove({"path": str(checkpoint), "fingerprint": MODEL, "all": None}[by], is_over=never)
    assert (removed.num_files, removed.num_bytes) == (1, FILE_BYTES)
    assert files(tmp_path) == []


def test_what_another_checkpoint_uses_stays(tmp_path, store, checkpoint):
    name = keep(store, checkpoint)
    copy = make_checkpoint(tmp_path / "copy")
    panels = of_model(store, copy)
    (candidate,) = panels.candidates(GROUP)
    with candidate:
        panels.adopt(GROUP, candidate, is_over=never)
    assert store.remove(str(checkpoint), is_over=never).num_files == 0
    assert panels_of(store) == {name}
    assert [one.path for one in store.entries()] == [str(copy)]


def test_a_reader_beside_gc_never_has_a_file_that_is_gone(tmp_path, store, checkpoint):
    """A reader opens while files are removed and written again and again: what it has open has its
    name and stays readable.
    """
    stop, faults = threading.Event(), []

    def read():
        panels = of_model(opened(tmp_path), checkpoint)
        while not stop.is_set():
            found = panels.find(GROUP)
            if found is not None:
                with found:
                    if os.fstat(found.descriptor).st_nlink != 1:
                        faults.append(found.path)

    reader = threading.Thread(target=read)
    reader.start()
    for _ in range(40):
        keep(store, checkpoint)
        store.collect(0, is_over=never)
    stop.set()
    reader.join(timeout=30)
    assert not faults
