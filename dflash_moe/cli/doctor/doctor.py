"""`dflash-moe doctor` says what this machine can do, and why it cannot do the rest.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated, Any

import typer

from dflash_moe.cli import options
from dflash_moe.cli.doctor import probes
from dflash_moe.cli.doctor.probe_audit import audit_line, probe_audit, show_detections
from dflash_moe.cli.doctor.probe_cache import cache_line, probe_cache
from dflash_moe.cli.doctor.probe_host_operators import host_operator_lines, probe_host_operators
from dflash_moe.cli.doctor.probe_pages import pages_line, probe_pages
from dflash_moe.cli.doctor.probe_registration import probe_registration, registration_lines
from dflash_moe.cli.doctor.probe_remedies import probe_libssl, probe_remedies, remedy_lines
from dflash_moe.cli.doctor.probe_settings import probe_settings, settings_lines
from dflash_moe.cli.doctor.probe_sockets import probe_sockets, probe_timeouts, socket_lines, socket_problems
from dflash_moe.config import Settings, format_bytes, on_worker_loss, resolve_settings
from dflash_moe.errors import ConfigError, DflashError
from dflash_moe.holders.threads import shares_pool, thread_plan
from dflash_moe.placement.numerics import are_mixed
from dflash_moe.protocol.paths import TRANSPORTS
from dflash_moe.telemetry.cores import numa_nodes
from dflash_moe.telemetry.machine import cores_reason, physical_cores, usable_cores
from dflash_moe.topology import HOST, MemoryBudget, Topology

# The plan that is shown has as many workers as the demo.
PLANNED_WORKERS = 2
LEAST_MEMORY_BYTES = 1 << 30
LEAST_OPEN_FILES = 256


def doctor(
    topology: Annotated[
        Path | None,
        typer.Option(
            "--topology",
            metavar="FILE",
            help="YAML file of the host and workers whose plan is shown [default: two local CPU workers].",
            show_default=False,
        ),
    ] = None,
    json_out: Annotated[Path | None, options.json_option("The findings")] = None,
    selftest: Annotated[bool, typer.Option("--selftest", help="Also run all kernels against the reference.")] = False,
) -> None:
    """Show what this machine can do and why not: CPU, backends, transports, memory, threads."""
    found = examine(options.load_topology(topology) if topology is not None else None)
    tests: list[Any] = []
    if selftest:
        from dflash_moe.cli.doctor.device_tests import run_device_tests
        from dflash_moe.cli.doctor.selftest import run_self_tests

        tests = run_self_tests() + run_device_tests(found["backends"])
        found["self_tests"] = [dataclasses.asdict(test) | {"passed": test.is_passed} for test in tests]
        for test in tests:
            if not test.is_passed:
                what = f"self-test {test.isa}, {test.numerics}, {test.weight_dtype} weights"
                found["problems"].append(f"{what}: {test.error or f'{test.differing} elements differ'}")
    if json_out != options.STDOUT:
        print_findings(found, has_topology=topology is not None)
    options.write_json(json_out, found)
    failed = [test for test in tests if not test.is_passed]
    if failed:
        raise DflashError(f"{len(failed)} of {len(tests)} self-tests failed: these kernels do not give the reference's bits")


def examine(topology: Topology | None = None) -> dict[str, Any]:
    """Returns the report without self-tests. Among its keys are `backends`, `transports`, `machine`
    and `problems`, which are sentences and none when all is well.

    Threads, sockets and timeouts are those of `topology`, or else of two local workers.
    """
    problems: list[str] = []
    planned = topology or Topology.local(PLANNED_WORKERS, threads=None)
    planned_for = "this topology" if topology is not None else f"{PLANNED_WORKERS} local workers"
    settings = _settings(planned, problems)
    machine: dict[str, Any] = {"cpu": probes.cpu_model()} | probes.probe_versions() | probes.probe_memory()
    machine |= {"usable_cores": usable_cores(), "cores_reason": cores_reason(), "physical_cores": physical_cores()}
    machine |= {"pages": probe_pages(), "cache": probe_cache(settings)}
    machine |= {"threads": _planned_threads(planned, planned_for, settings), "numa_nodes": numa_nodes()}
    machine |= {"sockets": probe_sockets(settings), "timeouts": probe_timeouts(settings)}
    machine |= {"torch_backends": probes.torch_backends()}
    machine |= {"on_worker_loss": on_worker_loss(settings), "libssl": probe_libssl()}
    machine |= {"remedies": probe_remedies(planned, settings)}
    problems += socket_problems(machine["sockets"])
    found: dict[str, Any] = {"backends": probes.probe_backends(settings.cpu_isa), "transports": probes.probe_transports()}
    found |= {"machine": machine, "problems": problems, "numerics": _numerics(planned, settings)}
    found["settings"] = probe_settings(planned, problems)
    found["audit"] = probe_audit(planned, settings)
    found["registration"] = probe_registration(planned)
    found["host_device"] = probes.probe_host_device(planned.host)
    found["host_operators"] = probe_host_operators(planned, settings, found["backends"]["cpu"].get("isa", ""))
    problems += _problems(found)
    problems += _numerics_problems(planned, found)
    return found


def _settings(topology: Topology, problems: list[str]) -> Settings:
    try:
        return resolve_settings(topology.stated_settings)
    except ConfigError as error:
        problems.append(str(error))
        return resolve_settings(topology.stated_settings, environ={})


def _planned_threads(topology: Topology, planned_for: str, settings: Settings) -> dict[str, Any]:
    plan = thread_plan(topology, settings)
    total = plan.host + sum(plan.workers.values())
    cores = usable_cores()
    return {
        "planned_for": planned_for,
        "host": plan.host,
        # Workers at loopback compute with the host's pool.
        "host_pool": [
            "operators",
            "experts",
            "encoding",
            *(w.name for w in topology.local_workers() if shares_pool(topology, w)),
        ],
        "workers": dict(plan.workers),
        "cpus": dict(plan.cpus),
        "total": total,
        "oversubscribed": plan.is_oversubscribed,
        "spin_us": plan.spin_ns // 1000,
        "spin_reason": f"{total} threads on {cores} cores"
        + ("" if settings.spin_us is None or plan.is_oversubscribed else ", as ipc.spin_us asks"),
        "openmp_waits": "passively" if plan.is_oversubscribed else "as torch does by itself",
    }


def _numerics(topology: Topology, settings: Settings) -> dict[str, Any]:
    """Returns the setting, and the class of each holder."""
    topology = topology.with_settings(settings)
    holders = [worker.name for worker in topology.workers]
    if topology.host.experts_memory != MemoryBudget():
        holders.insert(0, HOST)
    return {"policy": settings.numerics, "classes": {holder: topology.numerics_of(holder) for holder in holders}}


def _numerics_problems(topology: Topology, found: dict[str, Any]) -> list[str]:
    problems = []
    policy, classes = found["numerics"]["policy"], found["numerics"]["classes"]
    cpu = found["backends"]["cpu"]
    local = {HOST, *(worker.name for worker in topology.local_workers() if worker.backend == "cpu")}
    for holder, numerics in classes.items():
        if holder in local and cpu["available"] and numerics not in cpu["numerics_classes"]:
            problems.append(f"{holder} asks for numerics class {numerics}, which kernel set {cpu['isa']} does not compute")
    if are_mixed(classes.values()):
        named = ", ".join(f"{holder} {numerics}" for holder, numerics in classes.items())
        allowed = "numerics: close allows it" if policy == "close" else "numerics: exact refuses it; write numerics: close"
        problems.append(f"holders of one layer's experts compute in several numerics classes ({named}): {allowed}")
    return problems


# A device takes memory like that of the workers' replies in one of these ways, and device steps
# then do this.
REGISTRATIONS = {
    "not needed": "tensors of the CPU, no device steps",
    "read-only": "device steps register the workers' replies read-only",
    "writable": "device steps ask started workers for memory that may be mapped writable",
    "none": "no device steps: the device takes no memory of the workers",
    "unknown": "it cannot be used",
}


def _problems(found: dict[str, Any]) -> list[str]:
    """Returns what a user should do something about. A backend that is not built is no problem of
    the machine.
    """
    problems = []
    host = found["host_device"]
    if not host["available"]:
        problems.append(host["reason"])
    elif host["registration"] == "none":
        problems.append(f"host.device {host['device']} has no device steps, only staged calls: {host['reason']}")
    machine = found["machine"]
    if not found["backends"]["cpu"]["available"]:
        problems.append(found["backends"]["cpu"]["reason"])
    for name, transport in found["transports"].items():
        # Nothing lacks a fabric that did not ask for it, and who asks is refused with the reason.
        if name in TRANSPORTS and name != "fabric" and not transport["available"]:
            problems.append(f"transport {name}: {transport['reason']}")
    for name in ("torch", "transformers"):
        if machine["packages"][name] is None:
            problems.append(f"{name} is not installed: workers run, commands that load a model on the host do not")
    problems += probes.torch_problems(machine["packages"]["torch"], machine["torch_backends"])
    threads = machine["threads"]
    if threads["oversubscribed"]:
        problems.append(
            f"{threads['total']} threads (host and {threads['planned_for']}) share {machine['usable_cores']} cores: waiting "
            "threads sleep instead of spinning, which adds microseconds to each call"
        )
    if machine["memory_available_bytes"] < LEAST_MEMORY_BYTES:
        problems.append(f"only {format_bytes(machine['memory_available_bytes'])} of memory are free")
    if machine["open_files_limit"] < LEAST_OPEN_FILES:
        problems.append(f"at most {machine['open_files_limit']} open files: raise it with `ulimit -n 1024`")
    return problems


def print_findings(found: dict[str, Any], *, has_topology: bool = False) -> None:
    """Prints the report as text on stdout. What the audit finds is a table of its own for the
    workers of a topology.
    """
    machine, cpu = found["machine"], found["backends"]["cpu"]
    packages = ", ".join(f"{name} {version or 'missing'}" for name, version in machine["packages"].items())
    lock = machine["memlock_bytes"]
    threads = machine["threads"]
    lines = [
        f"cpu        {machine['cpu']}",
        f"kernels    {cpu.get('isa', '-')} ({cpu.get('isa_reason') or cpu.get('reason')})",
        f"numerics   {cpu.get('isa', '-')} computes {', '.join(cpu.get('numerics_classes', [])) or '-'}; workers ask for "
        f"{', '.join(sorted(set(found['numerics']['classes'].values())))} ({found['numerics']['policy']})",
        f"features   {' '.join(cpu.get('features', [])) or '-'}",
        f"memory     {format_bytes(machine['memory_available_bytes'])} free of {format_bytes(machine['memory_bytes'])}, "
        f"lock limit {'unlimited' if lock is None else format_bytes(lock)}",
        pages_line(machine["pages"]),
        cache_line(machine["cache"]),
        f"cores      {machine['usable_cores']} usable ({machine['cores_reason']}), {machine['physical_cores']} physical",
        f"nodes      {_nodes_text(machine['numa_nodes'])}",
        f"threads    {threads['planned_for']}: host {threads['host']} (one pool: {', '.join(threads['host_pool'])}; "
        "torch has one beside it), "
        + ", ".join(_worker_threads(threads, name) for name in threads["workers"])
        + f"; spin {threads['spin_us']} us ({threads['spin_reason']}), OpenMP waits {threads['openmp_waits']}",
        f"host       {found['host_device']['device']}: {REGISTRATIONS[found['host_device']['registration']]}",
        *host_operator_lines(found["host_operators"]),
        *socket_lines(machine["sockets"], machine["timeouts"]),
        f"losses     {machine['on_worker_loss']}",
        *remedy_lines(machine["remedies"], machine["libssl"]),
        *registration_lines(found["registration"]),
        audit_line(found["audit"]),
        *settings_lines(found["settings"]),
        f"versions   kernel {machine['kernel']}, {machine['libc']}, python {machine['python']}, {packages}",
    ]
    typer.echo("\n".join(lines) + "\n")
    for kind in ("backends", "transports"):
        shown = options.Table(kind[:-1], "available", "reason")
        for name, finding in found[kind].items():
            shown.add_row(name, "yes" if finding["available"] else "no", finding.get("reason", ""))
        options.show(shown)
    if has_topology:
        show_detections(found["audit"])
    if "self_tests" in found:
        shown = options.Table("self-test", "numerics", "weights", "cases", "elements", "differing", "result")
        for test in found["self_tests"]:
            counts = (f"{test[key]:,}" for key in ("cases", "elements", "differing"))
            shown.add_row(test["isa"], test["numerics"], test["weight_dtype"], *counts, "ok" if test["passed"] else "FAILED")
        options.show(shown)
    typer.echo("\n".join(f"note: {problem}" for problem in found["problems"]) or "no problems found")


def _worker_threads(threads: dict[str, Any], name: str) -> str:
    cpus = threads["cpus"].get(name, ())
    pinned = f" on CPU{'s' if len(cpus) > 1 else ''} {' '.join(map(str, cpus))}" if cpus else ""
    return f"{name} {threads['workers'][name]}{pinned}"


def _nodes_text(nodes: dict[int, tuple[int, ...]]) -> str:
    """Says which memory nodes there are, and how many CPUs each has."""
    return ", ".join(f"{node}: {len(cpus)} CPUs" for node, cpus in nodes.items()) or "the kernel tells of no memory nodes"
