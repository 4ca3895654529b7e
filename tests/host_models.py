"""Tiny models for the tests of host operators: made once a session, with values that hide nothing
(norms that are not 1, sinks and correction biases that are not 0, windows shorter than a prompt).

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import functools
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from bench.models.families import tiny_options
from dflash_moe import ExpertRuntime, Topology
from dflash_moe.forward.forward import PackedForward, StepRows, TokenSequence
from dflash_moe.model.make import make_checkpoint

PROMPT_TOKENS = 83
# Where longrope changes from its short factors to its long ones, and scaled queries begin.
ORIGINAL_MAX = 48
# Every sliding window, which is shorter than a prompt.
WINDOW = 21
# What a family's configuration has beside tiny sizes.
_SETTINGS: dict[str, dict[str, Any]] = {
    "mistral4": {
        "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 10000.0, "partial_rotary_factor": 0.5, "factor": 128.0,
            "original_max_position_embeddings": ORIGINAL_MAX, "llama_4_scaling_beta": 0.1, "mscale": 1.0,
            "mscale_all_dim": 1.0, "beta_fast": 32.0, "beta_slow": 1.0,
        },
    },
    "phimoe": {
        "max_position_embeddings": 4096,
        "original_max_position_embeddings": ORIGINAL_MAX,
        "rope_parameters": {
            "rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": ORIGINAL_MAX,
            "short_factor": [1.0 + 0.05 * place for place in range(12)],
            "long_factor": [1.5 + 0.5 * place for place in range(12)],
            "short_mscale": 1.1, "long_mscale": 1.3,
        },
    },
}  # fmt: skip


@functools.cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="host_models")


@functools.cache
def checkpoint(arch: str, dtype: str) -> Path:
    """Returns the folder of a tiny model, which lives as long as the test run."""
    from safetensors.torch import load_file, save_file

    folder = Path(_folder().name) / f"{arch}-{dtype}"
    make_checkpoint(tiny_options(arch, dtype), folder)
    generator = torch.Generator().manual_seed(7)
    for path in folder.glob("*.safetensors"):
        tensors = load_file(path)
        for name, value in tensors.items():
            if value.ndim == 1 or "correction" in name:
                spread = 1.0 if "sinks" in name else 0.1
                value += (spread * torch.randn(value.shape, generator=generator)).to(value.dtype)
        save_file(tensors, path, {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    for part in (config, config.get("text_config", {})):
        if isinstance(part.get("sliding_window"), int):
            part["sliding_window"] = WINDOW
    config.update(_SETTINGS.get(arch, {}))
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def topology(address: str, threads: int = 1) -> Topology:
    """Two workers with five and three of eight experts. The host has `threads` threads; workers in
    its process share them."""
    where = "" if address == "shared" else f", address: {address}"
    count = "" if address == "loopback" else f", threads: {threads}"
    workers = "".join(
        f"  - {{name: w{place}, backend: cpu, experts: {{'*': '{ids}'}}{count}{where}}}\n"
        for place, ids in enumerate(("0-4", "5-7"))
    )
    return Topology.parse(f"version: 1\nhost: {{threads: {threads}}}\nplacement: {{policy: explicit}}\nworkers:\n{workers}")


def start(arch: str, dtype: str, address: str = "loopback", threads: int = 1, **overrides: Any) -> ExpertRuntime:
    """Starts the workers of a tiny model. None is suspected because the machine is busy: the
    stand-in that the host would make for it outlives the test, and would pass for a leak.
    """
    settings = {"kv_memory": "16MiB", "suspect_ms": 60_000.0, **overrides}
    return ExpertRuntime.start(topology(address, threads), model=checkpoint(arch, dtype), **settings)


def prompt(count: int = PROMPT_TOKENS, seed: int = 3) -> list[int]:
    """Returns random token ids."""
    ids: list[int] = torch.randint(0, 256, (count,), generator=torch.Generator().manual_seed(seed)).tolist()
    return ids


def logits_of(
    packed: PackedForward, tokens: Sequence[int], cuts: Sequence[int] = (), max_tokens: int | None = None
) -> torch.Tensor:
    """Returns the logits of all tokens, computed alone in parts that begin at `cuts`."""
    sequence = packed.admit(max_tokens or len(tokens))
    try:
        return torch.cat([forward_part(packed, sequence, part) for part in parts_of(tokens, cuts)])
    finally:
        sequence.release()


def parts_of(tokens: Sequence[int], cuts: Sequence[int]) -> list[Sequence[int]]:
    """Returns `tokens` cut before each index of `cuts`."""
    places = [0, *cuts, len(tokens)]
    return [tokens[begin:end] for begin, end in zip(places, places[1:], strict=False)]


def forward_part(packed: PackedForward, sequence: TokenSequence, part: Sequence[int]) -> torch.Tensor:
    """Returns the logits of the next tokens of a sequence."""
    return packed.forward([StepRows(sequence, part, num_logits=len(part))]).clone()
