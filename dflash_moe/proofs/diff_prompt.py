"""Whether two models can be compared layer by layer, and the tokens on which they are.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dflash_moe.errors import ConfigError, UnsupportedError
from dflash_moe.integrations.tokenizer import encode, load_tokenizer
from dflash_moe.model.architecture import load_config
from dflash_moe.model.checkpoint import Checkpoint
from dflash_moe.model.spec import ModelSpec
from dflash_moe.proofs.one_pass import drawn_tokens

# With more tokens, logits and hidden states of a large model would take gigabytes.
MAX_TOKENS = 512


def check_comparable(a: ModelSpec, b: ModelSpec) -> None:
    """Raises ConfigError naming what differs where two models have other shapes."""
    one, other = (load_config(Checkpoint.open(spec.path)).get_text_config() for spec in (a, b))
    shapes = [
        (name, getattr(one, name, None), getattr(other, name, None))
        for name in ("vocab_size", "hidden_size", "num_hidden_layers")
    ]
    shapes.append(("layers with experts", [layer.index for layer in a.layers], [layer.index for layer in b.layers]))
    for ours, theirs in zip(a.layers, b.layers, strict=False):
        where = f"layer {ours.index}:"
        shapes += [
            (f"{where} experts", ours.num_experts, theirs.num_experts),
            (f"{where} experts a token", ours.top_k, theirs.top_k),
            (f"{where} sizes of an expert", _sizes(ours), _sizes(theirs)),
        ]
    for name, found, expected in shapes:
        if found != expected:
            raise ConfigError(f"diff: not comparable: {name}: A has {found}, B has {expected}")


def _sizes(layer: Any) -> tuple[int, int, int]:
    return layer.ffn.in_size, layer.ffn.intermediate_size, layer.ffn.out_size


def common_tokens(a: Path, b: Path, prompt: str | None, seed: int) -> list[int]:
    """Returns the tokens on which both models run: those of `prompt`, or those that the seed
    draws. Raises ConfigError where the tokenizers differ, and for a prompt that is empty or too
    long; UnsupportedError where it needs a tokenizer that is not there.
    """
    tokenizers = [_tokenizer(path, is_needed=prompt is not None) for path in (a, b)]
    one, other = tokenizers
    if one is not None and other is not None and one.get_vocab() != other.get_vocab():
        raise ConfigError("diff: not comparable: the tokenizers of A and B have other vocabularies")
    if prompt is None:
        return drawn_tokens(a, seed)
    ids, others = encode(one, prompt), encode(other, prompt)
    if ids != others:
        raise ConfigError("diff: not comparable: the tokenizers of A and B make other tokens of --prompt")
    if not 1 <= len(ids) <= MAX_TOKENS:
        raise ConfigError(f"--prompt: it has {len(ids)} tokens; 1..{MAX_TOKENS} can be compared")
    return list(ids)


def _tokenizer(path: Path, *, is_needed: bool) -> Any:
    try:
        return load_tokenizer(path)
    except UnsupportedError:
        if is_needed:
            raise
        return None
