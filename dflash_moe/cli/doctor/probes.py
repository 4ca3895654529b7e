"""Finds out for `doctor` by trying: transports, GPU libraries, versions. It needs no
torch.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import importlib.util
import os
import platform
import re
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

# The drivers of cards make these files, whether or not a plug-in is built.
DRIVER_NODES = {"cuda": "/dev/nvidiactl", "hip": "/dev/kfd"}
_TORCH_BUILD = re.compile(r"^(cuda|hip)\b.*?= '([^']+)'", re.MULTILINE)

Finding = dict[str, Any]


def found(probe: Callable[[], None]) -> Finding:
    """Returns `available`, and the `reason` where the probe raised a DflashError."""
    try:
        probe()
    except DflashError as error:
        return {"available": False, "reason": str(error)}
    return {"available": True}


def probe_transports() -> dict[str, Finding]:
    """Tries every transport on this machine, and returns the findings by name. Those of a fabric
    have `providers`, and as `reason` a sentence on them where it is available.
    """
    tried = {name: found(kind.try_here) for name, kind in TRANSPORTS.items()}
    if tried["fabric"]["available"]:
        tried["fabric"] |= _providers()
    return {"loopback": {"available": True}, **tried}


def _providers() -> Finding:
    from dflash_moe import _core

    providers = _core.fabric_providers()
    fast = [one.name for one in providers if one.is_fast]
    others = ", ".join(one.name for one in providers if not one.is_fast)
    ways = f"hardware: {', '.join(fast)}" if fast else "no provider with hardware, so that auto stays with TCP"
    return {
        "reason": f"{ways}{f'; over ordinary networks: {others}' if others else ''}",
        "providers": [{"name": one.name, "protocol": one.protocol, "is_fast": one.is_fast} for one in providers],
    }


def probe_backends(cpu_isa: str | None = None) -> dict[str, Finding]:
    """Returns for each compute backend whether it is built into this package, whether it can run
    here, and why not.

    `cpu_isa` is the kernel set that is asked for; None means the best.
    """
    return {
        "cpu": probe_cpu(cpu_isa),
        **{name: _probe_plugin(name, node) for name, node in DRIVER_NODES.items()},
        "sim": _probe_plugin("sim"),
    }


def probe_cpu(asked: str | None = None) -> Finding:
    """Returns the kernel sets of this CPU, the one that runs, and the numerics classes it
    computes.
    """
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
    """Says of the device of `host.device` whether it can be used, and how device steps would use
    the replies of workers there.
    """
    from dflash_moe.experts.device_tensors import open_host_device
    from dflash_moe.protocol.devices import DeviceChoice

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
    """Returns the bytes of the machine, those free for new processes, the limit of locked memory
    (None is unlimited), and those of /dev/shm, which the transports do not use.
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
    """Returns the versions of kernel, C library, Python and the packages. It is None for one that
    is not installed.
    """
    return {
        "kernel": platform.release(),
        "libc": " ".join(platform.libc_ver()).strip(),
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in PACKAGES},
    }


def torch_backends() -> dict[str, str] | None:
    """Returns the cards that the installed torch is built for, with the toolkit's version: empty
    for a build for processors, None without torch. It reads torch's own note without importing it.
    """
    try:
        spec = importlib.util.find_spec("torch")
        if spec is None or spec.origin is None:
            return None
        note = (Path(spec.origin).parent / "version.py").read_text(encoding="utf-8")
    except (ImportError, OSError):
        return None
    return dict(_TORCH_BUILD.findall(note))


def torch_problems(version: str | None, built_for: dict[str, str] | None) -> list[str]:
    """Says for which cards of this machine torch is not built: the host's part of a model cannot
    run there.
    """
    if built_for is None:
        return []
    owners = {"cuda": "an NVIDIA card", "hip": "an AMD card"}
    return [
        f"this machine has {owners[name]} ({node} is there), and torch {version} is "
        + (f"built for {', '.join(built_for)} only" if built_for else "a build for processors")
        + f": workers can use the card, a host with `host.device: {name}:0` cannot; install a torch for {name} "
        "(README.md, `A torch without gigabytes of CUDA`, says where builds are)"
        for name, node in DRIVER_NODES.items()
        if Path(node).exists() and name not in built_for
    ]


def cpu_model() -> str:
    """Returns the name of the CPU, or its architecture where the kernel does not tell."""
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
    """Says whether the plug-in is there, which `devices` it finds, and why none of them can be
    used. `node` is the file that the kernel's driver makes.
    """
    try:
        from dflash_moe import _core
        from dflash_moe.protocol.card_packages import package_of

        found = _core.probe_backend(name)
    except ImportError as error:
        return {"built": False, "available": False, "reason": f"the C++ core cannot be imported: {error}", "devices": []}
    usable = [device for device in found["devices"] if not device["reason"]]
    if found["devices"]:
        reason = "; ".join(_device_text(f"{name}:{index}", device) for index, device in enumerate(found["devices"]))
    else:
        present = f"; {node} is {'present' if Path(node).exists() else 'absent'}" if node else ""
        reason = found["reason"] + present
    finding = {"built": found["built"], "available": bool(usable), "reason": reason, "devices": found["devices"]}
    package = package_of(name, found["directory"]) if "directory" in found else None
    if package is None:
        return finding
    return finding | {"package": package, "reason": f"{reason} (package {package})"}


def _device_text(label: str, device: Finding) -> str:
    if device["reason"]:
        return f"{label} {device['name']}: {device['reason']}"
    arch = device["arch"] or "architecture known once opened"
    return f"{label} {device['name']}, {arch}, {format_bytes(device['memory_bytes'])}"
