"""Finds what `model inspect` says of a checkpoint: its layers, experts and bytes, what fits where,
and whether it is supported or why not.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dflash_moe.errors import UnsupportedError
from dflash_moe.model.architecture import find_model_class, load_architecture, load_config
from dflash_moe.model.checkpoint import Checkpoint
from dflash_moe.model.formats.weight_formats import FORMATS, RESIDENT_CHOICES
from dflash_moe.model.gguf_architectures.reading import left_out
from dflash_moe.model.host_size import DenseSize, dense_size
from dflash_moe.model.spec import LayerSpec, ModelSpec, spec_of

GIB = 1 << 30
# Cards and machines in use have these amounts of memory.
WORKER_GIB = (4, 8, 16, 24, 32, 48, 80, 96, 141, 192)


@dataclass(frozen=True, slots=True)
class Inspection:
    """What is known of a checkpoint. Where the model is supported `reason` is None, and else `spec`
    and `dense` are.
    """

    directory: Path
    architectures: tuple[str, ...]
    model_type: str
    checkpoint_bytes: int
    spec: ModelSpec | None
    reason: str | None
    # All weights but the routed experts.
    dense: DenseSize | None = None
    # The files have pages in place of experts (`stub_pages.py`). Sizes are those of the full model.
    is_stub: bool = False
    # A sentence on layers of a GGUF file that are no part of the model.
    left_out: str | None = None

    @property
    def expert_bytes(self) -> int:
        """The bytes of all routed experts in the checkpoint."""
        return sum(layer.num_experts * layer.expert_bytes for layer in self.layers)

    def resident_bytes(self) -> dict[str, int]:
        """Returns the bytes of all routed experts at workers with `weights` auto, int8 and int4."""
        return {
            weights: sum(layer.num_experts * layer.resident_bytes(weights) for layer in self.layers)
            for weights in RESIDENT_CHOICES
        }

    @property
    def host_bytes(self) -> int:
        """The bytes that stay with the host on a processor, which are those of a plan: everything
        but routed experts, quantised as it is stored.
        """
        return self.dense.kept_bytes(self._item_bytes) if self.dense is not None else 0

    @property
    def host_bytes_on_card(self) -> int:
        """The same on a card, where torch has everything in the dtype in which the model runs."""
        return self.dense.torch_bytes(self._item_bytes) if self.dense is not None else 0

    @property
    def _item_bytes(self) -> int:
        return FORMATS[self.spec.dtype].block_bytes if self.spec is not None else 0

    @property
    def layers(self) -> tuple[LayerSpec, ...]:
        """The layers with routed experts, none where the model is not supported."""
        return self.spec.layers if self.spec is not None else ()

    def fits(self) -> dict[int, float]:
        """Returns the fraction of all routed experts that a worker can hold, by its memory in GiB.
        The last entry is the first that holds all.
        """
        found: dict[int, float] = {}
        resident = self.resident_bytes()["auto"]
        for gib in WORKER_GIB if resident else ():
            found[gib] = min(1.0, gib * GIB / resident)
            if found[gib] == 1.0:
                break
        return found

    def layers_within(self, num_bytes: int) -> int:
        """Returns how many layers have all their experts in `num_bytes`, counted from the last one,
        as they are fitted to cards.
        """
        left = num_bytes
        for count, layer in enumerate(reversed(self.layers)):
            left -= layer.num_experts * layer.resident_bytes("auto")
            if left < 0:
                return count
        return len(self.layers)

    def to_json(self) -> dict[str, Any]:
        """Returns everything, for `--json`."""
        layers = [
            {key: value for key, value in asdict(layer).items() if key != "ffn"} | {"ffn": layer.ffn.kernel_spec()}
            for layer in self.layers
        ]
        for layer in layers:
            # JSON has no infinity.
            layer["ffn"] = {key: None if value == float("inf") else value for key, value in layer["ffn"].items()}
        return {
            "directory": str(self.directory),
            "architectures": list(self.architectures),
            "model_type": self.model_type,
            "is_stub": self.is_stub,
            "left_out": self.left_out,
            "supported": self.reason is None,
            "reason": self.reason,
            "dtype": self.spec.dtype if self.spec is not None else None,
            "fingerprint": self.spec.fingerprint if self.spec is not None else None,
            "checkpoint_bytes": self.checkpoint_bytes,
            "expert_bytes": self.expert_bytes,
            "resident_bytes": self.resident_bytes(),
            "host_bytes": self.host_bytes,
            "host_bytes_on_card": self.host_bytes_on_card,
            "worker_gib_to_fraction_of_experts": {str(gib): fraction for gib, fraction in self.fits().items()},
            "layers": layers,
        }


def inspect_model(path: Path) -> Inspection:
    """Looks at a checkpoint without touching its weights. Raises CheckpointError when it is none or
    is damaged.
    """
    checkpoint = Checkpoint.open(path)
    config = checkpoint.config()
    named = config.get("architectures")
    names = tuple(name for name in named if isinstance(name, str)) if isinstance(named, list) else ()
    spec, dense, reason = None, None, None
    try:
        architecture = load_architecture(checkpoint)
        spec = spec_of(checkpoint, architecture)
        dense = dense_size(architecture, checkpoint)
        # A GGUF file names none, but has one.
        names = names or (find_model_class(load_config(checkpoint)).__name__,)
    except UnsupportedError as error:
        reason = str(error)
    return Inspection(
        path,
        names,
        str(config.get("model_type", config.get("general.architecture", ""))),
        sum(info.num_bytes for info in checkpoint.stored.values()),
        spec,
        reason,
        dense,
        checkpoint.stub() is not None,
        left_out(checkpoint) if spec is not None else None,
    )
