"""Keeps the GGUF files that llama.cpp's converter made of the checkpoints of `gguf_sources.py`, and
what the models of these checkpoints hold. Only tests and campaigns use it.

A golden is NAME.gguf.xz, the converter's own file, and NAME.json with the configuration of the
checkpoint and a SHA-256 for each parameter of its model in float32.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import hashlib
import json
import lzma
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dflash_moe.integrations.host_weights import load_weights
from dflash_moe.model.architecture import find_model_class, load_config
from dflash_moe.model.checkpoint import Checkpoint

# Where the checkpoint sees images as well, the parameters of its language model have this prefix.
_LANGUAGE_MODEL = "model.language_model."
# The converter stores the exponential of this parameter, so that its last bit is anyone's.
_LOGARITHM = ".A_log"
_NUM_TOKENS = 48
_LARGEST_FILE = 4 << 20


@dataclass(frozen=True, slots=True)
class Golden:
    """The configuration of a source checkpoint, and the digests of its parameters by name."""

    config: dict[str, Any]
    digests: dict[str, str]

    @classmethod
    def read(cls, folder: Path, name: str) -> Golden:
        """Reads the golden `name` in `folder`."""
        found = json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))
        return cls(found["config"], found["parameters"])

    def write(self, folder: Path, name: str, file: Path) -> None:
        """Writes the golden `name` of the converter's `file` into `folder`."""
        text = json.dumps({"config": self.config, "parameters": self.digests}, indent=1, sort_keys=True)
        (folder / f"{name}.json").write_text(text + "\n", encoding="utf-8")
        (folder / f"{name}.gguf.xz").write_bytes(lzma.compress(file.read_bytes(), preset=9 | lzma.PRESET_EXTREME))


def unpack(folder: Path, name: str, target: Path) -> Path:
    """Writes the converter's file of the golden `name` as `target`, and returns that."""
    packed = (folder / f"{name}.gguf.xz").read_bytes()
    target.write_bytes(lzma.LZMADecompressor().decompress(packed, _LARGEST_FILE))
    return target


def load_eager_model(path: Path) -> Any:
    """Returns the whole model of a checkpoint in float32, with its own eager experts."""
    checkpoint = Checkpoint.open(path)
    model_class = find_model_class(load_config(checkpoint))
    options = {"dtype": torch.float32, "experts_implementation": "eager"}
    model, missing = load_weights(model_class, checkpoint, has_experts=True, **options)
    if missing:
        raise ValueError(f"{path} lacks {missing[0]} and {len(missing) - 1} more parameters")
    return model.eval()


def parameters(model: Any) -> dict[str, Any]:
    """Returns the parameters and saved buffers of the language model by name."""
    found = {name.replace(_LANGUAGE_MODEL, "model."): value for name, value in model.state_dict().items()}
    return {name: value for name, value in found.items() if not name.startswith("model.visual.")}


def digests(model: Any) -> dict[str, str]:
    """Returns a SHA-256 of shape and float32 bytes for each of `parameters`."""
    found = {}
    for name, value in parameters(model).items():
        wide = value.detach().float().contiguous().numpy()
        if name.endswith(_LOGARITHM):
            # The source has multiples of an eighth.
            wide = np.rint(wide * 8) / 8
        found[name] = hashlib.sha256(str(wide.shape).encode() + wide.tobytes()).hexdigest()
    return found


def logits(model: Any) -> Any:
    """Returns the logits for seeded tokens, which are more than any window of the sources."""
    input_ids = torch.randint(0, 256, (1, _NUM_TOKENS), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        return model(input_ids=input_ids, use_cache=False).logits


def logits_excess(ours: Any, theirs: Any, num_layers: int) -> list[str]:
    """Returns what exceeds the bounds of docs/numerics.md for float32 logits, as text."""
    error, spread = (ours - theirs).double(), theirs.double().std()
    largest, rms = float(error.abs().max() / spread), float(error.square().mean().sqrt() / spread)
    bounds = (("max", largest, 1e-5 * max(1, num_layers / 6)), ("rms", rms, 2e-6 * max(1, num_layers / 12)))
    return [f"logits differ by {kind} {found:.2g}, allowed {bound:.2g}" for kind, found, bound in bounds if found > bound]
