"""What `doctor` finds out by trying: transports, libfabric, GPU libraries, versions. No torch.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import ctypes.util
import os
import platform
import resource
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dflash_moe.config import format_bytes
from dflash_moe.errors import ConfigError, DflashError
from dflash_moe.protocol.paths import TRANSPORTS

if TYPE_CHECKING:
    from dflash_moe.topology import HostSpec

PACKAGES = ("torch", "transformers", "numpy", "safetensors", "msgpack", "pyyaml", "typer")

Finding = dict[str, Any]


def found(probe: Callable[[], None]) -> Finding:
    """`available`, and the `reason` when the probe raised a DflashError."""
    try:
        probe()
    except DflashError as error:
        return {"available": False, "reason": str(error)}
    return {"available": True}


def probe_transports() -> dict[str, Finding]:
    """Every transport by name, tried on this machine."""
    library = ctypes.util.find_library("fabric")
    present = f"libfabric is installed ({library}), but" if library else "libfabric is not installed, and"
    return {
        "loopback": {"available": True},
        **{name: found(kind.try_here) for name, kind in TRANSPORTS.items()},
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
