"""What `generate` says of its results: a JSON line a choice, the JSON of a run, and one sentence of
speed and bytes.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from dflash_moe.config.values import format_bytes
from dflash_moe.errors import DflashError

if TYPE_CHECKING:
    from dflash_moe.engine.text import Chunk, Completion

# The transport of a worker that is no process of its own.
INSIDE = "loopback"
COUNTS = ("calls", "request_bytes", "reply_bytes", "floor_bytes")
# How the engine names a request; here a prompt has its place, or is the only one.
_REQUEST = re.compile(r"^request \d+( choice \d+)?: ")


def choice_fields(found: Completion) -> dict[str, Any]:
    """Returns a finished choice as a JSON line has it."""
    fields: dict[str, Any] = {
        "prompt": found.prompt, "choice": found.choice, "text": found.text, "token_ids": list(found.token_ids),
        "finish_reason": found.finish_reason,
    }  # fmt: skip
    if found.logprobs is not None:
        fields["logprobs"] = [
            {
                "token_id": one.token_id, "logprob": _finite(one.logprob), "rank": one.rank,
                "best": [[token_id, _finite(logprob)] for token_id, logprob in one.best],
            }
            for one in found.logprobs
        ]  # fmt: skip
    return fields


def error_fields(prompt: int, error: DflashError) -> dict[str, Any]:
    """Returns the JSON line of a prompt that failed."""
    return {"prompt": prompt, "error": unnamed(error)}


def unnamed(error: DflashError) -> str:
    """Returns the text of an error without the engine's name of the request."""
    return _REQUEST.sub("", str(error), count=1)


def report_of_one(found: Completion, chunks: Sequence[Chunk], stats: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the report of one prompt. Times are in seconds: `ttft_s` is from its submission to
    its first token, and `tpot_s` the median of the later ones.
    """
    later = []
    for before, chunk in zip(chunks, chunks[1:], strict=False):
        count = len(chunk.token_ids)
        later += [(chunk.time_s - before.time_s) / count for _ in range(count)]
    return {
        "prompt_tokens": found.prompt_tokens,
        "token_ids": list(found.token_ids),
        "text": found.text,
        "finish_reason": found.finish_reason,
        "ttft_s": found.ttft_s,
        "tpot_s": statistics.median(later) if later else None,
        "tpot_samples_s": later,
        **counts(stats),
    }


def report_of_several(outcomes: Sequence[list[Completion] | DflashError], stats: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the report of several prompts: `outputs` has their choices and errors in order.
    `tpot_s` is the mean of a choice's later tokens; counts are those of all prompts together.
    """
    outputs: list[dict[str, Any]] = []
    for place, outcome in enumerate(outcomes):
        if isinstance(outcome, DflashError):
            outputs.append(error_fields(place, outcome))
            continue
        for found in outcome:
            times = {"prompt_tokens": found.prompt_tokens, "ttft_s": found.ttft_s, "tpot_s": found.tpot_s}
            outputs.append(choice_fields(found) | times)
    return {"outputs": outputs, **counts(stats)}


def counts(stats: Mapping[str, Any]) -> dict[str, int]:
    """Returns calls and bytes of a run."""
    return {name: int(stats["totals"][name]) for name in COUNTS}


def summary(
    found: Sequence[Completion], num_prompts: int, seconds: float, stats: Mapping[str, Any], *, is_verbose: bool = False
) -> str:
    """Returns the sentence that ends a run of `seconds`: tokens, speed and where experts were
    computed.
    """
    num_tokens = sum(len(one.token_ids) for one in found)
    times = [one.ttft_s for one in found if one.ttft_s is not None]
    tokens = f"{num_tokens} token{'s' * (num_tokens != 1)}"
    if num_prompts == 1 and len(found) == 1 and found[0].tpot_s:
        # What a step takes; the prompt's time is said beside it.
        speed = f"{tokens}, {1 / found[0].tpot_s:.1f} tokens/s after the first"
    else:
        of = f" of {num_prompts} prompts" if num_prompts > 1 else ""
        speed = f"{tokens}{of}, {num_tokens / seconds:.1f} tokens/s"
    if times:
        speed += f", time to first token {statistics.median(times):.3f} s{' (median)' if len(times) > 1 else ''}"
    return f"{speed}; {carried(stats, is_verbose=is_verbose)}"


def carried(stats: Mapping[str, Any], *, is_verbose: bool = False) -> str:
    """Returns how many workers computed experts, how they were reached and what was moved. The host
    is none of them, and neither is what stands in for a lost worker there (host:NAME). Where all
    was computed in this process, it says that alone, unless somebody asks for the rest.
    """
    if not is_verbose and all(worker["transport"] == INSIDE for worker in stats["workers"].values()):
        return "all experts computed in this process"
    workers = {name: one["transport"] for name, one in stats["workers"].items() if name.partition(":")[0] != "host"}
    over = f" over {', '.join(sorted(set(workers.values())))}" if workers else ""
    moved, floor = stats["totals"]["request_bytes"] + stats["totals"]["reply_bytes"], stats["totals"]["floor_bytes"]
    ratio = f", {moved / floor:.4f} times the floor" if floor else ""
    plural = "" if len(workers) == 1 else "s"
    return f"{len(workers)} worker{plural}{over}, mode {stats['mode']}; {format_bytes(moved)} moved{ratio}"


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
