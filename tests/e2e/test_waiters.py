"""Those who wait for a submitted call: several threads, impatient ones, and ones that come after
`close()`.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from dflash_moe.errors import ConfigError
from dflash_moe.experts.expert_runtime import ExpertRuntime
from dflash_moe.model.spec import ModelSpec
from dflash_moe.topology import Topology
from tests.expert_cases import make_batch, make_checkpoint, tiny_spec

TOPOLOGY = """
version: 1
host: {device: "sim:0", simulate: cuda}
workers:
  - {name: w0, backend: cpu, threads: 1}
"""
ROUNDS = 60
WAITERS = 4


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> ModelSpec:
    return tiny_spec(make_checkpoint(tmp_path_factory.mktemp("tiny")))


@pytest.fixture(scope="module", params=["cpu", "sim"])
def runtime(spec: ModelSpec, request: pytest.FixtureRequest) -> Iterator[ExpertRuntime]:
    topology = Topology.local(num_workers=2) if request.param == "cpu" else Topology.parse(TOPOLOGY)
    # A stand-in for a worker that is suspected on a busy machine would pass for a leak.
    with ExpertRuntime.start(topology, model=spec, suspect_ms=60_000.0) as started:
        yield started


def arrays(num_tokens: int, seed: int = 0) -> tuple[Any, ...]:
    return make_batch(num_tokens, seed=seed)


def test_every_one_of_several_waiters_gets_the_result(runtime: ExpertRuntime) -> None:
    expected = runtime.experts(0, *arrays(20))
    results: list[Any] = []
    failures: list[BaseException] = []

    def wait(call: Any, start: threading.Barrier) -> None:
        start.wait(60)
        try:
            results.append(call.result(timeout=60))
        except Exception as error:  # noqa: BLE001 - any of them fails the test
            failures.append(error)

    for _ in range(ROUNDS):
        call, start = runtime.submit(0, *arrays(20)), threading.Barrier(WAITERS)
        threads = [threading.Thread(target=wait, args=(call, start)) for _ in range(WAITERS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    assert not failures
    assert len(results) == ROUNDS * WAITERS
    assert all(np.array_equal(result, expected) for result in results)


def test_a_call_can_be_awaited_more_than_once(runtime: ExpertRuntime) -> None:
    async def gather() -> list[Any]:
        call = runtime.submit(0, *arrays(20))
        return list(await asyncio.gather(*(call_result(call) for _ in range(WAITERS))))

    async def call_result(call: Any) -> Any:
        return await call

    expected = runtime.experts(0, *arrays(20))
    assert all(np.array_equal(result, expected) for result in asyncio.run(gather()))


@pytest.mark.parametrize("timeout", [float("nan"), -1, "1", "soon", b"1", [], {}])
def test_a_timeout_that_is_no_number_of_seconds_is_a_config_error(runtime: ExpertRuntime, timeout: Any) -> None:
    call = runtime.submit(0, *arrays(2))
    with pytest.raises(ConfigError, match="timeout: found"):
        call.result(timeout=timeout)
    call.result()


@pytest.mark.parametrize("layer", [[0], {}, {0}, None, 99, "layers.7.experts"])
def test_a_layer_that_is_none_is_a_config_error(runtime: ExpertRuntime, layer: Any) -> None:
    for ask in (runtime.experts, runtime.submit):
        with pytest.raises(ConfigError, match="layer"):
            ask(layer, *arrays(2))
    with pytest.raises(ConfigError, match="layer"):
        runtime.layer_index(layer)


def test_a_closed_runtime_refuses_calls_without_tokens_too(spec: ModelSpec) -> None:
    nothing = tuple(array[:0] for array in arrays(2))
    with ExpertRuntime.start(Topology.local(num_workers=1), model=spec) as runtime:
        assert runtime.experts(0, *nothing).shape[0] == 0
        assert runtime.submit(0, *nothing).result().shape[0] == 0
    for ask in (runtime.experts, runtime.submit):
        with pytest.raises(ConfigError, match="closed"):
            ask(0, *nothing)
