"""Measures vLLM on the processor, or has it complete a prompt. It runs under vLLM's own
interpreter, which need not have dflash_moe: the campaign starts it as a file.

    python vllm_program.py MODEL OUT.json [--sequences N] [--prompt-tokens N] [--new-tokens N]
        [--repeat N]
    python vllm_program.py MODEL OUT.json --complete ID,ID,... [--new-tokens N]

Samples of a prefill are whole calls of `LLM.generate` for one token. Those of decode are the engine
core's own times between the first and the last token, for each token; of several sequences at once,
from when all have their first token to the last token of all. The model is compiled, which is
vLLM's default, and threads are those that VLLM_CPU_OMP_THREADS_BIND names.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

WARM_UPS = 2
# A side that has one sequence keeps the setting that its rows were always measured with.
LEAST_SEQUENCES = 4


def main() -> None:
    """Does what the module text says."""
    given = _arguments()
    from vllm import LLM

    llm = LLM(
        model=str(given.model), dtype="bfloat16", skip_tokenizer_init=True, max_model_len=2048,
        max_num_seqs=max(LEAST_SEQUENCES, given.sequences), kv_cache_memory_bytes=1 << 29, enable_prefix_caching=False,
        disable_log_stats=False,
    )  # fmt: skip
    found: dict[str, Any] = {"versions": {name: metadata.version(name) for name in ("torch", "transformers")}}
    found["versions"]["vllm"] = _vllm_version()
    if given.complete:
        (output,) = _generate(llm, [[int(number) for number in given.complete.split(",")]], given.new_tokens)
        found["token_ids"] = list(output.outputs[0].token_ids)
    elif given.sequences > 1:
        found |= _measure_batch(llm, given)
    else:
        found |= _measure(llm, given)
    given.out.write_text(json.dumps(found))


def _measure(llm: Any, given: argparse.Namespace) -> dict[str, Any]:
    draw = _prompts(llm, given)
    prefill, decode = [], []
    for number in range(WARM_UPS + given.repeat):
        prompts = draw()
        began = time.perf_counter()
        _generate(llm, prompts, 1)
        took = time.perf_counter() - began
        (output,) = _generate(llm, prompts, given.new_tokens + 1)
        if number >= WARM_UPS:
            prefill.append(took)
            decode.append((output.metrics.last_token_ts - output.metrics.first_token_ts) / given.new_tokens)
    return {"prefill_s": prefill, "decode_s": decode}


def _measure_batch(llm: Any, given: argparse.Namespace) -> dict[str, Any]:
    draw = _prompts(llm, given)
    decode, apart = [], []
    for number in range(WARM_UPS + given.repeat):
        times = [output.metrics for output in _generate(llm, draw(), given.new_tokens + 1)]
        first = [one.first_token_ts for one in times]
        if number >= WARM_UPS:
            # The sequence that began last has a token of each step from then on.
            decode.append((max(one.last_token_ts for one in times) - max(first)) / given.new_tokens)
            apart.append(max(first) - min(first))
    return {"decode_s": decode, "first_tokens_apart_s": apart}


def _prompts(llm: Any, given: argparse.Namespace) -> Callable[[], list[list[int]]]:
    """Returns what draws the prompts of a call, which no call before had."""
    vocab_size = llm.llm_engine.model_config.get_vocab_size()
    generator = random.Random(0)
    return lambda: [[generator.randrange(vocab_size) for _ in range(given.prompt_tokens)] for _ in range(given.sequences)]


def _generate(llm: Any, prompts: list[list[int]], new_tokens: int) -> list[Any]:
    from vllm import SamplingParams

    wanted = SamplingParams(temperature=0.0, max_tokens=new_tokens, ignore_eos=True, detokenize=False)
    asked = [{"prompt_token_ids": prompt} for prompt in prompts]
    return list(llm.generate(asked, wanted, use_tqdm=False))


def _vllm_version() -> str:
    import vllm

    return str(vllm.__version__)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--complete", default="", help="token ids of a prompt, separated by commas")
    parser.add_argument("--sequences", type=int, default=1, help="prompts at once")
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--repeat", type=int, default=3)
    return parser.parse_args()


if __name__ == "__main__":
    main()
