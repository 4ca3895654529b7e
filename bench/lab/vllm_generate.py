"""A process that generates with vLLM as it is told, line by line. It is run by the interpreter of
an environment with vLLM.

    python -m bench.lab.vllm_generate OUT_DESCRIPTOR

The first line of stdin is one JSON object of options of `vllm.LLM`. Each further one is an order
with `prompts` (lists of ids), which may have `max_tokens` and `logprobs`, or with `seen`, the name
of a function of vllm_look.py that each rank calls with its model. Answers are lines of JSON on the
descriptor OUT_DESCRIPTOR, one for the start and one for each order; vLLM itself speaks on stdout
and stderr.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

NEW_TOKENS = 16


def generate(llm: Any, order: dict[str, Any]) -> dict[str, Any]:
    """Returns the tokens of each prompt, decoded greedily, with what was asked for beside them and
    the seconds that all took.
    """
    from vllm import SamplingParams

    params = SamplingParams(
        temperature=0, max_tokens=order.get("max_tokens", NEW_TOKENS), logprobs=order.get("logprobs"), ignore_eos=True,
        detokenize=False,
    )  # fmt: skip
    prompts = [{"prompt_token_ids": ids} for ids in order["prompts"]]
    began = time.monotonic()
    outputs = [one.outputs[0] for one in llm.generate(prompts, params, use_tqdm=False)]
    found: dict[str, Any] = {"took_s": time.monotonic() - began, "tokens": [list(one.token_ids) for one in outputs]}
    if order.get("logprobs"):
        found["logprobs"] = [
            [{str(token): seen.logprob for token, seen in step.items()} for step in one.logprobs] for one in outputs
        ]
    return found


def main() -> None:
    """Does what the module text says."""
    with os.fdopen(int(sys.argv[1]), "w", encoding="utf-8", buffering=1) as answers:
        options = json.loads(sys.stdin.readline())
        began = time.monotonic()
        from vllm import LLM

        from bench.lab import vllm_look

        llm = LLM(skip_tokenizer_init=True, disable_log_stats=True, **options)
        print(json.dumps({"start_s": time.monotonic() - began}), file=answers)
        for line in sys.stdin:
            order = json.loads(line)
            seen = order.get("seen")
            found = {"ranks": llm.apply_model(getattr(vllm_look, seen))} if seen else generate(llm, order)
            print(json.dumps(found), file=answers)


if __name__ == "__main__":
    main()
