"""Makes tiny models of the families that must pass `verify`, and lists all families on the experts
interface. Only tests use it.

Product code never looks at the name of a family. In this table a test names what it covers.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dflash_moe.errors import UnsupportedError
from dflash_moe.model.architecture import auto_classes
from dflash_moe.model.checkpoint_files import SINGLE_NAME
from dflash_moe.model.make import MakeOptions, build_config

REQUIRED = (
    "qwen3_moe", "qwen2_moe", "mixtral", "olmoe", "deepseek_v2", "deepseek_v3", "glm4_moe", "gpt_oss", "minimax_m2", "phimoe",
    "ernie4_5_moe",
)  # fmt: skip

_DECORATED = re.compile(r"^@use_experts_implementation", re.MULTILINE)


def tiny_options(arch: str, dtype: str = "bf16") -> MakeOptions:
    """Returns options for two layers and eight experts of an architecture. No two roles share a
    width, so that a mix-up cannot pass.
    """
    return MakeOptions(
        arch, num_layers=2, hidden_size=96, num_experts=8, top_k=2, moe_intermediate_size=40, dtype=dtype, seed=1
    )


def families_on_interface() -> list[str]:
    """Returns the folders of transformers whose own modeling file puts experts on the interface."""
    import transformers

    models = Path(transformers.__file__).parent / "models"
    return sorted(
        path.parent.name for path in models.glob("*/modeling_*.py") if _DECORATED.search(path.read_text(encoding="utf-8"))
    )


def _meta_model(arch: str) -> Any:
    import torch
    from transformers import CONFIG_MAPPING

    failures = []
    makers: list[Callable[[], Any]] = [lambda: CONFIG_MAPPING[arch](), lambda: build_config(tiny_options(arch))]
    for make_config in makers:
        try:
            config = make_config()
            candidates = auto_classes(config)
        except Exception as error:  # noqa: BLE001 - collected
            failures.append(error)
            continue
        for model_class in candidates:
            try:
                with torch.device("meta"):
                    return model_class(config)
            except Exception as error:  # noqa: BLE001 - collected
                failures.append(error)
    raise UnsupportedError(f"{arch}: no configuration of it builds: {failures[0] if failures else 'no model class'}")


def write_headers_only(arch: str, directory: Path) -> None:
    """Writes a checkpoint of an architecture in its default, full size into `directory`. Its
    weights are a hole in a file, so that only names and shapes mean anything.

    Names and layouts are those that transformers saves, because its own conversion runs on the meta
    device. A family whose defaults do not build is written in a small size. Raises UnsupportedError
    when that does not build either.
    """
    import torch
    from transformers.core_model_loading import revert_weight_conversion

    model = _meta_model(arch)
    config = model.config
    config.architectures = [type(model).__name__]
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
