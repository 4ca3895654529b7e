"""Panels are found for the checkpoint that they were made from and for no other, written once, and
never half: not by a writer who is killed, not on a full disk, not by two at once.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import errno
import logging
import os
import shutil
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from zlib import crc32

import pytest

from dflash_moe.errors import CheckpointError, DflashError
from dflash_moe.model.checkpoint_files import SeenFiles
from dflash_moe.store import folder as folders
from dflash_moe.store.folder import INDEX, PANELS
from dflash_moe.store.panel_file import read_at
from tests.unit.store.stored_panels import (
    GROUP,
    LAYOUT,
    MODEL,
    at_once,
    files,
    group,
    make_checkpoint,
    never,
    of_model,
    opened,
    overwrite,
    piece,
    pieces,
)  # fmt: skip

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def checkpoint(tmp_path):
    return make_checkpoint(tmp_path / "model")


def write(panels, wanted=GROUP):
    """Writes the panels of a group, and closes them; says whether they were kept."""
    found = panels.write(wanted, pieces, is_over=never)
    if found is not None:
        found.close()
    return found is not None


def is_whole(found):
    """Says whether a file holds the pieces of GROUP, and closes it."""
    with found:
        return [bytes(read_at(found.descriptor, one.num_bytes, one.offset)) for one in found.header.experts] == [
            piece(GROUP.first + number) for number in range(GROUP.count)
        ]


def test_what_is_written_is_found_and_has_all_bytes(tmp_path, store, checkpoint):
    panels = of_model(store, checkpoint)
    assert panels.find(GROUP) is None
    assert is_whole(panels.write(GROUP, pieces, is_over=never))
    for again in (panels, of_model(store, checkpoint), of_model(opened(tmp_path), checkpoint)):
        found = again.find(GROUP)
        assert [one.source for one in found.header.experts] == [pieces(expert).source for expert in (4, 5, 6)]
        assert is_whole(found)
    assert panels.find(group(1)) is None
    assert write(panels, group(1))
    assert len(files(tmp_path)) == 3


def test_a_descriptor_can_be_taken_over(store, checkpoint):
    found = of_model(store, checkpoint).write(GROUP, pieces, is_over=never)
    descriptor = found.take()
    found.close()
    assert os.fstat(descriptor).st_size > 0
    os.close(descriptor)
    assert found.descriptor == -1


def test_experts_are_asked_for_once_in_order_and_not_where_the_panels_are_there(store, checkpoint):
    asked = []
    panels = of_model(store, checkpoint)
    for _ in range(2):
        panels.write(GROUP, lambda expert: asked.append(expert) or pieces(expert), is_over=never).close()
    assert asked == [4, 5, 6]


@pytest.mark.parametrize(
    "other",
    [
        replace(GROUP, layout=replace(LAYOUT, width=32)),
        replace(GROUP, layout=replace(LAYOUT, version=2)),
        replace(GROUP, first=7),
        replace(GROUP, count=2),
    ],
    ids=["width", "version", "first", "count"],
)
def test_another_layout_or_cut_is_another_file(store, checkpoint, other):
    panels = of_model(store, checkpoint)
    write(panels)
    assert panels.find(other) is None
    write(panels, other)
    assert panels.find(GROUP).header != panels.find(other).header


@pytest.mark.parametrize("change", ["touched", "exchanged", "grown"])
def test_a_checkpoint_in_another_state_finds_nothing_and_can_adopt(store, checkpoint, change):
    write(of_model(store, checkpoint))
    weights = checkpoint / "model.safetensors"
    if change == "touched":
        os.utime(weights)
    elif change == "exchanged":
        (checkpoint / "new").write_bytes(bytes(100))
        (checkpoint / "new").rename(weights)
    else:
        weights.write_bytes(bytes(200))
    panels = of_model(store, checkpoint)
    assert panels.find(GROUP) is None
    (candidate,) = panels.candidates(GROUP)
    assert not list(panels.candidates(group(1)))
    panels.adopt(GROUP, candidate, is_over=never)
    candidate.close()
    assert is_whole(panels.find(GROUP))
    assert not list(panels.candidates(GROUP))


def test_panels_of_another_fingerprint_are_no_candidates(store, checkpoint):
    write(of_model(store, checkpoint))
    other = store.of_checkpoint(SeenFiles(checkpoint), "other", checkpoint)
    assert other.find(GROUP) is None
    assert not list(other.candidates(GROUP))


def test_nothing_is_kept_of_a_checkpoint_that_changes_meanwhile(tmp_path, store, checkpoint, caplog):
    def change(expert):
        (checkpoint / "model.safetensors").write_bytes(bytes(101))
        return pieces(expert)

    assert of_model(store, checkpoint).write(GROUP, change, is_over=never) is None
    assert files(tmp_path) == []
    assert "has changed" in caplog.text


@pytest.mark.parametrize("num_asked", range(4))
def test_a_writer_that_is_to_end_leaves_nothing(tmp_path, store, checkpoint, num_asked):
    asked = []

    def is_over():
        asked.append(True)
        return len(asked) > num_asked

    kept = of_model(store, checkpoint).write(GROUP, pieces, is_over=is_over)
    assert (kept is not None) == (num_asked >= 3)
    assert len(files(tmp_path)) == (2 if num_asked >= 3 else 0)


@pytest.mark.parametrize("error", [CheckpointError("damaged"), KeyboardInterrupt()])
def test_what_experts_raise_ends_the_writing(tmp_path, store, checkpoint, error):
    def fail(expert):
        raise error

    with pytest.raises(type(error)):
        of_model(store, checkpoint).write(GROUP, fail, is_over=never)
    assert files(tmp_path) == []
    assert write(of_model(store, checkpoint))


# -- damage ---------------------------------------------------------------------------------------


def the_file(tmp_path, inside=PANELS):
    (found,) = (tmp_path / "store" / inside).iterdir()
    return found


@pytest.mark.parametrize("damage", ["header", "cut", "name", "mode", "link"])
def test_a_damaged_file_is_set_aside_with_one_line_and_written_again(tmp_path, store, checkpoint, caplog, damage):
    panels = of_model(store, checkpoint)
    write(panels)
    path = the_file(tmp_path)
    if damage == "header":
        overwrite(path, 70, b"x")
    elif damage == "cut":
        os.truncate(path, 8192)
    elif damage == "name":
        write(panels, group(1))
        other = next(one for one in path.parent.iterdir() if one != path)
        shutil.copyfile(other, path)
    elif damage == "mode":
        path.chmod(0o644)
    else:
        path.rename(tmp_path / "elsewhere")
        path.symlink_to(tmp_path / "elsewhere")
    assert panels.find(GROUP) is None
    assert panels.find(GROUP) is None
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert str(path) in caplog.text
    assert f"{path.name}.damaged" in files(tmp_path)
    assert is_whole(panels.write(GROUP, pieces, is_over=never))


def test_a_file_whose_panels_differ_can_be_set_aside(tmp_path, store, checkpoint):
    panels = of_model(store, checkpoint)
    found = panels.write(GROUP, pieces, is_over=never)
    panels.set_aside(found)
    assert found.descriptor == -1
    assert panels.find(GROUP) is None
    write(panels, group(1))
    assert the_file(tmp_path, INDEX).read_text().count(".panels") == 1


def test_an_index_that_names_the_wrong_file_is_written_anew(tmp_path, store, checkpoint, caplog):
    panels = of_model(store, checkpoint)
    write(panels)
    index = the_file(tmp_path, INDEX)
    overwrite(index, 0, index.read_bytes().replace(b"/4+3/", b"/5+3/"))
    assert panels.find(replace(GROUP, first=5)) is None
    assert "first is 4, expected 5" in caplog.text
    assert not [name for name in files(tmp_path) if name.endswith(".damaged")]
    assert write(panels, replace(GROUP, first=5))
    assert panels.find(replace(GROUP, first=5)).header.first == 5


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{",
        b"[" * 50_000,
        b"{}",
        b'{"version":2}',
        b"\xff",
        b'{"files":[],"model":"m","panels":{},"path":"/","version":1}',
    ],
)
def test_a_damaged_index_is_as_none_and_is_written_anew(tmp_path, store, checkpoint, caplog, text):
    panels = of_model(store, checkpoint)
    write(panels)
    index = the_file(tmp_path, INDEX)
    overwrite(index, 0, text)
    os.truncate(index, len(text))
    assert panels.find(GROUP) is None
    assert panels.find(GROUP) is None
    assert [record.getMessage().split()[0] for record in caplog.records] == [str(index)]
    assert is_whole(panels.write(GROUP, pieces, is_over=never))
    assert is_whole(of_model(store, checkpoint).find(GROUP))


def test_the_index_of_another_checkpoint_is_not_taken(tmp_path, store, checkpoint):
    write(of_model(store, checkpoint))
    index = the_file(tmp_path, INDEX)
    os.utime(checkpoint / "model.safetensors")
    panels = of_model(store, checkpoint)
    index.rename(index.with_name(panels._name))
    assert panels.find(GROUP) is None


# -- kills, full disks, two writers ----------------------------------------------------------------

CALLS = ("open", "posix_fallocate", "pwrite", "fsync", "fchmod", "rename")
WRITER = """
import os, sys
from pathlib import Path
from tests.unit.store.stored_panels import GROUP, never, of_model, opened, pieces
left, calls = int(sys.argv[2]), sys.argv[3].split()
def dying(call):
    def run(*args, **kwargs):
        global left
        left -= 1
        if left < 0:
            os._exit(9)
        return call(*args, **kwargs)
    return run
panels = of_model(opened(Path(sys.argv[1])), Path(sys.argv[1]) / "model")
for name in calls:
    setattr(os, name, dying(getattr(os, name)))
panels.write(GROUP, pieces, is_over=never)
os._exit(0)
"""


def test_a_writer_that_is_killed_at_any_step_leaves_nothing_half_written(tmp_path, checkpoint):
    for step in range(100):
        shutil.rmtree(tmp_path / "store", ignore_errors=True)
        command = [sys.executable, "-c", WRITER, str(tmp_path), str(step), " ".join(CALLS)]
        code = subprocess.run(command, cwd=ROOT, timeout=60, check=False).returncode
        assert code in (0, 9)
        whole = [name for name in files(tmp_path) if not name.endswith(".tmp")]
        assert len(files(tmp_path)) - len(whole) <= 1
        with_store = opened(tmp_path)
        assert files(tmp_path) == whole
        found = of_model(with_store, checkpoint).find(GROUP)
        if found is not None:
            assert is_whole(found)
        assert all(one.fault == "" for one in with_store.verify(crc32))
        assert is_whole(of_model(with_store, checkpoint).write(GROUP, pieces, is_over=never))
        with_store.close()
        if code == 0:
            break
    assert step >= 20


@pytest.mark.parametrize("reason", [errno.ENOSPC, errno.EIO, errno.EDQUOT])
def test_a_disk_that_fails_at_any_step_is_no_error_and_leaves_nothing_behind(
    tmp_path, store, checkpoint, monkeypatch, caplog, reason
):
    panels = of_model(store, checkpoint)
    for step in range(100):
        left = [step]

        def failing(call, left=left):
            def run(*args, **kwargs):
                left[0] -= 1
                if left[0] == -1:
                    raise OSError(reason, os.strerror(reason))
                return call(*args, **kwargs)

            return run

        caplog.clear()
        store._said.clear()
        with monkeypatch.context() as patched:
            for name in CALLS[1:]:
                patched.setattr(folders.os, name, failing(getattr(os, name)))
            found = panels.write(GROUP, pieces, is_over=never)
        assert folders.TEMPORARY_NAME not in files(tmp_path)
        if found is not None:
            assert is_whole(found)
            break
        assert os.strerror(reason) in caplog.text
        assert len(caplog.records) == 1
        if (kept := panels.find(GROUP)) is not None:  # it failed after all was in place
            assert is_whole(kept)
            store.remove(None, is_over=never)
    assert step >= 15


def test_two_writers_at_once_write_one_file(tmp_path, checkpoint):
    num_asked = []

    def slowly(expert):
        num_asked.append(expert)
        threading.Event().wait(0.02)
        return pieces(expert)

    def run(_):
        return is_whole(of_model(opened(tmp_path), checkpoint).write(GROUP, slowly, is_over=never))

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(run, range(4)))
    assert sorted(num_asked) == [4, 5, 6]
    assert len(files(tmp_path)) == 2


def test_a_store_that_is_only_read_keeps_nothing(store, checkpoint, monkeypatch, caplog):
    write(of_model(store, checkpoint))
    monkeypatch.setattr(store.folder, "_file_mode", 0)
    panels = of_model(store, checkpoint)
    assert is_whole(panels.find(GROUP))
    assert not write(panels, group(1))
    assert not write(panels, group(1))
    assert len(caplog.records) == 1
    with pytest.raises(DflashError, match="run this with sudo"):
        store.collect(0, is_over=at_once)


def test_who_waits_for_another_writer_can_end(tmp_path, store, checkpoint):
    other = opened(tmp_path)
    with other.folder.writing(never):
        assert of_model(store, checkpoint).write(GROUP, pieces, is_over=at_once) is None
        of_model(store, checkpoint).adopt(GROUP, None, is_over=at_once)
        with pytest.raises(DflashError, match="another process writes to it") as caught:
            store.remove(None, is_over=at_once)
    assert caught.value.code == "timeout"


def test_an_open_beside_a_writer_leaves_its_file_alone(tmp_path, store):
    with store.folder.writing(never), store.folder.new_file(PANELS, 4096) as file:
        opened(tmp_path).close()
        file.publish("kept")
    assert files(tmp_path) == ["kept"]


@pytest.mark.parametrize("is_gguf", [False, True])
def test_a_checkpoint_of_links_is_as_it_was(tmp_path, store, is_gguf):
    blob, folder = tmp_path / "blob", tmp_path / "snapshot"
    blob.write_bytes(b"GGUF" + bytes(100))
    folder.mkdir()
    link = folder / ("model.gguf" if is_gguf else "model.safetensors")
    link.symlink_to(blob)
    checkpoint = link if is_gguf else folder
    write(of_model(store, checkpoint))
    assert [(one.path, one.is_current) for one in store.entries()] == [(str(checkpoint), True)]
    assert store.collect(1 << 30, is_over=never).num_files == 0


def test_names_of_models_do_not_have_to_be_ascii(tmp_path, store):
    checkpoint = make_checkpoint(tmp_path / "mödel\udcff")
    write(of_model(store, checkpoint))
    assert is_whole(of_model(store, checkpoint).find(GROUP))
    assert [(one.path, one.model, one.is_current) for one in store.entries()] == [(str(checkpoint), MODEL, True)]
