"""Checks that all sides compute one model, so that nobody compares the times of unlike things.

Each side completes a prompt greedily. llama.cpp then judges every token by its own logits after the
same tokens before it: is it its own best too, and if not, how much less likely is it? Sides round
differently, so that they may part at near ties. A side with another model picks tokens that are
arbitrary to the judge, 1.5 nats below its best; another rotation or routing parts often.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import json
import statistics
import sys
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from bench.peers.programs import PROGRAM_S, free_port, run_program, serving
from bench.peers.sides import Plan, run_vllm, write_topology

# One token a byte in the tokenizers of both forms, because it has no "th", of which GGUF's makes
# one token.
PROMPT = "A layer of experts reads only a few of its matrices for a token, and so speed is a question of memory. Once upon a"
NEW_TOKENS = 32
# The judge names so many of its best tokens. The gap of any other is at least that of the last.
NUM_NAMED = 100
# Over 12 layers sides that compute the same were within 0.004, near ties of a router included. With
# another base of the rotation it was 0.09, and with weights of the routing not normalised 0.15.
MOST_MEAN_GAP = 0.02


@dataclass(frozen=True, slots=True)
class Agreement:
    """What the judge says of the tokens of one side. Gaps are in nats of probability below the
    judge's best, 0 where the token is the best.
    """

    fmt: str
    name: str
    gaps: tuple[float, ...]

    @property
    def agrees(self) -> bool:
        """Whether the side computes the judge's model."""
        return statistics.mean(self.gaps) <= MOST_MEAN_GAP

    def row(self) -> dict[str, Any]:
        """Returns the row of the result."""
        return {
            "name": f"agreement-{self.fmt}-{self.name}",
            "phase": "agreement",
            "format": self.fmt,
            "side": self.name,
            "tokens": len(self.gaps),
            "same_as_judge": sum(gap == 0 for gap in self.gaps),
            "mean_gap_nats": statistics.mean(self.gaps),
            "largest_gap_nats": max(self.gaps),
            "agrees": self.agrees,
        }


def complete_by_ours(plan: Plan, fmt: str, place: str, activations: str) -> list[int]:
    """Returns the tokens of `dflash-moe generate`."""
    prompt, out = plan.scratch / "prompt.txt", plan.scratch / "generate.json"
    prompt.write_text(PROMPT)
    chosen = ["--model", plan.model(fmt, "ours"), "--topology", write_topology(plan, place, activations), "--dtype", "bf16"]
    limits = ["--prompt-file", prompt, "--max-new-tokens", NEW_TOKENS, "--json", out]
    run_program([sys.executable, "-m", "dflash_moe", "generate", *chosen, *limits], plan.cores)
    found = json.loads(out.read_text())
    if found["prompt_tokens"] != len(PROMPT):
        raise SystemExit(f"the prompt has {found['prompt_tokens']} tokens for dflash-moe, and {len(PROMPT)} bytes")
    return list(found["token_ids"])


def complete_by_vllm(plan: Plan, fmt: str) -> list[int]:
    """Returns the tokens of vLLM."""
    wanted = ["--complete", ",".join(map(str, PROMPT.encode())), "--new-tokens", NEW_TOKENS]
    return list(run_vllm(plan, fmt, wanted)[1]["token_ids"])


def judge(plan: Plan, fmt: str, completions: dict[str, Sequence[int]]) -> list[Agreement]:
    """Has llama-server judge the tokens of every side of one format."""
    assert plan.llama_bin is not None
    port = free_port()
    fixed = ["-m", plan.model(fmt, "llama"), "-t", 2, "-ngl", 0, "-np", 1, "-c", 1024, "--port", port, "--no-ui"]
    prompt = list(PROMPT.encode())
    with serving([plan.llama_bin / "llama-server", *fixed], plan.cores, port, lambda: _is_healthy(port)):
        return [
            Agreement(fmt, name, tuple(_gap(port, [*prompt, *tokens[:at]], tokens[at]) for at in range(len(tokens))))
            for name, tokens in completions.items()
        ]


def _gap(port: int, before: list[int], token: int) -> float:
    # The server says no probabilities with an end of text or with half a character. They are those
    # before any sampling, so that it may be made to choose a letter.
    letter = [[ord("a"), 1e4]]
    wanted = {"n_predict": 1, "temperature": 0, "n_probs": NUM_NAMED, "logit_bias": letter, "cache_prompt": True}
    asked = urllib.request.Request(
        f"http://127.0.0.1:{port}/completion",
        json.dumps({"prompt": before, **wanted}).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(asked, timeout=PROGRAM_S) as answer:
        (found,) = json.loads(answer.read())["completion_probabilities"]
    named = {entry["id"]: float(entry["logprob"]) for entry in found["top_logprobs"]}
    best = max(named.values())
    return best - named.get(token, min(named.values()))


def _is_healthy(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False
