"""What each registered worker of a topology asks of a node of Ray's, its command there, and which
resource a cluster lacks. Nothing here needs Ray.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from dflash_moe.config import format_bytes
from dflash_moe.errors import ConfigError, shown
from dflash_moe.protocol.keys import own_key_text
from dflash_moe.topology import Address, Topology, WorkerSpec
from dflash_moe.topology.spec import GPU_BACKENDS

CPU, GPU, MEMORY = "CPU", "GPU", "memory"
# A named resource is a mark of a node and nothing that workers use up. Ray counts in steps of
# 0.0001, and this is what its own documents take for the resource `node:ADDRESS`.
MARK = 0.001
# What a person can change where a resource is missing.
_FIELDS = {CPU: "threads", GPU: "backend", MEMORY: "memory"}

# The amounts of a node or a worker by resource; of MEMORY these are bytes.
Amounts = Mapping[str, float]


@dataclass(frozen=True, slots=True)
class WorkerOrder:
    """One worker that Ray starts. `arguments` are those of `dflash-moe worker`. `key_text` is what
    its key file says where the key travels with the order, and is None where a file is on the node.
    """

    name: str
    bundle: Amounts
    arguments: tuple[str, ...]
    key_text: str | None = field(default=None, repr=False)


def head_of(topology: Topology) -> Address:
    """Returns the address that workers dial where nobody says another one. Raises ConfigError for a
    topology without registered workers, and where the host listens on all its addresses.
    """
    registration = topology.registration
    if registration is None or not topology.registered_workers():
        raise ConfigError(
            f"{topology.source}: workers: none has address: registered, and Ray starts only those; write it, and "
            "registration: {listen: tcp://0.0.0.0:7170}"
        )
    if registration.address.host in ("0.0.0.0", "::"):
        raise ConfigError(
            f"{topology.source}:{registration.line}: registration.listen {registration.listen} is every address of "
            "the host; say with --register tcp://HOST:PORT which one the nodes of the cluster dial"
        )
    return registration.address


def worker_orders(
    topology: Topology, *, model: str, head: Address, key_file: str, group_key: bytes | None, named: Mapping[str, str]
) -> list[WorkerOrder]:
    """Returns the orders of the registered workers. `model` and `key_file` are paths on the nodes.
    With `group_key` each gets a key of its own instead of the file. `named` has by worker the named
    resource that its node must have. Raises ConfigError for what Ray cannot place.
    """
    workers = topology.registered_workers()
    if unknown := set(named) - {worker.name for worker in workers}:
        raise ConfigError(
            f"--resource {shown(min(unknown))}: {topology.source} has no worker of that name with address: registered"
        )
    return [
        WorkerOrder(
            worker.name,
            _bundle(topology, worker, named.get(worker.name)),
            _arguments(worker, model, head, key_file if group_key is None else None),
            None if group_key is None else own_key_text(group_key, worker.name),
        )
        for worker in workers
    ]


def _bundle(topology: Topology, worker: WorkerSpec, named: str | None) -> Amounts:
    where = f"{topology.source}:{worker.line}: worker {worker.name}"
    if worker.threads is None:
        raise ConfigError(f"{where} has no threads; Ray gives it as many CPUs as it has threads: write threads: N")
    if worker.device:
        raise ConfigError(f"{where}: device {worker.device}: Ray gives a worker one card, which is its device 0; leave it out")
    bundle: dict[str, float] = {CPU: worker.threads}
    if worker.backend in GPU_BACKENDS:
        bundle[GPU] = 1
    if worker.memory is not None:
        bundle[MEMORY] = worker.memory
    if named is not None:
        bundle[named] = MARK
    return bundle


def _arguments(worker: WorkerSpec, model: str, head: Address, key_file: str | None) -> tuple[str, ...]:
    arguments = ["--register", str(head), "--name", worker.name, "--model", model, "--threads", str(worker.threads)]
    if worker.memory is not None:
        arguments += ["--memory", str(worker.memory)]
    if key_file is not None:
        arguments += ["--key-file", key_file]
    return tuple(arguments)


def missing_resource(orders: Sequence[WorkerOrder], nodes: Sequence[Amounts], free: Amounts) -> str:
    """Returns a sentence that names the resource for which these workers cannot be placed. `nodes`
    has what each node has, and `free` what nobody uses of all of them.
    """
    return next(_reasons(orders, nodes, free))


def _reasons(orders: Sequence[WorkerOrder], nodes: Sequence[Amounts], free: Amounts) -> Iterator[str]:
    for order in orders:
        for resource, amount in order.bundle.items():
            most = max((node.get(resource, 0.0) for node in nodes), default=0.0)
            if most < amount:
                has = f"none of {len(nodes)} nodes has more than {_amount(resource, most)}"
                yield f"worker {order.name} needs {_amount(resource, amount)}, and {has}; {_remedy(resource)}"
    for order in orders:
        if not any(all(node.get(name, 0.0) >= amount for name, amount in order.bundle.items()) for node in nodes):
            wanted = " and ".join(_amount(name, amount) for name, amount in order.bundle.items())
            yield f"worker {order.name} needs {wanted} on one node, and none of {len(nodes)} has all of it; add such a node"
    wanted_of_all: dict[str, float] = {}
    for order in orders:
        for resource, amount in order.bundle.items():
            wanted_of_all[resource] = wanted_of_all.get(resource, 0.0) + amount
    for resource, amount in wanted_of_all.items():
        if free.get(resource, 0.0) < amount:
            has = f"{_amount(resource, free.get(resource, 0.0))} of all nodes is free"
            yield f"{len(orders)} workers need {_amount(resource, amount)}, and {has}; {_remedy(resource)}"
    # Everything is free in sum, so that a worker's share of a node is what is missing.
    largest = max(orders, key=lambda order: order.bundle[CPU])
    amount = largest.bundle[CPU]
    yield f"worker {largest.name} needs {_amount(CPU, amount)}, and no node has as much left; {_remedy(CPU)}"


def _amount(resource: str, amount: float) -> str:
    return f"{format_bytes(int(amount))} of memory" if resource == MEMORY else f"{amount:g} {resource}"


def _remedy(resource: str) -> str:
    known = _FIELDS.get(resource)
    return f"add nodes with it, or change {f'workers[].{known}' if known else '--resource'}"
