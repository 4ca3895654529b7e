"""Makes one random Qwen3-MoE in every form that the sides of engine_against_peers.py read:
safetensors in bf16, and GGUF in F16 and in Q8_0. A second, real shape is made in Q4_K alone.

Every matrix but the routers holds whole numbers of at most 127 times a power of two, so that bf16
and F16 both hold it exactly, and the 16-bit forms are one model. Routers and norms are exact in
bf16, and float32 in GGUF.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import math
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_moe.model.formats.weight_formats import FORMATS

SEED = 0
# Of the values. Beyond it F16 still has two bits to spare, bf16 none.
LARGEST = 127
# Weights of the shape in Q4_K have this standard deviation. Its random codes stand for whatever
# weights a checkpoint of this size has.
Q4_K_DEVIATION = 0.02
ROPE_THETA = 1e6
MAX_POSITIONS = 32768
NORM_EPSILON = 1e-6

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of a Qwen3-MoE."""

    name: str
    num_layers: int
    hidden_size: int
    num_experts: int
    top_k: int
    moe_intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int

    def attention(self) -> dict[str, tuple[int, int]]:
        """Returns the matrices of one layer's attention by their names in GGUF, each as (outputs,
        inputs).
        """
        heads, kv_heads = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        return {
            "attn_q": (heads, self.hidden_size),
            "attn_k": (kv_heads, self.hidden_size),
            "attn_v": (kv_heads, self.hidden_size),
            "attn_output": (self.hidden_size, heads),
        }

    def expert(self) -> dict[str, tuple[int, int]]:
        """Returns the matrices of one expert likewise."""
        inner, outer = self.moe_intermediate_size, self.hidden_size
        return {"ffn_gate_exps": (inner, outer), "ffn_up_exps": (inner, outer), "ffn_down_exps": (outer, inner)}

    def weight_bytes(self, format_name: str, *, experts: float) -> int:
        """Returns the bytes of weights that a forward pass reads where `experts` of each layer take
        part. Embedding rows and norms are left out: they are less than 0.1 % of it.
        """
        stored = FORMATS[format_name].stored_bytes
        one = sum(stored(*shape) for shape in self.expert().values())
        attention = sum(stored(*shape) for shape in self.attention().values())
        router = 4 * self.num_experts * self.hidden_size
        return round(self.num_layers * (attention + router + experts * one) + stored(self.vocab_size, self.hidden_size))

    def kv_bytes(self, context: int) -> int:
        """Returns the bytes of keys and values in 16 bits that a token at `context` reads."""
        return self.num_layers * 2 * self.num_kv_heads * self.head_dim * 2 * context

    def token_bytes(self, format_name: str, context: int) -> int:
        """Returns the bytes that decoding one token at `context` reads."""
        return self.step_bytes(format_name, context, 1)

    def step_bytes(self, format_name: str, context: int, num_sequences: int) -> int:
        """Returns the bytes that a token of each of `num_sequences` sequences at `context` reads,
        with the experts that rows choose by chance, independently of each other.
        """
        spared = (1 - self.top_k / self.num_experts) ** num_sequences
        weights = self.weight_bytes(format_name, experts=self.num_experts * (1 - spared))
        return weights + num_sequences * self.kv_bytes(context)


# The shape of the campaigns, with the heads and the vocabulary that promise tables name.
PEERS = Shape("peers", 12, 1024, 32, 8, 384, 8, 2, 128, 32_000)
# A quarter of the layers of Qwen3-30B-A3B: 4.6 GB in Q4_K.
REAL = Shape("real", 12, 2048, 128, 8, 768, 32, 4, 128, 151_936)
TINY = Shape("tiny", 2, 256, 8, 2, 256, 4, 2, 64, 512)
SHAPES = {shape.name: shape for shape in (PEERS, REAL, TINY)}


def model_path(folder: Path, shape: Shape, format_name: str, say: Say = lambda _line: None) -> Path:
    """Returns the model of this shape and form, which is made in `folder` when it is not there:
    `bf16` is a directory, and `f16`, `q8_0` and `q4_k` are GGUF files. F16 and Q8_0 are made of the
    bf16 form.
    """
    path = folder / f"qwen3_moe-{shape.name}-{format_name}{'' if format_name == 'bf16' else '.gguf'}"
    if path.exists():
        return path
    folder.mkdir(parents=True, exist_ok=True)
    source = model_path(folder, shape, "bf16", say) if format_name in ("f16", "q8_0") else None
    say(f"making {path.name} (once)")
    # A model appears whole or not at all.
    with tempfile.TemporaryDirectory(prefix=f"{path.name}.", dir=folder) as unfinished:
        made = Path(unfinished) / path.name
        if source is not None:
            from bench.models.gguf_files import write_gguf

            write_gguf(source, made, format_name, host=format_name)
        elif format_name == "bf16":
            write_checkpoint(shape, made)
        else:
            write_random_codes(shape, made)
        shutil.move(made, path)
    return path


def write_checkpoint(shape: Shape, directory: Path, seed: int = SEED) -> None:
    """Writes safetensors in bf16 with a tensor for each matrix of an expert, config.json and the
    tokenizer of one token a byte. Raises DflashError where routing comes out uneven.
    """
    import torch
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    from dflash_moe.model.make import END_OF_TEXT_ID, MakeOptions, centre_routers, check_routing, write_tokenizer

    config = Qwen3MoeConfig(
        num_hidden_layers=shape.num_layers, hidden_size=shape.hidden_size, num_experts=shape.num_experts,
        num_experts_per_tok=shape.top_k, moe_intermediate_size=shape.moe_intermediate_size,
        intermediate_size=shape.moe_intermediate_size, num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads, head_dim=shape.head_dim, vocab_size=shape.vocab_size,
        max_position_embeddings=MAX_POSITIONS, rms_norm_eps=NORM_EPSILON, tie_word_embeddings=False,
        rope_parameters={"rope_type": "default", "rope_theta": ROPE_THETA},
        # llama.cpp knows this architecture with normalised weights only.
        norm_topk_prob=True,
        bos_token_id=END_OF_TEXT_ID, eos_token_id=END_OF_TEXT_ID, pad_token_id=END_OF_TEXT_ID,
    )  # fmt: skip
    model = Qwen3MoeForCausalLM._from_config(config, dtype=torch.bfloat16)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, value in model.named_parameters():
            if value.ndim >= 2:
                deviation = 1.0 if name.endswith("embed_tokens.weight") else value.shape[-1] ** -0.5
                value.copy_(exact_values(value.shape, deviation, generator))
    model.set_experts_implementation("eager")
    model.eval()
    options = MakeOptions(
        "qwen3_moe", shape.num_layers, shape.hidden_size, shape.num_experts, shape.top_k, shape.moe_intermediate_size
    )
    centre_routers(model, options)
    check_routing(model, options)
    model.save_pretrained(directory)
    write_tokenizer(directory)


def exact_values(shape: tuple[int, ...], deviation: float, generator: Any) -> Any:
    """Draws float32 values of about this standard deviation which bf16 and F16 both hold exactly:
    whole numbers up to LARGEST times one power of two.
    """
    import torch

    # The numbers have a deviation of 23 to 45, so that less than 1 % of them are cut off.
    step = 2.0 ** round(math.log2(deviation / 32))
    numbers = torch.randn(shape, generator=generator).mul_(deviation / step).round_().clamp_(-LARGEST, LARGEST)
    return numbers.mul_(step)


def write_random_codes(shape: Shape, path: Path, seed: int = SEED) -> None:
    """Writes a GGUF file with random codes in Q4_K, tensor by tensor, so that memory holds one at a
    time. Scales are drawn so that weights have the deviation Q4_K_DEVIATION; routers have it too.
    """
    import gguf
    import numpy as np

    from bench.models.gguf_files import write_tokenizer
    from bench.models.weight_blocks import random_blocks

    kind = gguf.GGMLQuantizationType.Q4_K
    unit = gguf.quants.dequantize(random_blocks("q4_k", 256, 4096, seed=seed, spread=1.0), kind).std()
    spread = Q4_K_DEVIATION / float(unit)
    writer = gguf.GGUFWriter(str(path), "qwen3moe")
    _write_settings(writer, shape)
    write_tokenizer(writer, shape.vocab_size)
    tensors = list(_gguf_tensors(shape))
    for name, sizes, is_quantised in tensors:
        if is_quantised:
            row_bytes = FORMATS["q4_k"].stored_bytes(1, sizes[-1])
            stored = (*sizes[:-1], row_bytes)
            writer.add_tensor_info(name, stored, np.dtype(np.uint8), math.prod(stored), raw_dtype=kind)
        else:
            writer.add_tensor_info(name, sizes, np.dtype(np.float32), 4 * math.prod(sizes))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for number, (_, sizes, is_quantised) in enumerate(tensors):
        if is_quantised:
            rows = math.prod(sizes[:-1])
            writer.write_tensor_data(random_blocks("q4_k", rows, sizes[-1], seed=seed + number, spread=spread))
        elif len(sizes) == 1:
            writer.write_tensor_data(np.ones(sizes, np.float32))
        else:
            normal = np.random.default_rng(seed + number).standard_normal(sizes, np.float32)
            writer.write_tensor_data(normal * np.float32(Q4_K_DEVIATION))
    writer.close()


def _gguf_tensors(shape: Shape) -> Iterator[tuple[str, tuple[int, ...], bool]]:
    """Yields name, sizes with the inputs last, and whether the tensor is quantised."""
    table = (shape.vocab_size, shape.hidden_size)
    yield "token_embd.weight", table, True
    for layer in range(shape.num_layers):
        prefix = f"blk.{layer}."
        for name in ("attn_norm", "ffn_norm"):
            yield f"{prefix}{name}.weight", (shape.hidden_size,), False
        for name in ("attn_q_norm", "attn_k_norm"):
            yield f"{prefix}{name}.weight", (shape.head_dim,), False
        for name, sizes in shape.attention().items():
            yield f"{prefix}{name}.weight", sizes, True
        yield f"{prefix}ffn_gate_inp.weight", (shape.num_experts, shape.hidden_size), False
        for name, sizes in shape.expert().items():
            yield f"{prefix}{name}.weight", (shape.num_experts, *sizes), True
    yield "output_norm.weight", (shape.hidden_size,), False
    yield "output.weight", table, True


def _write_settings(writer: Any, shape: Shape) -> None:
    writer.add_block_count(shape.num_layers)
    writer.add_context_length(MAX_POSITIONS)
    writer.add_embedding_length(shape.hidden_size)
    writer.add_head_count(shape.num_heads)
    writer.add_head_count_kv(shape.num_kv_heads)
    writer.add_key_length(shape.head_dim)
    writer.add_value_length(shape.head_dim)
    writer.add_layer_norm_rms_eps(NORM_EPSILON)
    writer.add_rope_freq_base(ROPE_THETA)
    writer.add_expert_count(shape.num_experts)
    writer.add_expert_used_count(shape.top_k)
    writer.add_expert_feed_forward_length(shape.moe_intermediate_size)
