"""What `doctor` finds out by trying: sealed memory, futex, eventfd, sockets, libfabric, GPU
libraries, versions. No torch.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import ctypes
import ctypes.util
import errno
import fcntl
import mmap
import os
import platform
import resource
import socket
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dflash_moe.config import format_bytes
from dflash_moe.errors import ConfigError, DflashError

if TYPE_CHECKING:
    from dflash_moe.topology import HostSpec

# Linux has these numbers for the system call.
_FUTEX_CALL = {"x86_64": 202, "aarch64": 98}
_FUTEX_WAKE = 1
# The value is that of linux/fcntl.h. Python names it from version 3.13 on.
_SEAL_FUTURE_WRITE = 0x10
PACKAGES = ("torch", "transformers", "numpy", "safetensors", "msgpack", "pyyaml", "typer")

Finding = dict[str, Any]


def found(probe: Callable[[], None]) -> Finding:
    """`available`, and the `reason` when the probe raised OSError."""
    try:
        probe()
    except OSError as error:
        return {"available": False, "reason": f"{error.strerror or error}"}
    return {"available": True}


def probe_transports() -> dict[str, Finding]:
    """Every transport by name, tried on this machine."""
    library = ctypes.util.find_library("fabric")
    present = f"libfabric is installed ({library}), but" if library else "libfabric is not installed, and"
    return {
        "loopback": {"available": True},
        "shared": found(_try_shared),
        "unix": found(_try_unix),
        "tcp": found(_try_tcp),
        "fabric": {"available": False, "libfabric": library, "reason": f"{present} fabric is not built into this version"},
    }


def probe_backends(cpu_isa: str | None = None) -> dict[str, Finding]:
    """The compute backends by name: whether built into this package, whether they can run here, and
    why not.

    `cpu_isa` is the kernel set asked for; None: the best.
    """
    return {
        "cpu": probe_cpu(cpu_isa),
        "cuda": _probe_plugin("cuda", "/dev/nvidiactl"),
        "hip": _probe_plugin("hip", "/dev/kfd"),
        "sim": _probe_plugin("sim"),
    }


def probe_cpu(asked: str | None = None) -> Finding:
    """Kernel sets of this CPU, which one runs, and the numerics classes it computes."""
    try:
        from dflash_moe import _core

        isas = _core.supported_isas()
        isa = _core.parse_isa(asked) if asked else _core.best_isa()
    except ImportError as error:
        return {"built": False, "available": False, "reason": f"the C++ core cannot be imported: {error}"}
    except ConfigError as error:
        return {"built": True, "available": False, "reason": str(error)}
    why = "as DFLASH_MOE_CPU_ISA asks, of those" if asked else "the last of those"
    return {
        "built": True,
        "available": True,
        "isa": isa,
        "isa_reason": f"{why} that this build and this CPU support: {', '.join(isas)}",
        "supported_isas": isas,
        "features": _core.cpu_features(),
        "numerics_classes": _core.numerics_classes(isa),
    }


def probe_host_device(host: HostSpec) -> Finding:
    """The device of `host.device`: whether it can be used, and how device steps would use the
    workers' replies there.
    """
    from dflash_moe.protocol.devices import DeviceChoice
    from dflash_moe.runtime.device_tensors import open_host_device

    choice = DeviceChoice.of_host(host)
    if choice.is_processor:
        return {"device": "cpu", "available": True, "reason": "", "registration": "not needed"}
    try:
        device = open_host_device(choice)
        sealed = device.refuses_replies(is_open=False)
        opened = device.refuses_replies(is_open=True) if sealed else ""
    except DflashError as error:
        return {"device": host.device, "available": False, "reason": str(error), "registration": "unknown"}
    registration = "read-only" if not sealed else "writable" if not opened else "none"
    return {"device": device.name, "available": True, "reason": opened or sealed, "registration": registration}


def probe_memory() -> Finding:
    """Bytes: machine, free for new processes, lock limit (None: unlimited), /dev/shm (unused by the
    transports).
    """
    from dflash_moe.telemetry.machine import memory_available

    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    try:
        shared = os.statvfs("/dev/shm")
        shm_bytes: int | None = shared.f_frsize * shared.f_blocks
    except OSError:
        shm_bytes = None
    return {
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "memory_available_bytes": memory_available(),
        "memlock_bytes": None if soft == resource.RLIM_INFINITY else soft,
        "dev_shm_bytes": shm_bytes,
        "open_files_limit": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
    }


def probe_versions() -> Finding:
    """Versions of kernel, C library, Python and the packages; None for one that is not
    installed.
    """
    return {
        "kernel": platform.release(),
        "libc": " ".join(platform.libc_ver()).strip(),
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in PACKAGES},
    }


def cpu_model() -> str:
    """The CPU's name, or its architecture where the kernel does not tell."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name") and ":" in line]
    return names[0] if names else platform.machine()


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _probe_plugin(name: str, node: str = "") -> Finding:
    """Whether the plug-in is there, its `devices`, and why none of them can be used; `node`: what
    the kernel's driver makes.
    """
    try:
        from dflash_moe import _core

        found = _core.probe_backend(name)
    except ImportError as error:
        return {"built": False, "available": False, "reason": f"the C++ core cannot be imported: {error}", "devices": []}
    usable = [device for device in found["devices"] if not device["reason"]]
    if found["devices"]:
        reason = "; ".join(_device_text(f"{name}:{index}", device) for index, device in enumerate(found["devices"]))
    else:
        present = f"; {node} is {'present' if Path(node).exists() else 'absent'}" if node else ""
        reason = found["reason"] + present
    return {"built": found["built"], "available": bool(usable), "reason": reason, "devices": found["devices"]}


def _device_text(label: str, device: Finding) -> str:
    if device["reason"]:
        return f"{label} {device['name']}: {device['reason']}"
    arch = device["arch"] or "architecture known once opened"
    return f"{label} {device['name']}, {arch}, {format_bytes(device['memory_bytes'])}"


def _try_shared() -> None:
    """A sealed memfd, mapped, with a futex in it, and an eventfd: what the shared transport is made
    of.
    """
    descriptor = os.memfd_create("dflash_moe-probe", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, mmap.PAGESIZE)
        with mmap.mmap(descriptor, mmap.PAGESIZE) as mapping:
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | _SEAL_FUTURE_WRITE)
            word = ctypes.c_uint32.from_buffer(mapping)
            _wake_futex(ctypes.addressof(word))
            # The mapping cannot close while something points into it.
            del word
    finally:
        os.close(descriptor)
    os.close(os.eventfd(0, os.EFD_CLOEXEC))


def _wake_futex(address: int) -> None:
    number = _FUTEX_CALL.get(platform.machine())
    if number is None:
        raise OSError(errno.ENOSYS, f"no futex call known for {platform.machine()}")
    library = ctypes.CDLL(None, use_errno=True)
    if library.syscall(ctypes.c_long(number), ctypes.c_void_p(address), _FUTEX_WAKE, 1, None, None, 0) < 0:
        raise OSError(ctypes.get_errno(), f"futex: {os.strerror(ctypes.get_errno())}")


def _try_unix() -> None:
    for end in socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM):
        end.close()


def _try_tcp() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listener:
        listener.bind(("127.0.0.1", 0))
