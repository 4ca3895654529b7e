"""Tiny models of the families that must pass `verify`, and the list of all families on the experts interface. For tests only.

Product code never looks at a family's name; this table is where a test names what it covers.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from dflash_moe.model.architecture import find_model_class
from dflash_moe.model.checkpoint import SINGLE_NAME
from dflash_moe.model.make import MakeOptions

REQUIRED = (
    "qwen3_moe", "qwen2_moe", "mixtral", "olmoe", "deepseek_v2", "deepseek_v3", "glm4_moe", "gpt_oss", "minimax_m2", "phimoe",
    "ernie4_5_moe",
)  # fmt: skip

_DECORATED = re.compile(r"^@use_experts_implementation", re.MULTILINE)


def tiny_options(arch: str, dtype: str = "bf16") -> MakeOptions:
    """Two layers and eight experts of an architecture; widths that no two roles share, so that a mix-up cannot pass."""
    return MakeOptions(
        arch, num_layers=2, hidden_size=96, num_experts=8, top_k=2, moe_intermediate_size=40, dtype=dtype, seed=1
    )


def families_on_interface() -> list[str]:
    """Folders of transformers whose own modeling file puts experts on the interface."""
    import transformers

    models = Path(transformers.__file__).parent / "models"
    return sorted(
        path.parent.name for path in models.glob("*/modeling_*.py") if _DECORATED.search(path.read_text(encoding="utf-8"))
    )


def write_headers_only(arch: str, directory: Path) -> None:
    """A checkpoint of an architecture in its default, full size whose weights are a hole in a file: names and shapes only.

    Names and layouts are those that transformers saves: its own conversion runs on the meta device.
    """
    import torch
    from transformers import CONFIG_MAPPING
    from transformers.core_model_loading import revert_weight_conversion

    config = CONFIG_MAPPING[arch]()
    model_class = find_model_class(config)
    with torch.device("meta"):
        model = model_class(config)
    config.architectures = [model_class.__name__]
    config.dtype = torch.bfloat16
    config.save_pretrained(directory)
    header: dict[str, Any] = {}
    end = 0
    for name, value in revert_weight_conversion(model, dict(model.state_dict())).items():
        begin, end = end, end + 2 * value.numel()
        header[name] = {"dtype": "BF16", "shape": list(value.shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    with (directory / SINGLE_NAME).open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        stream.truncate(8 + len(text) + end)
