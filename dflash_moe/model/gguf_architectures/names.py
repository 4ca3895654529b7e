"""The words with which llama.cpp names tensors, and the modules of transformers in whose place they
stand.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import re
from collections.abc import Mapping

# Most decoders have these names. A word stands for a module, and a word with its ending for a
# parameter that is no module's `weight` or `bias`.
_DECODER = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
}
_OUTER = (
    (r"^token_embd\.", "model.embed_tokens."),
    (r"^output_norm\.", "model.norm."),
    (r"^output\.", "lm_head."),
    (r"^blk\.", "model.layers."),
)
_ENDINGS = (".weight", ".bias")


def decoder_names(
    own: Mapping[str, str] | None = None, *, experts: str = "mlp.experts", shared: str = ""
) -> tuple[tuple[str, str], ...]:
    """Returns pairs of pattern and replacement, which are applied one after another.

    `own` are the words of an architecture beside those of most, or instead of them; an empty one
    stands for a tensor that is converted. `experts` is the module of routed experts, and `shared`
    that of the shared ones, which are a gated MLP.
    """
    words = _DECODER | ({f"ffn_{part}_shexp": f"{shared}.{part}_proj" for part in ("gate", "up", "down")} if shared else {})
    words |= {"ffn_gate_up_exps.weight": f"{experts}.gate_up_proj", "ffn_down_exps.weight": f"{experts}.down_proj"}
    words |= own or {}
    return (*_OUTER, *(_pair(word, module) for word, module in words.items() if module))


def _pair(word: str, module: str) -> tuple[str, str]:
    if word.endswith(_ENDINGS):
        return rf"\.{re.escape(word)}$", f".{module}"
    return rf"\.{word}\.", f".{module}."
