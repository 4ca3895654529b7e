"""Workers as actors of Ray's in one placement group: they are placed, started, and ended with their
goodbye. Restarts are Ray's, and who lives is their host's to judge.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from dflash_moe.errors import ConfigError, DflashError, UnsupportedError, WorkerLost, WorkerTimeout
from dflash_moe.integrations.ray.orders import CPU, GPU, MEMORY, WorkerOrder, missing_resource
from dflash_moe.integrations.ray.worker_actor import GOODBYE_S, WorkerActor

CONNECT_S = 5.0
# A cluster that grows by itself has a new node within a minute or not soon.
PENDING_S = 60.0
# An actor's process imports Ray, which takes seconds on a busy node.
ACTOR_S = 120.0


@dataclass(frozen=True, slots=True)
class PlacedWorker:
    """Where a worker was started: the id of Ray's node, its address, and the process there."""

    name: str
    node_id: str
    node_address: str
    pid: int


@contextmanager
def placed_workers(orders: Sequence[WorkerOrder], *, address: str) -> Iterator[list[PlacedWorker]]:
    """Within the block the workers run in the cluster at `address`, as `ray.init` takes it. They
    end with it, and with this process. Nothing of them passes through Ray's object store.

    Errors: UnsupportedError without Ray; ConfigError where there is no such cluster, or where it
    lacks a resource for PENDING_S seconds; WorkerLost, WorkerTimeout for an actor that did not
    start.
    """
    ray = _import_ray()
    _join(ray, address)
    actors: dict[str, Any] = {}
    try:
        group = _reserve(ray, orders)
        for index, order in enumerate(orders):
            actors[order.name] = _start(ray, group, index, order)
        yield [_placed(ray, name, actor) for name, actor in actors.items()]
    finally:
        # The group and what is left of the actors end with this process's job.
        _say_goodbye(ray, list(actors.values()))
        ray.shutdown()


def _import_ray() -> Any:
    try:
        import ray
        import ray.util.scheduling_strategies
    except ModuleNotFoundError as error:
        raise UnsupportedError(
            f"{error.name} is not installed, and `launch ray` needs it here and on each node: pip install 'dflash-moe[ray]'"
        ) from None
    return ray


def _join(ray: Any, address: str) -> None:
    try:
        host, _, port = address.rpartition(":")
        if host and port.isdigit() and "/" not in host:
            # Ray asks for minutes where nobody listens.
            socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_S).close()
        ray.init(address=address, logging_level="WARNING")
    except (RuntimeError, ValueError, OverflowError, OSError) as error:
        raise ConfigError(
            f"--address {address}: no cluster of Ray's could be joined: {_first_line(error)}; start one with "
            "`ray start --head`, with the versions of Ray and Python that are here"
        ) from None


def _reserve(ray: Any, orders: Sequence[WorkerOrder]) -> Any:
    group = ray.util.placement_group([dict(order.bundle) for order in orders], strategy="SPREAD")
    if group.wait(PENDING_S):
        return group
    nodes: list[Mapping[str, float]] = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    missing = missing_resource(orders, nodes, ray.available_resources())
    raise ConfigError(f"Ray could not place the workers in {PENDING_S:g} s: {missing}")


def _start(ray: Any, group: Any, index: int, order: WorkerOrder) -> Any:
    named = {name: amount for name, amount in order.bundle.items() if name not in (CPU, GPU, MEMORY)}
    options = ray.remote(WorkerActor).options(
        num_cpus=order.bundle[CPU],
        num_gpus=order.bundle.get(GPU, 0),
        memory=order.bundle.get(MEMORY, 0),
        resources=named,
        max_restarts=-1,
        # A question that meets an actor which is being started anew is asked again.
        max_task_retries=-1,
        scheduling_strategy=ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(group, index),
    )
    return options.remote(order.name, order.arguments, order.key_text)


def _placed(ray: Any, name: str, actor: Any) -> PlacedWorker:
    try:
        node_id, node_address, pid = ray.get(actor.place.remote(), timeout=ACTOR_S)
    except ray.exceptions.GetTimeoutError:
        raise WorkerTimeout(
            f"worker {name}: its actor did not start in {ACTOR_S:g} s; Ray's logs of its node say why", worker=name
        ) from None
    except ray.exceptions.RayError as error:
        raise _not_started(name, error) from None
    return PlacedWorker(name, node_id, node_address, pid)


def _not_started(name: str, error: Exception) -> DflashError:
    cause = getattr(error, "cause", None) or error
    return WorkerLost(
        f"worker {name}: its actor cannot run on its node: {_first_line(cause)}; is dflash-moe of this version "
        "installed there?",
        worker=name,
    )


def _say_goodbye(ray: Any, actors: Sequence[Any]) -> None:
    """Has all workers leave, so that calls of their host do not wait for them. Those that do not
    answer are ended by Ray, and their host finds them lost.
    """
    if actors:
        ray.wait([actor.stop.remote() for actor in actors], num_returns=len(actors), timeout=2 * GOODBYE_S)


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
