"""What `generate` says at its end: the sentence of speed and bytes, and its JSON.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import json
import math

import pytest

pytest.importorskip("torch")

from dflash_moe.cli.generate.generate_report import (
    choice_fields,
    error_fields,
    report_of_one,
    report_of_several,
    summary,
)
from dflash_moe.engine.sampling.token_logprobs import TokenLogprobs
from dflash_moe.engine.text import Chunk, Completion
from dflash_moe.errors import WorkerLost

TOTALS = {"calls": 12, "request_bytes": 3000, "reply_bytes": 2120, "floor_bytes": 4096, "waits": 0.5}
STATS = {
    "mode": "auto", "totals": TOTALS,
    "workers": {"w0": {"transport": "shared"}, "w1": {"transport": "stream"}, "host": {"transport": "loopback"}},
}  # fmt: skip
ONE = Completion("abc", (1, 2, 3), "length", 0, 0, 7, None, ttft_s=0.25, tpot_s=0.02)


def test_the_sentence_of_one_prompt_has_the_rate_behind_its_first_token():
    assert summary([ONE], 1, 0.29, STATS) == (
        "3 tokens, 50.0 tokens/s after the first, time to first token 0.250 s; 2 workers over shared, stream, mode auto; "
        "5.0 KiB moved, 1.2500 times the floor"
    )


def test_the_sentence_of_several_has_the_rate_of_all():
    second = Completion("d", (4,), "stop", 1, 0, 2, None, ttft_s=0.75)
    said = summary([ONE, second], 2, 2.0, STATS)
    assert said.startswith("4 tokens of 2 prompts, 2.0 tokens/s, time to first token 0.500 s (median); 2 workers")


def test_the_sentence_is_one_of_a_single_token_and_of_experts_that_stay_at_the_host():
    local = {
        "mode": "auto", "totals": dict.fromkeys(TOTALS, 0), "workers": {"host": {"transport": "loopback"}}
    }  # fmt: skip
    one = [Completion("a", (1,), "length", ttft_s=0.5)]
    speed = "1 token, 2.0 tokens/s, time to first token 0.500 s"
    assert summary(one, 1, 0.5, local) == f"{speed}; all experts computed in this process"
    # The wire's figures are for those who ask where nothing left the process.
    assert summary(one, 1, 0.5, local, is_verbose=True) == f"{speed}; 0 workers, mode auto; 0 bytes moved"
    inside = {**local, "totals": TOTALS, "workers": {"memory": {"transport": "loopback"}}}
    assert summary(one, 1, 0.5, inside) == f"{speed}; all experts computed in this process"
    assert "1 worker over loopback, mode auto; 5.0 KiB moved, 1.2500 times" in summary(one, 1, 0.5, inside, is_verbose=True)


def test_the_report_of_one_has_times_of_its_chunks_and_counts_of_the_run():
    chunks = [Chunk("a", (1,), time_s=5.0), Chunk("bc", (2, 3), time_s=5.04)]
    report = report_of_one(ONE, chunks, STATS)
    assert report["tpot_samples_s"] == pytest.approx([0.02, 0.02])
    assert report["tpot_s"] == pytest.approx(0.02)
    assert (report["prompt_tokens"], report["token_ids"], report["text"], report["ttft_s"]) == (
        7,
        [1, 2, 3],
        "abc",
        0.25,
    )
    assert {name: report[name] for name in TOTALS if name != "waits"} == {k: v for k, v in TOTALS.items() if k != "waits"}
    assert report_of_one(ONE, chunks[:1], STATS)["tpot_s"] is None


def test_the_report_of_several_has_their_choices_and_errors_in_order():
    error = WorkerLost("request 2 choice 1: worker w1 was lost", worker="w1")
    report = report_of_several([[ONE], error], STATS)
    assert report["outputs"] == [
        {"prompt": 0, "choice": 0, "text": "abc", "token_ids": [1, 2, 3], "finish_reason": "length", "prompt_tokens": 7,
         "ttft_s": 0.25, "tpot_s": 0.02},
        {"prompt": 1, "error": "worker w1 was lost"},
    ]  # fmt: skip
    assert report["calls"] == 12


def test_an_impossible_token_has_no_number_in_json():
    never = TokenLogprobs(7, -math.inf, 9, ((3, -0.5),))
    fields = choice_fields(Completion("", (7,), "length", logprobs=(never,)))
    assert json.loads(json.dumps(fields, allow_nan=False))["logprobs"] == [
        {"token_id": 7, "logprob": None, "rank": 9, "best": [[3, -0.5]]}
    ]


def test_only_the_engines_own_name_of_a_request_is_left_out():
    assert error_fields(4, WorkerLost("request 12: request 3: x"))["error"] == "request 3: x"
    assert error_fields(4, WorkerLost("the request 12: x"))["error"] == "the request 12: x"
