"""The GGUF architectures with routed experts whose models are not read, each with its reason.

The table of docs/howto/weight_formats.md is this one; a test compares them.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

_NO_CLASS = "transformers has no class of it"
_RECURRENT = "its layers carry recurrent state, and transformers has no table of its GGUF tensors"
_NO_CAUSAL = "it is no causal language model"
_NO_RECORD = "its layout is not described here yet; use the safetensors checkpoint"

REFUSED: dict[str, str] = {
    **dict.fromkeys(
        (
            "arctic", "bailingmoe", "bailingmoe2", "deci", "deepseek", "grok", "grovemoe", "minicpm", "mistral3",
            "smallthinker",
        ),
        _NO_CLASS,
    ),
    **dict.fromkeys(("granitehybrid", "jamba", "kimi-linear", "lfm2moe", "nemotron_h_moe", "qwen3next"), _RECURRENT),
    **dict.fromkeys(("llada-moe", "llama-embed", "nomic-bert-moe", "rnd1"), _NO_CAUSAL),
    **dict.fromkeys(("gemma4", "glm-dsa", "mimo2", "mistral4"), _NO_RECORD),
    "dbrx": "transformers' class of it has its experts outside the experts interface",
    "deepseek2-ocr": "transformers has no causal language model of it, only one that sees images",
    "llama4": "it multiplies the experts' inputs by the routing weights, not their outputs",
    "step35": "transformers' class of it has its experts outside the experts interface",
}  # fmt: skip
