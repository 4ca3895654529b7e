"""The lives of workers under vLLM: one that is killed costs no token where another has its experts,
one without a remedy ends the step in our sentence, and no end of vLLM leaves anything of ours.

KILLS and CORE_KILLS say how many of each; a campaign takes 50 and 20.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from pathlib import Path

import pytest

from bench.lab.vllm_process import VllmFailed
from tests.vllm.prompts import TWO_WORKERS, prompts

KILLS = int(os.environ.get("KILLS", "5"))
CORE_KILLS = int(os.environ.get("CORE_KILLS", "1"))
TWO_HOLDERS = TWO_WORKERS + "placement: {replicas: 2}\nfailure: {restart: {deaths: 1000, backoff_ms: [10, 100]}}\n"
NO_REMEDY = TWO_WORKERS + "host: {fallback: none}\nfailure: {restart: off}\n"
# All that is ours has ended so long after vLLM's process did.
LEFT_S = 2.0
# A killed worker is back so long after, also on a busy machine.
BACK_S = 60.0


def is_alive(pid: int) -> bool:
    """Whether a process runs that is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def living(running, killed: set[int]) -> list[int]:
    """Returns the processes of the workers once all have one that runs and was not killed."""
    deadline = time.monotonic() + BACK_S
    while True:
        (rank,) = running.look()
        pids = list(rank["workers"].values())
        if pids and all(map(is_alive, pids)) and not killed & set(pids):
            return pids
        assert time.monotonic() < deadline, rank["workers"]
        time.sleep(0.05)


def generate_for_ever(running, asked):
    """Generates until vLLM ends."""
    while True:
        running.generate(asked)


def test_a_killed_worker_costs_no_token_where_another_has_its_experts(start, made):
    model, asked = made("qwen3_moe", "f32"), prompts(16)
    draw = random.Random(5)
    with start(model, TWO_HOLDERS) as running:
        expected = running.generate(asked, max_tokens=64)
        is_over, answers, killed = threading.Event(), [], set()

        def generate() -> None:
            while not is_over.is_set():
                answers.append(running.generate(asked, max_tokens=64)["tokens"])

        for _kill in range(KILLS):
            pids = living(running, killed)
            is_over.clear()
            thread = threading.Thread(target=generate)
            thread.start()
            time.sleep(draw.uniform(0.0, expected["took_s"]))
            killed.add(victim := draw.choice(pids))
            os.kill(victim, signal.SIGKILL)
            time.sleep(0.5)
            is_over.set()
            thread.join()
        assert answers
        assert all(tokens == expected["tokens"] for tokens in answers)
        assert running.look()[0]["totals"]["failovers"] > 0


@pytest.mark.parametrize("_number", range(CORE_KILLS))
def test_a_killed_engine_leaves_nothing_of_ours(start, made, _number):
    with pytest.raises(VllmFailed), start(made("qwen3_moe", "f32"), TWO_WORKERS) as running:  # noqa: PT012
        (rank,) = running.look()
        pids = list(rank["workers"].values())
        assert all(map(is_alive, pids))
        os.kill(rank["pid"], signal.SIGKILL)
        deadline = time.monotonic() + LEFT_S
        while any(map(is_alive, pids)) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert not any(map(is_alive, pids))
        running.generate(prompts(1))


def test_a_lost_worker_without_a_remedy_ends_the_step_in_our_sentence(start, made):
    asked = prompts(4)
    with start(made("qwen3_moe", "f32"), NO_REMEDY) as running:
        running.generate(asked)
        (rank,) = running.look()
        os.kill(rank["workers"]["w1"], signal.SIGKILL)
        began = time.monotonic()
        with pytest.raises(VllmFailed) as failed:
            generate_for_ever(running, asked)
        assert time.monotonic() - began < 60
    assert "worker w1" in str(failed.value)
    assert "WorkerLost" in str(failed.value)
    deadline = time.monotonic() + LEFT_S
    while any(map(is_alive, rank["workers"].values())) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not any(map(is_alive, rank["workers"].values()))
