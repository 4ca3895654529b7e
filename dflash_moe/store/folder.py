"""The folder in which this machine keeps panels: whose it may be, and how files get into it.

What is read from it is computed with, so that nobody but this user or root may be able to write
there. Folder and files are opened without following links, and owner and mode are asked of what was
opened. A file appears under its name whole and for ever unchanged, or not at all: one writer at a
time, who holds a lock, writes a temporary file and renames it. Who reads a file holds a shared lock
on it, and what is locked is not removed.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import stat
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from dflash_moe.errors import CheckpointError, ConfigError, DflashError

PANELS, INDEX, SPECS, PROOFS = "panels", "index", "specs", "proofs"
SUBFOLDERS = (PANELS, INDEX, SPECS, PROOFS)
LOCK_NAME = "lock"
# Only the holder of the lock writes, one file at a time, so that one name suffices in each folder.
TEMPORARY_NAME = "writing.tmp"
# Who waits for the lock looks again after this time: a writer holds it for one file, a second or
# more, and takes it again some milliseconds later for the next one.
POLL_S = 0.002
# A small file waits so long for its turn: for some files of panels, and for one on a slow disk.
SHORT_WAIT_S = 10.0
# Each of these is served by another machine or process, which may stand still, cut a mapped file
# off, or know nothing of locks.
NETWORK_TYPES = frozenset(
    ("9p", "afs", "beegfs", "ceph", "cifs", "coda", "gfs2", "glusterfs", "gpfs", "lustre", "ncpfs", "nfs", "nfs4", "ocfs2",
     "orangefs", "smb3", "smbfs", "virtiofs")
)  # fmt: skip
_ELSEWHERE = "choose another folder by DFLASH_MOE_CACHE_PATH or `cache.path`"
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY


def default_path(environment: Mapping[str, str] = os.environ) -> Path:
    """Returns `$XDG_CACHE_HOME/dflash-moe`, by default `~/.cache/dflash-moe`. Raises ConfigError
    where neither is an absolute path.
    """
    home = environment.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    path = Path(home) / "dflash-moe"
    if not path.is_absolute():
        raise ConfigError(f"{path}: no place for panels: XDG_CACHE_HOME is no absolute path; {_ELSEWHERE}")
    return path


class CacheFolder:
    """An open folder with its subfolders. Any thread may call; `close` ends it."""

    def __init__(self, path: Path, descriptors: Mapping[str, int], file_mode: int) -> None:
        """Takes the descriptors, by the subfolder's name, "" for the folder itself. Use `open`."""
        self.path = path
        self._descriptors = dict(descriptors)
        # New files get this mode. It is 0 in a folder of root that this user only reads.
        self._file_mode = file_mode

    @classmethod
    def open(cls, path: Path, *, allow_network: bool) -> CacheFolder:
        """Opens the folder, and makes it for this user alone where it is missing. Raises
        ConfigError where it belongs to somebody else, others may write there, it is a link, or its
        file system is not of this machine and `allow_network` is not set.
        """
        path = path.absolute()
        with contextlib.ExitStack() as opened:
            root = _open_directory(path, path, None, is_to_be_made=True)
            opened.callback(os.close, root)
            is_own = _is_own(path, os.fstat(root))
            if not allow_network:
                _refuse_network(path, root)
            descriptors = {"": root}
            for name in SUBFOLDERS:
                with contextlib.suppress(FileNotFoundError):
                    inner = _open_directory(path / name, Path(name), root, is_to_be_made=is_own)
                    opened.callback(os.close, inner)
                    if _is_own(path / name, os.fstat(inner)) != is_own:
                        raise ConfigError(
                            f"cache folder {path / name} has another owner than {path}: chown it, or {_ELSEWHERE}"
                        )
                    descriptors[name] = inner
            # Who may list the folder may read its files: all users where root made it so for them.
            file_mode = 0o400 | (os.fstat(root).st_mode & 0o044) if is_own else 0
            opened.pop_all()
        return cls(path, descriptors, file_mode)

    @property
    def is_writable(self) -> bool:
        """Says whether this user's files go here; a folder of root is only read."""
        return self._file_mode != 0

    def close(self) -> None:
        """Closes the folder. Files that were opened stay open."""
        while self._descriptors:
            os.close(self._descriptors.popitem()[1])

    def free_bytes(self) -> int:
        """Returns the bytes that this user may still write to the file system."""
        found = os.fstatvfs(self._descriptors[""])
        return found.f_bavail * found.f_frsize

    def total_bytes(self) -> int:
        """Returns the size of the file system in bytes."""
        found = os.fstatvfs(self._descriptors[""])
        return found.f_blocks * found.f_frsize

    def sizes(self, inside: str) -> dict[str, int]:
        """Returns the bytes on disk of each file of a subfolder by its name. Raises DflashError
        where it cannot be listed.
        """
        found: dict[str, int] = {}
        if inside in self._descriptors:
            with self._told(inside, "cannot be listed"):
                for name in os.listdir(self._descriptors[inside]):
                    with contextlib.suppress(FileNotFoundError):
                        status = os.stat(name, dir_fd=self._descriptors[inside], follow_symlinks=False)
                    found[name] = status.st_blocks * 512
        return found

    def open_file(self, inside: str, name: str) -> int:
        """Returns a descriptor for reading, which the caller closes. With it goes a shared lock:
        as long as it or a copy of it is open, the file is not removed.

        Raises FileNotFoundError where there is none, or it is being removed, and CheckpointError
        where it is no file, of another owner, or can be changed by anybody.
        """
        path = self.path / inside / name
        if inside not in self._descriptors:
            raise FileNotFoundError(path)
        try:
            descriptor = os.open(name, _FILE, dir_fd=self._descriptors[inside])
        except FileNotFoundError:
            raise
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be opened: {error.strerror}; {MENDED}") from None
        try:
            status, owner = os.fstat(descriptor), os.fstat(self._descriptors[inside]).st_uid
            if not stat.S_ISREG(status.st_mode) or status.st_uid != owner or status.st_mode & 0o222:
                raise CheckpointError(
                    f"{path}: found {stat.filemode(status.st_mode)} of uid {status.st_uid}, expected a file of uid {owner} "
                    f"that nobody may write; {MENDED}"
                )
            # It may have been removed between being opened and being locked.
            if not _lock(descriptor, fcntl.LOCK_SH) or os.fstat(descriptor).st_nlink == 0:
                raise FileNotFoundError(path)
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor

    def touch(self, inside: str, name: str) -> None:
        """Notes that a file is used now; where that fails, it counts as used earlier."""
        if self.is_writable:
            with contextlib.suppress(OSError):
                os.utime(name, dir_fd=self._descriptors[inside], follow_symlinks=False)

    def used_at(self, inside: str, name: str) -> float:
        """Returns when a file was written or touched last, in seconds since 1970; 0 where it is
        gone.
        """
        try:
            return os.stat(name, dir_fd=self._descriptors[inside], follow_symlinks=False).st_mtime
        except FileNotFoundError:
            return 0.0

    def state_of(self, inside: str, name: str) -> object | None:
        """Returns what changes whenever a file is replaced or touched, None where it is gone."""
        try:
            one = os.stat(name, dir_fd=self._descriptors[inside], follow_symlinks=False)
        except (FileNotFoundError, KeyError):  # a folder of root need not have the subfolder
            return None
        return one.st_ino, one.st_size, one.st_mtime_ns, one.st_ctime_ns

    # -- changes -----------------------------------------------------------------------------------

    @contextlib.contextmanager
    def writing(self, is_over: Callable[[], bool]) -> Iterator[bool]:
        """Holds the lock of the one writer. The block gets False, and no lock, where `is_over` said
        so first. What killed writers left is removed. Raises DflashError where the lock cannot be
        had at all.
        """
        with self._told(LOCK_NAME, "cannot be locked"):
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
            descriptor = os.open(LOCK_NAME, flags, 0o600, dir_fd=self._descriptors[""])
        try:
            while not (has_lock := _lock(descriptor, fcntl.LOCK_EX)) and not is_over():
                time.sleep(POLL_S)
            if has_lock:
                self._remove_orphans()
            yield has_lock
        finally:
            os.close(descriptor)

    @contextlib.contextmanager
    def writing_a_little(self) -> Iterator[bool]:
        """As `writing`, of a small file that is worth a short wait: whoever writes panels has the
        lock for one file after the other, and not between two.
        """
        deadline = time.monotonic() + SHORT_WAIT_S
        with self.writing(lambda: time.monotonic() > deadline) as has_lock:
            yield has_lock

    def has_orphans(self) -> bool:
        """Says whether there is a temporary file, of a writer who runs or was killed."""
        return any(TEMPORARY_NAME in self.sizes(inside) for inside in SUBFOLDERS)

    @contextlib.contextmanager
    def new_file(self, inside: str, num_bytes: int) -> Iterator[NewFile]:
        """Makes a temporary file of that size, all zeros, with its room on disk. It is removed
        where the block does not publish it. The caller holds the lock of `writing`. Raises
        DflashError where the disk has no room.
        """
        folder = self._descriptors[inside]
        file = NewFile(self.path / inside, folder, self._file_mode)
        with self._told(f"{inside}/{TEMPORARY_NAME}", "cannot be made"):
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            file.descriptor = os.open(TEMPORARY_NAME, flags, 0o600, dir_fd=folder)
        try:
            with self._told(f"{inside}/{TEMPORARY_NAME}", f"cannot get {num_bytes:,} bytes"):
                os.posix_fallocate(file.descriptor, 0, num_bytes)
            yield file
        finally:
            os.close(file.descriptor)
            if not file.is_published:
                with contextlib.suppress(OSError):  # then the next writer removes it
                    os.unlink(TEMPORARY_NAME, dir_fd=folder)

    def rename(self, inside: str, name: str, new_name: str) -> None:
        """Gives a file another name, if it is there. Raises DflashError."""
        with self._told(f"{inside}/{name}", "cannot be renamed"), contextlib.suppress(FileNotFoundError):
            folder = self._descriptors[inside]
            os.rename(name, new_name, src_dir_fd=folder, dst_dir_fd=folder)

    def remove(self, inside: str, name: str) -> bool:
        """Removes a file, unless a reader has it open; says whether it is gone. Raises
        DflashError.
        """
        folder = self._descriptors[inside]
        with self._told(f"{inside}/{name}", "cannot be removed"), contextlib.suppress(FileNotFoundError):
            if not stat.S_ISREG(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode):
                os.unlink(name, dir_fd=folder)
                return True
            descriptor = os.open(name, _FILE, dir_fd=folder)
            try:
                if not _lock(descriptor, fcntl.LOCK_EX):
                    return False
                os.unlink(name, dir_fd=folder)
            finally:
                os.close(descriptor)
        return True

    def _remove_orphans(self) -> None:
        for inside in SUBFOLDERS:
            with self._told(f"{inside}/{TEMPORARY_NAME}", "cannot be removed"), contextlib.suppress(FileNotFoundError):
                os.unlink(TEMPORARY_NAME, dir_fd=self._descriptors[inside])

    def _told(self, name: str, what: str) -> contextlib.AbstractContextManager[None]:
        return telling(self.path / name, what)


class NewFile:
    """A file that is being written, by one thread. Nobody sees it before `publish`."""

    def __init__(self, path: Path, folder: int, mode: int) -> None:
        self.descriptor = -1
        self.is_published = False
        self._path, self._folder, self._mode = path, folder, mode

    def write_at(self, offset: int, data: Any) -> None:
        """Writes all bytes of a buffer at an offset. Raises DflashError where the disk is full."""
        whole = memoryview(data)
        left = whole.cast("B") if whole.nbytes else b""
        with telling(self._path / TEMPORARY_NAME, "cannot be written"):
            while left:
                count = os.pwrite(self.descriptor, left, offset)
                left, offset = left[count:], offset + count

    def publish(self, name: str) -> None:
        """Gives the file its name once all of it is on the disk, and makes the name last too.
        Raises DflashError.
        """
        with telling(self._path / name, "cannot be written"):
            os.fsync(self.descriptor)
            os.fchmod(self.descriptor, self._mode)
            os.rename(TEMPORARY_NAME, name, src_dir_fd=self._folder, dst_dir_fd=self._folder)
            self.is_published = True
            os.fsync(self._folder)


# What messages about a file that will not do name as the remedy.
MENDED = "`dflash-moe store verify` sets it aside, and the next start writes it anew"


@contextlib.contextmanager
def telling(path: Path, what: str) -> Iterator[None]:
    """Turns the system's errors into a DflashError that names the file, with the code "system"."""
    try:
        yield
    except OSError as error:
        raise DflashError(f"{path}: {what}: {error.strerror}", code="system") from None


def _lock(descriptor: int, kind: int) -> bool:
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _open_directory(path: Path, name: Path, below: int | None, *, is_to_be_made: bool) -> int:
    """Opens a folder, by its name below an open one. Raises ConfigError naming its path, and
    FileNotFoundError where one that is not to be made is missing.
    """
    try:
        if is_to_be_made:
            if below is None:
                path.parent.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(FileExistsError):
                os.mkdir(name, 0o700, dir_fd=below)
                if below is not None:
                    # Below a folder that root made for all users its subfolders are for all too.
                    os.chmod(name, os.fstat(below).st_mode & 0o755, dir_fd=below)
        return os.open(name, _DIRECTORY, dir_fd=below)
    except (OSError, ValueError) as error:
        if isinstance(error, FileNotFoundError) and not is_to_be_made:
            raise
        reason = "it is a link" if path.is_symlink() else getattr(error, "strerror", None) or str(error)
        raise ConfigError(f"cache folder {path} cannot be opened: {reason}; name the folder itself, or {_ELSEWHERE}") from None


def _is_own(path: Path, status: os.stat_result) -> bool:
    """Says whether this user's files go into a folder: True for a folder of this user, False for
    one of root. Raises ConfigError for all others, and where somebody else may write there.
    """
    owner, mode, user = status.st_uid, stat.S_IMODE(status.st_mode), os.geteuid()
    if owner not in (user, 0):
        raise ConfigError(
            f"cache folder {path} belongs to uid {owner}, this process runs as {user}: chown {user} {path}, or {_ELSEWHERE}"
        )
    # Root may let all users read what it keeps. Another user's weights are nobody else's.
    forbidden = 0o022 if owner == 0 else 0o077
    if mode & forbidden or (owner == user and mode & 0o700 != 0o700):
        wanted = f"{0o700 | mode & 0o055 if owner == 0 else 0o700:o}"
        raise ConfigError(
            f"cache folder {path} has mode {mode:04o}, it must have {wanted}: chmod {wanted} {path}, or {_ELSEWHERE}"
        )
    return owner == user


def _refuse_network(path: Path, descriptor: int) -> None:
    kind = file_system(descriptor)
    if kind in NETWORK_TYPES or kind.startswith("fuse"):
        raise ConfigError(
            f"cache folder {path} is on {kind}, which another machine or process serves; {_ELSEWHERE}, "
            "or allow it by `cache.panels: on`"
        )


def file_system(descriptor: int) -> str:
    """Returns the type of the file system in which something open lies, such as "ext4"; empty where
    the system does not say.
    """
    try:
        text = Path(f"/proc/self/fdinfo/{descriptor}").read_text("ascii")
        number = re.search(r"^mnt_id:\s*(\d+)$", text, re.MULTILINE)
        mounts = Path("/proc/self/mountinfo").read_text("utf-8", "replace").splitlines()
    except OSError:
        return ""
    for line in mounts if number else ():
        # The type stands behind the dash that ends the optional fields (proc(5)).
        mount, _, described = line.partition(" - ")
        if number and mount.split(" ", 1)[0] == number[1]:
            return described.split(" ", 1)[0]
    return ""
