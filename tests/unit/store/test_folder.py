"""The folder of the store: whose it may be, links, modes, file systems, and files that appear whole
or not at all.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from pathlib import Path

import pytest

from dflash_moe.errors import CheckpointError, ConfigError, DflashError
from dflash_moe.store import folder as folders
from dflash_moe.store.folder import INDEX, PANELS, SUBFOLDERS, CacheFolder, default_path
from tests.unit.store.stored_panels import at_once, never

SELF = os.geteuid()


def _owned(found: os.stat_result, owner: int) -> os.stat_result:
    return os.stat_result((*found[:4], owner, *found[5:10]))


def opened(path: Path) -> CacheFolder:
    return CacheFolder.open(path, allow_network=False)


def published(folder: CacheFolder, name: str = "one") -> Path:
    with folder.writing(never) as has_lock, folder.new_file(PANELS, 5) as file:
        assert has_lock
        file.write_at(0, b"bytes")
        file.publish(name)
    return folder.path / PANELS / name


@pytest.fixture
def as_user(monkeypatch):
    """Lets the process be of one user and folders of another, whatever they are."""

    def pretend(*, user: int, owner: int) -> None:
        look = os.fstat

        def looked(descriptor):
            return _owned(look(descriptor), owner)

        monkeypatch.setattr(folders.os, "geteuid", lambda: user)
        monkeypatch.setattr(folders.os, "fstat", looked)

    return pretend


def refused(path: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        opened(path)
    text = str(caught.value)
    assert str(path) in text
    assert "\n" not in text
    assert "DFLASH_MOE_CACHE_PATH" in text
    return text


def test_it_is_made_for_this_user_alone(tmp_path):
    folder = opened(tmp_path / "a" / "store")
    assert folder.is_writable
    for path in (folder.path, folder.path / PANELS, folder.path / INDEX):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
    assert 0 < folder.free_bytes() <= folder.total_bytes()
    folder.close()


def test_a_link_is_refused(tmp_path):
    (tmp_path / "real").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to("real")
    assert "it is a link" in refused(tmp_path / "link")


@pytest.mark.parametrize("inside", [PANELS, INDEX])
def test_a_link_inside_is_refused(tmp_path, inside):
    (tmp_path / "store").mkdir(mode=0o700)
    (tmp_path / "real").mkdir(mode=0o700)
    (tmp_path / "store" / inside).symlink_to("../real")
    with pytest.raises(ConfigError, match="it is a link"):
        opened(tmp_path / "store")


def test_a_file_in_its_place_is_refused(tmp_path):
    (tmp_path / "store").write_text("")
    assert "Not a directory" in refused(tmp_path / "store")


def test_one_of_another_user_is_refused(tmp_path, as_user):
    as_user(user=1000, owner=1001)
    assert "belongs to uid 1001, this process runs as 1000: chown 1000" in refused(tmp_path / "store")


@pytest.mark.parametrize("mode", [0o770, 0o702, 0o755, 0o500])
def test_one_that_others_read_or_write_is_refused(tmp_path, as_user, mode):
    (tmp_path / "store").mkdir()
    (tmp_path / "store").chmod(mode)
    as_user(user=1000, owner=1000)
    assert f"has mode {mode:04o}, it must have 700: chmod 700 " in refused(tmp_path / "store")


@pytest.mark.parametrize("mode", [0o775, 0o757])
def test_one_of_root_that_others_write_is_refused(tmp_path, as_user, mode):
    (tmp_path / "store").mkdir()
    (tmp_path / "store").chmod(mode)
    as_user(user=1000, owner=0)
    assert f"has mode {mode:04o}, it must have 755: chmod 755 " in refused(tmp_path / "store")


def test_one_of_root_is_only_read(tmp_path, as_user):
    (tmp_path / "store").mkdir(mode=0o755)
    as_user(user=1000, owner=0)
    folder = opened(tmp_path / "store")
    assert not folder.is_writable
    assert not list((tmp_path / "store").iterdir())
    assert folder.sizes(PANELS) == {}
    assert folder.state_of(INDEX, "one") is None
    with pytest.raises(FileNotFoundError):
        folder.open_file(PANELS, "one")


def test_files_of_root_are_for_all_users_where_its_folder_is(tmp_path, as_user):
    (tmp_path / "store").mkdir()
    (tmp_path / "store").chmod(0o755)
    as_user(user=0, owner=0)
    folder = opened(tmp_path / "store")
    assert stat.S_IMODE((tmp_path / "store" / PANELS).stat().st_mode) == 0o755
    assert stat.S_IMODE(published(folder).stat().st_mode) == 0o444


@pytest.mark.parametrize("kind", ["nfs4", "fuse.sshfs", "fuseblk", "cifs"])
def test_a_file_system_of_another_machine_has_to_be_allowed(tmp_path, monkeypatch, kind):
    monkeypatch.setattr(folders, "file_system", lambda descriptor: kind)
    assert f"is on {kind}" in refused(tmp_path / "store")
    CacheFolder.open(tmp_path / "store", allow_network=True).close()


def test_the_file_system_is_that_of_the_mount():
    for path in ("/proc", "/sys"):
        descriptor = os.open(path, os.O_RDONLY)
        assert folders.file_system(descriptor) in ("proc", "sysfs", "overlay", "tmpfs")
        os.close(descriptor)


def test_the_default_is_below_the_cache_of_the_user():
    assert default_path({"XDG_CACHE_HOME": "/c"}) == Path("/c/dflash-moe")
    assert default_path({}) == Path("~/.cache/dflash-moe").expanduser()
    with pytest.raises(ConfigError, match="XDG_CACHE_HOME"):
        default_path({"XDG_CACHE_HOME": "relative"})


def test_no_descriptor_is_left_by_a_refusal(tmp_path):
    (tmp_path / "store").mkdir(mode=0o700)
    (tmp_path / "store" / INDEX).symlink_to("nowhere")
    before = os.listdir("/proc/self/fd")
    with pytest.raises(ConfigError):
        opened(tmp_path / "store")
    assert os.listdir("/proc/self/fd") == before


# -- files -----------------------------------------------------------------------------------------


def test_a_file_is_published_whole_and_for_ever(tmp_path):
    path = published(opened(tmp_path / "store"))
    assert path.read_bytes() == b"bytes"
    assert stat.S_IMODE(path.stat().st_mode) == 0o400


@pytest.mark.parametrize("kind", ["link", "folder", "writable", "fifo"])
def test_what_is_no_file_of_the_store_is_refused(tmp_path, kind):
    folder = opened(tmp_path / "store")
    path = folder.path / PANELS / "one"
    if kind == "link":
        path.symlink_to("/etc/passwd")
    elif kind == "folder":
        path.mkdir()
    elif kind == "fifo":
        os.mkfifo(path, 0o400)
    else:
        published(folder).chmod(0o600)
    with pytest.raises(CheckpointError, match="store verify") as caught:
        folder.open_file(PANELS, "one")
    assert str(path) in str(caught.value)
    if kind != "folder":
        assert folder.remove(PANELS, "one")
        assert not os.path.lexists(path)


def test_a_file_of_another_user_is_refused(tmp_path, monkeypatch):
    folder = opened(tmp_path / "store")
    published(folder)
    look, seen = os.fstat, []

    def looked(descriptor):
        seen.append(descriptor)
        return _owned(look(descriptor), SELF + len(seen) % 2)

    monkeypatch.setattr(folders.os, "fstat", looked)
    with pytest.raises(CheckpointError, match=f"of uid {SELF + 1}, expected a file of uid {SELF}"):
        folder.open_file(PANELS, "one")


def test_what_is_open_is_not_removed(tmp_path):
    folder = opened(tmp_path / "store")
    path = published(folder)
    reading = folder.open_file(PANELS, "one")
    copy = os.dup(reading)
    os.close(reading)
    assert not folder.remove(PANELS, "one")
    os.close(copy)
    assert folder.remove(PANELS, "one")
    assert not path.exists()
    with pytest.raises(FileNotFoundError):
        folder.open_file(PANELS, "one")


def test_a_file_that_is_removed_while_it_is_opened_is_not_there(tmp_path, monkeypatch):
    folder = opened(tmp_path / "store")
    path = published(folder)
    lock = folders._lock
    monkeypatch.setattr(folders, "_lock", lambda descriptor, kind: path.unlink() is None and lock(descriptor, kind))
    with pytest.raises(FileNotFoundError):
        folder.open_file(PANELS, "one")


def test_one_writes_at_a_time(tmp_path):
    first, second = opened(tmp_path / "store"), opened(tmp_path / "store")
    asked = []

    def is_over():
        asked.append(True)
        return len(asked) > 2

    with first.writing(never) as has_lock:
        assert has_lock
        with second.writing(is_over) as other:
            assert not other
    assert len(asked) == 3
    with second.writing(at_once) as has_lock:
        assert has_lock


def test_the_next_writer_removes_what_a_killed_one_left(tmp_path):
    folder = opened(tmp_path / "store")
    for inside in (PANELS, INDEX):
        (folder.path / inside / folders.TEMPORARY_NAME).write_bytes(b"half")
    assert folder.has_orphans()
    with folder.writing(never):
        assert not folder.has_orphans()


def test_a_write_in_parts_is_gone_on_with(tmp_path, monkeypatch):
    write = os.pwrite
    monkeypatch.setattr(folders.os, "pwrite", lambda descriptor, data, offset: write(descriptor, data[:2], offset))
    assert published(opened(tmp_path / "store")).read_bytes() == b"bytes"


@pytest.mark.parametrize("call", ["open", "posix_fallocate", "pwrite", "fsync", "fchmod", "rename"])
def test_a_full_disk_leaves_nothing_behind(tmp_path, monkeypatch, call):
    folder = opened(tmp_path / "store")
    with folder.writing(never), contextlib.ExitStack() as later:

        def full(*args, **kwargs):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        later.enter_context(pytest.raises(DflashError, match="No space left on device"))
        context = later.enter_context(monkeypatch.context())
        context.setattr(folders.os, call, full)
        with folder.new_file(PANELS, 5) as file:
            file.write_at(0, b"bytes")
            file.publish("one")
    assert folder.sizes(PANELS) == {}


def test_a_folder_that_was_removed_is_an_error_of_the_system(tmp_path):
    folder = opened(tmp_path / "store")
    for path in (*(folder.path / inside for inside in SUBFOLDERS), folder.path):
        path.rmdir()
    with pytest.raises(DflashError, match="cannot be locked") as caught, folder.writing(never):
        pass
    assert caught.value.code == "system"
