"""A process that generates with vLLM as it is told, line by line. It is run by the interpreter of an
environment with vLLM, and imports nothing of this project.

    python bench/lab/vllm_generate.py OUT_DESCRIPTOR

The first line of stdin is one JSON object of options of `vllm.LLM`. Each further one is an order with
`prompts` (lists of ids), which may have `max_tokens` and `logprobs`, or with `look`: what is seen of
the model. Answers are lines of JSON on the descriptor OUT_DESCRIPTOR, one for the start and one for
each order; vLLM itself speaks on stdout and stderr.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

NEW_TOKENS = 16


def look(model: Any) -> dict[str, Any]:
    """Returns what is seen of a rank's model in the process that has it: the layers of routed
    experts with their calls, their bytes there, the runtime's counters (None at ranks that call
    nobody), the process of each worker, and the most memory that this process had.
    """
    layers = [one for one in model.modules() if "RoutedExperts" in type(one).__name__]
    routes = [getattr(layer.quant_method, "route", None) for layer in layers]
    runtime = next((route.runtime for route in routes if route is not None), None)
    with open("/proc/self/status", encoding="ascii") as file:
        peak = next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmHWM"))
    return {
        "pid": os.getpid(),
        "classes": sorted({type(layer).__name__ for layer in layers}),
        "expert_bytes": sum(one.numel() * one.element_size() for layer in layers for one in layer.parameters()),
        "calls": [0 if route is None else route.count.value for route in routes],
        "totals": None if runtime is None else runtime.stats()["totals"],
        "workers": {} if runtime is None else {one.name: one.pid for one in runtime.worker_processes()},
        "peak_bytes": peak,
    }


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

        llm = LLM(skip_tokenizer_init=True, disable_log_stats=True, **options)
        print(json.dumps({"start_s": time.monotonic() - began}), file=answers)
        for line in sys.stdin:
            order = json.loads(line)
            found = {"ranks": llm.apply_model(look)} if order.get("look") else generate(llm, order)
            print(json.dumps(found), file=answers)


if __name__ == "__main__":
    main()
