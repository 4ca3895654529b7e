"""What an engine and its workers have counted, as the front makes metrics and a picture of it: the
runtime's snapshot (experts/snapshot.py), in the form that travels. No worker is asked, and no step
pays for it.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dflash_moe.engine.llm import LLM

_ENGINE = (
    "steps", "failed_steps", "prompt_tokens", "cached_tokens", "recomputed_tokens", "generated_tokens", "drafted_tokens",
    "accepted_tokens", "plan_s", "forward_s", "sample_s", "commit_s", "deliver_s", "finished", "histograms", "waiting",
    "running", "preemptions", "blocks",
)  # fmt: skip
_AUDIT = ("audited_rows", "mismatches")


def snapshot(llm: LLM) -> dict[str, Any]:
    """Returns it in msgpack's types, all counters since the start: `engine` as `EngineStats` and
    `Engine.stats` have it, and `workers` by name, former ones too. Raises DflashError once the
    runtime was closed.
    """
    found = llm.runtime.snapshot()
    engine = {name: found["engine"][name] for name in _ENGINE}
    # Keys of a message are texts.
    engine["batch_sizes"] = list(found["engine"]["batch_sizes"].items())
    workers = {}
    for row in (*found["workers"], *found["others"]):
        own = workers[row["name"]] = {**row, "prediction_errors": found["prediction_errors"].get(row["name"], [])}
        audited = found["audit"].get(row["name"])
        if audited is not None:
            own["audit"] = {key: audited[key] for key in _AUDIT}
    return {
        "engine": engine, "workers": workers, "mode": found["mode"], "mode_reason": found["mode_reason"],
        "fallback_calls": found["fallback_calls"], "unready": llm.unready_reason(),
    }  # fmt: skip
