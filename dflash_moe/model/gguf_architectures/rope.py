"""Reads from a GGUF file how positions are stretched beyond those that its model was trained on.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from typing import Any

import numpy as np

from dflash_moe.model.gguf_architectures.record import GgufFile

# The published mscale of YaRN in DeepSeek's models is ten times what llama.cpp's converter writes.
_LOG_MUL = 0.1
# Llama 3 stretches by these numbers, of which a file has only what they make of each frequency.
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
_LLAMA3_TOLERANCE = 1e-5
_FACTORS = "rope_freqs.weight"
_LONG, _SHORT = "rope_factors_long.weight", "rope_factors_short.weight"


def rope_scaling(file: GgufFile) -> dict[str, Any]:
    """Returns the field rope_scaling of a configuration, or no field. Raises UnsupportedError for a
    kind that is not read.
    """
    if _LONG in file.checkpoint.tensors:
        return {"rope_scaling": _longrope(file)}
    if _FACTORS in file.checkpoint.tensors:
        return {"rope_scaling": _llama3(file)}
    kind = file.get("rope.scaling.type", "none")
    if kind == "none":
        return {}
    if kind not in ("yarn", "linear"):
        raise file.refusal("rope.scaling.type", kind, "read are none, linear and yarn")
    scaling = {"rope_type": kind, "factor": file.value("rope.scaling.factor")}
    if kind == "yarn":
        scaling |= _yarn(file)
    if (original := file.get("rope.scaling.original_context_length")) is not None:
        scaling["original_max_position_embeddings"] = original
    return {"rope_scaling": scaling}


def _yarn(file: GgufFile) -> dict[str, Any]:
    found = {
        "beta_fast": file.get("rope.scaling.yarn_beta_fast", 32.0),
        "beta_slow": file.get("rope.scaling.yarn_beta_slow", 1.0),
    }
    if (factor := file.get("rope.scaling.yarn_attn_factor")) is not None:
        found["attention_factor"] = factor
    if (log_mul := file.get("rope.scaling.yarn_log_multiplier")) is not None:
        found["mscale"] = found["mscale_all_dim"] = round(log_mul / _LOG_MUL, 6)
    if file.architecture == "gpt-oss":
        # The published code of gpt-oss sets this, and the file does not say it.
        found["truncate"] = False
    return found


def _longrope(file: GgufFile) -> dict[str, Any]:
    """Returns the scaling of Phi, whose file has one factor for each frequency, and one for what
    long texts do to scores.
    """
    mscale = file.get("rope.scaling.attn_factor", 1.0)
    short, long = (file.checkpoint.values(name).tolist() for name in (_SHORT, _LONG))
    return {
        "rope_type": "longrope",
        "short_factor": short,
        "long_factor": long,
        "short_mscale": mscale,
        "long_mscale": mscale,
        "attention_factor": mscale,
        "original_max_position_embeddings": file.value("rope.scaling.original_context_length"),
    }


def _llama3(file: GgufFile) -> dict[str, Any]:
    """Returns the scaling of Llama 3 where the file's factors are those that it makes."""
    found = file.checkpoint.values(_FACTORS).astype(np.float64)
    factor = float(found.max())
    turns = float(file.value("rope.freq_base")) ** -(np.arange(len(found)) / len(found))
    lengths = _LLAMA3["original_max_position_embeddings"] * turns / (2 * np.pi)
    low, high = _LLAMA3["low_freq_factor"], _LLAMA3["high_freq_factor"]
    smooth = np.clip((lengths - low) / (high - low), 0.0, 1.0)
    if not np.allclose(found, 1 / ((1 - smooth) / factor + smooth), rtol=_LLAMA3_TOLERANCE):
        raise file.refusal(
            _FACTORS, f"factors up to {factor:g}", "read are those of Llama 3, which stretches from 8,192 positions"
        )
    return {"rope_type": "llama3", "factor": factor, **_LLAMA3}
