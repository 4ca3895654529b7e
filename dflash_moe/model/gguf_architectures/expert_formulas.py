"""What llama.cpp computes with the routed experts of each architecture, by the architecture's name
in GGUF files.

A file says sizes and formats, and the formula is in llama.cpp's code: its graphs call one function
for routed experts, with an activation each. This table has those calls. An architecture stands here
only if the result is that of csrc/compute/experts/ffn_spec.h; weights of the routing are applied
after the experts, and the sum over a token's experts is its output.

llama.cpp's GELU is the tanh form. Its processor code rounds the argument to float16 where that lies
within -10 and 10, and takes the result from a table of float16. Kernels of ours compute in float32,
so that the two differ by up to 2^-10 of a value there.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from dataclasses import dataclass

# llama.cpp has these constants in its code, and no key for them.
OAI_ALPHA = 1.702
OAI_LIMIT = 7.0


@dataclass(frozen=True, slots=True)
class ExpertFormula:
    """The formula of an architecture.

    `activation` is a name of ffn.ACTIVATIONS, or "swiglu_oai" for the gate of gpt-oss. `limits`
    says what a layer's swiglu_clamp_exp does: nothing ("ignored"), it bounds gate and up before the
    activation ("before"), or it bounds the activation's result ("after"), which no kernel of ours
    does. Tensors of biases and of scales (one factor per expert) are used only where the last two
    say so.
    """

    activation: str = "silu"
    limits: str = "ignored"
    has_biases: bool = False
    has_scales: bool = False


_SILU = ExpertFormula()
_SCALED = ExpertFormula(has_scales=True)
_GELU = ExpertFormula("gelu_tanh")
_CLAMPED = ExpertFormula(limits="before")

FORMULAS: dict[str, ExpertFormula] = {
    **dict.fromkeys(
        (
            "afmoe", "arctic", "bailingmoe", "bailingmoe2", "dbrx", "deepseek", "deepseek2", "deepseek2-ocr", "dots1",
            "ernie4_5-moe", "exaone-moe", "glm4moe", "granite", "granite_swa", "granitehybrid", "granitemoe", "grovemoe",
            "hunyuan-moe", "jamba", "kimi-linear", "laguna", "lfm2moe", "llada-moe", "mimo2", "minicpm", "minimax-01",
            "minimax-m2", "mistral4", "olmoe", "phimoe", "qwen2moe", "qwen3vlmoe", "rnd1",
        ),
        _SILU,
    ),
    **dict.fromkeys(
        (
            "cohere2moe", "deepseek32", "dots3note", "glm-dsa", "hy_v3", "llama", "llama-embed", "mellum", "mistral3",
            "qwen35moe", "qwen3moe", "qwen3next", "qwen4exp",
        ),
        _SCALED,
    ),
    **dict.fromkeys(("deepseek4", "glm5-next", "hy_v4", "maple"), _CLAMPED),
    **dict.fromkeys(("grok", "nomic-bert-moe"), _GELU),
    "gemma4": ExpertFormula("gelu_tanh", has_scales=True),
    "gpt-oss": ExpertFormula("swiglu_oai", has_biases=True),
    "minimax-m3": ExpertFormula("swiglu_oai"),
    "nemotron_h": ExpertFormula("relu_squared", has_scales=True),
    "nemotron_h_moe": ExpertFormula("relu_squared", has_scales=True),
    "smallthinker": ExpertFormula("relu"),
    "step35": ExpertFormula(limits="after"),
}  # fmt: skip

# These have routed experts that are really something else.
REFUSED = {
    "bailingmoe3": "it bounds the activation's result, where our kernels bound gate and up before it",
    "dflash": "it is a draft model, which runs beside the model whose experts workers hold",
    "ernie4_5": "llama.cpp's graph of it computes no routed experts; theirs is ernie4_5-moe",
    "kimi-k3": "its activation is SITU, which no kernel of ours computes",
    "llama4": "it multiplies the experts' inputs by the routing weights, not their outputs",
    "paddleocr": "llama.cpp's graph of it computes no routed experts",
    "refact": "llama.cpp's graph of it computes no routed experts",
}
