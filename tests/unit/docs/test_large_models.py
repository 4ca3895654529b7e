"""The sizes that the documents state of two large models are those that the plan computes, from
files that have the headers of the published ones and holes in the place of weights.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import dataclasses
import math
import os
import re
from pathlib import Path
from typing import Any

import pytest

from dflash_moe.config import Settings
from dflash_moe.forward.fitted import fit_model, look_at_card
from dflash_moe.model.checkpoint import Checkpoint
from dflash_moe.model.sizing import model_sizes
from dflash_moe.placement.fit import Card, FitModel, FitWishes, Machine, fit
from dflash_moe.protocol.devices import DeviceChoice

gguf = pytest.importorskip("gguf", reason="the gguf package is an extra of the tests")

ROOT = Path(__file__).resolve().parents[3]
GIB = 1 << 30
CONTEXT = 8192
Kinds = dict[str, tuple[tuple[int, ...], str]]


def write(path: Path, architecture: str, settings: dict[str, Any], tensors: Kinds) -> Path:
    """A file with these tensors, whose contents are a hole. Its types are gguf's own names."""
    writer = gguf.GGUFWriter(str(path), architecture)
    for key, value in settings.items():
        add = {float: writer.add_float32, str: writer.add_string}.get(type(value), writer.add_uint32)
        add(key if key.startswith("tokenizer.") else f"{architecture}.{key}", value)
    num_bytes = 0
    for name, (shape, kind_name) in tensors.items():
        kind = gguf.GGMLQuantizationType[kind_name]
        block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        size = math.prod(shape) // block * block_bytes
        stored = shape if kind_name == "F32" else gguf.quant_shape_to_byte_shape(shape, kind)
        writer.add_tensor_info(name, stored, _numpy_type(kind_name), size, raw_dtype=kind)
        num_bytes += -(-size // 32) * 32
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    os.truncate(path, -(-path.stat().st_size // 32) * 32 + num_bytes)
    return path


def _numpy_type(kind_name: str) -> Any:
    import numpy as np

    return np.dtype(np.float32 if kind_name == "F32" else np.uint8)


def qwen3_30b(path: Path) -> Path:
    """Qwen3-30B-A3B in Q4_K_M, in which half of the layers have their down and values in Q6_K."""
    layers, hidden, experts, inner, vocabulary = 48, 2048, 128, 768, 151936

    def better(layer: int) -> str:
        eighth = layers // 8
        is_better = layer < eighth or layer >= 7 * eighth or (layer - eighth) % 3 == 2
        return "Q6_K" if is_better else "Q4_K"

    tensors: Kinds = {
        "token_embd.weight": ((vocabulary, hidden), "Q4_K"), "output.weight": ((vocabulary, hidden), "Q6_K"),
        "output_norm.weight": ((hidden,), "F32"),
    }  # fmt: skip
    for layer in range(layers):
        own: Kinds = {
            "attn_norm": ((hidden,), "F32"), "ffn_norm": ((hidden,), "F32"), "attn_q_norm": ((128,), "F32"),
            "attn_k_norm": ((128,), "F32"), "attn_q": ((4096, hidden), "Q4_K"), "attn_k": ((512, hidden), "Q4_K"),
            "attn_v": ((512, hidden), better(layer)), "attn_output": ((hidden, 4096), "Q4_K"),
            "ffn_gate_inp": ((experts, hidden), "F32"), "ffn_gate_exps": ((experts, inner, hidden), "Q4_K"),
            "ffn_up_exps": ((experts, inner, hidden), "Q4_K"), "ffn_down_exps": ((experts, hidden, inner), better(layer)),
        }  # fmt: skip
        tensors |= {f"blk.{layer}.{name}.weight": kind for name, kind in own.items()}
    settings = {
        "block_count": layers, "context_length": 40960, "embedding_length": hidden, "feed_forward_length": 6144,
        "attention.head_count": 32, "attention.head_count_kv": 4, "attention.key_length": 128, "attention.value_length": 128,
        "attention.layer_norm_rms_epsilon": 1e-6, "rope.freq_base": 1e6, "expert_count": experts, "expert_used_count": 8,
        "expert_feed_forward_length": inner,
    }  # fmt: skip
    return write(path, "qwen3moe", settings, tensors)


def gpt_oss_120b(path: Path) -> Path:
    """gpt-oss-120b with experts in MXFP4 and all other matrices in Q8_0."""
    layers, hidden, experts, inner, vocabulary = 36, 2880, 128, 2880, 201088
    tensors: Kinds = {
        "token_embd.weight": ((vocabulary, hidden), "Q8_0"), "output.weight": ((vocabulary, hidden), "Q8_0"),
        "output_norm.weight": ((hidden,), "F32"),
    }  # fmt: skip
    matrices: Kinds = {
        "attn_q": ((4096, hidden), "Q8_0"), "attn_k": ((512, hidden), "Q8_0"), "attn_v": ((512, hidden), "Q8_0"),
        "attn_output": ((hidden, 4096), "Q8_0"), "ffn_gate_inp": ((experts, hidden), "F32"),
        "ffn_gate_exps": ((experts, inner, hidden), "MXFP4"), "ffn_up_exps": ((experts, inner, hidden), "MXFP4"),
        "ffn_down_exps": ((experts, hidden, inner), "MXFP4"),
    }  # fmt: skip
    for layer in range(layers):
        at = f"blk.{layer}"
        tensors |= {f"{at}.{name}.weight": kind for name, kind in matrices.items()}
        tensors |= {f"{at}.{name}.bias": (shape[:-1], "F32") for name, (shape, _) in matrices.items()}
        tensors |= {f"{at}.{name}.weight": ((hidden,), "F32") for name in ("attn_norm", "post_attention_norm")}
        tensors[f"{at}.attn_sinks.weight"] = ((64,), "F32")
    settings = {
        "block_count": layers, "context_length": 131072, "embedding_length": hidden, "feed_forward_length": inner,
        "attention.head_count": 64, "attention.head_count_kv": 8, "attention.key_length": 64, "attention.value_length": 64,
        "attention.layer_norm_rms_epsilon": 1e-5, "attention.sliding_window": 128, "rope.freq_base": 150000.0,
        "rope.scaling.type": "yarn", "rope.scaling.factor": 32.0, "rope.scaling.original_context_length": 4096,
        "expert_count": experts, "expert_used_count": 4, "expert_feed_forward_length": inner,
    }  # fmt: skip
    return write(path, "gpt-oss", settings, tensors)


@dataclasses.dataclass(frozen=True)
class Planned:
    """A model's plan, the bytes of its experts in the file, and those of each layer on a card."""

    model: FitModel
    stored_bytes: int
    card_layers: tuple[int | None, ...]


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> list[Planned]:
    folder = tmp_path_factory.mktemp("large")
    found = []
    for make in (qwen3_30b, gpt_oss_120b):
        sizes = model_sizes(Checkpoint.open(make(folder / f"{make.__name__}.gguf")))
        card, _ = look_at_card(DeviceChoice("sim", 0, "cuda"), "simulated", sizes.layers)
        stored = sum(layer.num_experts * layer.expert_bytes for layer in sizes.layers)
        found.append(Planned(fit_model(sizes, Settings()), stored, card.layer_bytes))
    return found


def rows(document: str) -> dict[str, list[str]]:
    """The cells of every row of the tables by the text of all cells before the numbers."""
    found = {}
    for line in (ROOT / document).read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")] if line.strip().startswith("|") else []
        numbers = [cell for cell in cells if re.fullmatch(r"\d+\.\d", cell)]
        if numbers:
            found[cells[-len(numbers) - 1]] = numbers
    return found


def gib(num_bytes: float) -> str:
    return f"{num_bytes / GIB:.1f}"


def test_the_table_of_large_models_is_the_arithmetic_of_the_plan(planned):
    found = rows("docs/howto/large_models.md")
    assert found == {
        "experts in the file": [gib(one.stored_bytes) for one in planned],
        "experts in RAM, packed for the kernels": [
            gib(sum(layer.memory_bytes for layer in one.model.layers)) for one in planned
        ],
        "experts on a card": [gib(sum(size or 0 for size in one.card_layers)) for one in planned],
        "attention, router, embeddings on the processor, as stored": [gib(one.model.in_memory.dense_bytes) for one in planned],
        "attention, router, embeddings on a card, in 16 bits": [gib(one.model.on_card.dense_bytes) for one in planned],
        "keys and values of 8,192 tokens": [gib(CONTEXT * one.model.in_memory.kv_token_bytes) for one in planned],
    }


def test_what_fits_a_card_of_24_gb_is_what_the_plan_puts_there(planned):
    text = " ".join((ROOT / "docs" / "howto" / "large_models.md").read_text(encoding="utf-8").split())
    said = re.search(
        r"On a card with ([\d.]+) GiB free and (\d+) GiB of RAM all of Qwen3-30B is on the card; of gpt-oss-120b the "
        r"experts of (\d+) of 36 layers are, and ([\d.]+) GiB of experts lie in RAM "
        r"\((\d+) and ([\d.]+) with a context of 32,768 tokens\)",
        text,
    )
    assert said is not None
    numbers = []
    for one, context in ((planned[0], CONTEXT), (planned[1], CONTEXT), (planned[1], 4 * CONTEXT)):
        card = Card("cuda:0", "a card", int(float(said[1]) * GIB), one.card_layers)
        found = fit(one.model, Machine((card,), int(said[2]) * GIB, 16), FitWishes(max_context=context))
        assert found.host is card
        numbers.append((found.layers_on_cards, sum(place.num_bytes for place in found.places if place.card is None)))
    assert numbers[0] == (48, 0)
    assert [(str(layers), f"{num_bytes / GIB:.3g}") for layers, num_bytes in numbers[1:]] == [
        (said[3], said[4]),
        (said[5], said[6]),
    ]


def test_the_first_recipe_of_the_readme_is_what_the_plan_puts_on_a_card_of_8_gb(planned):
    one = planned[0]
    free = re.search(r"card, 8 GB, of which ([\d.]+) GiB are free", (ROOT / "README.md").read_text(encoding="utf-8"))
    assert free is not None
    card = Card("cuda:0", "a card", int(float(free[1]) * GIB), one.card_layers)
    found = fit(one.model, Machine((card,), 32 * GIB, 8), FitWishes(layers_on_cards=7))
    places = {place.name: place.num_bytes for place in found.places}
    shown = rows("README.md")
    taken = one.model.on_card.dense_bytes + found.kv_bytes
    expected = {
        "attention, router, embeddings in 16 bits": gib(one.model.on_card.dense_bytes),
        "KV cache": gib(CONTEXT * one.model.on_card.kv_token_bytes),
        "experts of 7 of the 48 layers": gib(places["cuda0"]),
        "experts of the other 41 layers": gib(places["memory"]),
        "left free": gib(card.free_bytes - taken - places["cuda0"]),
    }
    assert {name: shown[name] for name in expected} == {name: [value] for name, value in expected.items()}
