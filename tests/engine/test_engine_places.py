"""Where experts are computed, and by how many threads, changes no bit of a request's logits, alone
or in company: in this process, over shared memory, or over sockets.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import functools

import pytest

from dflash_moe.forward.host_model import open_host
from tests.engine_runs import CASES, Alone, Answer, Asked, asked, come_and_go, engine_run
from tests.host_models import checkpoint, start

pytestmark = pytest.mark.transformers
# Where the experts are, and the threads of the host.
PLACES = (("loopback", 2), ("shared", 1), ("unix", 1), ("tcp", 2))
# Every family is at one place in one dtype; the sweep has all.
SOME = [(*CASES[2 * place + place % 2], PLACES[place % len(PLACES)]) for place in range(len(CASES) // 2)]
ALL = [(*case, place) for case in CASES for place in (("shared", 2), ("tcp", 1))]


def requests() -> list[Asked]:
    return [asked(500 + number, max_tokens=6, n=1 + number // 5) for number in range(6)]


@functools.cache
def answers(arch: str, dtype: str) -> dict[tuple[int, int], Answer]:
    """The answers of each request and choice, computed alone in this process by one thread."""
    with start(arch, dtype) as runtime:
        alone = Alone(open_host(checkpoint(arch, dtype), runtime))
        return {
            (place, choice): alone.answer(one, choice) for place, one in enumerate(requests()) for choice in range(one.params.n)
        }


class Elsewhere(Alone):
    """Answers that were computed at another place."""

    def __init__(self, found: dict[tuple[int, int], Answer]) -> None:
        self._places = {one: place for place, one in enumerate(requests())}
        self._known = found

    def answer(self, one: Asked, choice: int = 0) -> Answer:
        return self._known[self._places[one], choice]


def exact_at(arch: str, dtype: str, place: tuple[str, int]) -> None:
    expected = answers(arch, dtype)
    with start(arch, dtype, place[0], threads=place[1]) as runtime:
        host = open_host(checkpoint(arch, dtype), runtime)
        before = runtime.stats()["totals"]["calls"]
        for micro_batches in ("1", "2"):
            script = come_and_go(3, requests()[3:], cancels=0)
            with engine_run(host, script, max_batch_tokens=32, micro_batches=micro_batches) as run:
                run.submit_all(requests()[:3])
                run.assert_exact(Elsewhere(expected))
        host.packed.micro_batches.close()
        calls = runtime.stats()["totals"]["calls"] - before
        assert calls >= run.num_steps
        workers = runtime.stats()["workers"].values()
        assert {worker["transport"] for worker in workers} == {place[0]}
        assert all(worker["calls"] > 0 for worker in workers)


@pytest.mark.parametrize(("arch", "dtype", "place"), SOME, ids=str)
def test_tokens_and_bits_are_those_of_this_process(arch, dtype, place):
    exact_at(arch, dtype, place)


@pytest.mark.long
@pytest.mark.parametrize(("arch", "dtype", "place"), ALL, ids=str)
def test_tokens_and_bits_are_those_of_this_process_everywhere(arch, dtype, place):
    exact_at(arch, dtype, place)
