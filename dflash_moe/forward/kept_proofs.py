"""What was proven of a checkpoint's model in an earlier start on this machine, so that a further
start need not prove it again: which form each decoder layer took, whether looping over them gives
the model's bits, and whether what stays in torch computes each row by itself.

A proof also catches a processor that computes wrongly. With kept proofs it is asked once for each
machine, version and checkpoint, and no longer at each start; `dflash-moe verify` and `diff` always
ask again. Weights are no part of it: those that are packed are compared at each start.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from blake3 import blake3

from dflash_moe.errors import DflashError
from dflash_moe.model.checkpoint_files import are_settled
from dflash_moe.operators.layers.block_forms import LayerProven
from dflash_moe.store import closed_json
from dflash_moe.store.closed_file import opened_for_derived
from dflash_moe.store.folder import PROOFS
from dflash_moe.store.proof_file import ProofFile, ProofKey, read_proofs, write_proofs

if TYPE_CHECKING:
    from dflash_moe import _core
    from dflash_moe.config import CacheSettings
    from dflash_moe.forward.forward import PackedForward
    from dflash_moe.operators.report import TakeoverReport

log = logging.getLogger(__name__)

# No proof takes more blocks of the KV cache. Of how many there are beyond them none depends, and
# memory that is free differs from start to start.
_MOST_BLOCKS = 256
# What torch, its libraries and the dynamic linker read beside their settings.
_VARIABLES = ("ATEN_", "DNNL_", "GLIBC_", "GOMP_", "KMP_", "LD_", "MKL_", "OMP_", "ONEDNN_", "PYTORCH_", "TORCH_")
# A proof depends on code of these alone, whose versions or digest its key has.
_KNOWN_CODE = ("torch", "transformers", "dflash_moe")
_MAX_TEXT = 4096

_NAME = closed_json.matching(r"[!-~]{1,256}")
_LAYER = {
    "num_candidates": closed_json.whole(0, 64),
    "place": lambda value: value is None or closed_json.whole(0, 63)(value),
    "reason": lambda value: type(value) is str and len(value) <= _MAX_TEXT,
    "excess": lambda value: type(value) is float and 0.0 <= value <= 1.0,
}
_MODEL = {
    "layers": lambda value: type(value) is dict and len(value) <= 4096 and all(map(_NAME, value)),
    "is_loop_proven": lambda value: type(value) is bool,
    "not_independent": lambda value: type(value) is str and len(value) <= _MAX_TEXT,
}


@dataclass(slots=True)
class ModelProven:
    """How the proofs of one model ended: each layer's by its name, whether a loop over host layers
    gives the model's bits, and why rows are not independent, empty where they are.
    """

    layers: dict[str, LayerProven] = field(default_factory=dict)
    is_loop_proven: bool = False
    not_independent: str = ""

    @classmethod
    def of_fields(cls, value: Any) -> ModelProven:
        """Returns what `asdict` made JSON of. Raises ValueError naming what is none."""
        fields = closed_json.fields(value, _MODEL, "proofs")
        layers = {name: _layer(name, one) for name, one in fields["layers"].items()}
        return cls(layers, fields["is_loop_proven"], fields["not_independent"])


def _layer(name: str, value: Any) -> LayerProven:
    found = LayerProven(**closed_json.fields(value, _LAYER, f"layer {name}"))
    if (found.place is None) != bool(found.reason) or (found.place or 0) >= max(1, found.num_candidates):
        raise ValueError(f"layer {name}: place is {found.place} of {found.num_candidates}, reason {found.reason!r}")
    return found


class KeptProofs:
    """The proofs of one checkpoint on disk. It is made before the checkpoint is read, so that a
    change meanwhile shows. One thread calls.
    """

    def __init__(self, path: Path, fingerprint: str, cache: CacheSettings) -> None:
        """`cache` says where. Where panels are off nothing is kept and each start proves."""
        self._path, self._cache = path, cache
        self._key = ProofKey.of(path, fingerprint) if cache.has_panels else None
        self._is_settled = self._key is not None and are_settled(self._key.files)

    def find(self, under: str) -> ModelProven | None:
        """Returns what was proven under the same circumstances (`circumstances`), None where that
        was never so or its file will not do, which costs a line of the log.
        """
        if self._key is None or not under:
            return None
        name = replace(self._key, under=under).name
        with opened_for_derived(self._cache) as folder:
            kept = None if folder is None else read_proofs(folder, name)
            if folder is None or kept is None:
                return None
            try:
                found = ModelProven.of_fields(kept.proofs)
            except ValueError as error:
                log.warning("%s counts as missing, and is written anew: %s", folder.path / PROOFS / name, str(error))
                return None
            folder.touch(PROOFS, name)
            return found

    def keep(self, under: str, proven: ModelProven) -> None:
        """Writes what was proven, unless the checkpoint has changed meanwhile or changed a moment
        ago, or another process writes for longer than anybody waits: then the next start does it.
        """
        key = self._key
        if key is None or not under or not self._is_settled or ProofKey.of(self._path, key.model) != key:
            return
        fields = asdict(proven)
        try:
            ModelProven.of_fields(fields)
        except ValueError as error:  # such as a reason that is longer than anybody would read
            log.info("the proofs of %s are not kept: %s", self._path, str(error))
            return
        try:
            with opened_for_derived(self._cache) as folder:
                if folder is not None and folder.is_writable:
                    with folder.writing_a_little() as has_lock:
                        if has_lock:
                            write_proofs(folder, ProofFile(replace(key, under=under), fields))
        except (DflashError, OSError) as error:
            log.warning("what was proven of %s is not kept: %s", self._path, str(error))


def circumstances(
    packed: PackedForward, pool: _core.HostPool, settings: Sequence[Any], report: TakeoverReport,
    environment: Mapping[str, str] = os.environ,
) -> str:  # fmt: skip
    """Returns the BLAKE3 of all on which proofs depend beside checkpoint, code and machine:
    `settings`, threads and kernels, pages, how torch was built and is set, and what became of each
    module so far. It is empty where that cannot be said, because a program has put classes of its
    own into the model, or another forward into a class.
    """
    modules = [(name, type(module)) for name, module in packed.model.named_modules()]
    code = [one for module in packed.model.modules() for one in (type(module), module.forward)]
    if any(str(one.__module__).partition(".")[0] not in _KNOWN_CODE for one in code):
        return ""
    said = {
        "settings": list(settings),
        "kernels": [pool.isa, pool.threads],
        "pages": [str(packed.dtype), min(packed.blocks.num_free, _MOST_BLOCKS), packed.blocks.block_tokens],
        "torch": [
            torch.__config__.show(), torch.version.git_version or "", torch.get_num_threads(), str(torch.get_default_dtype()),
            torch.get_float32_matmul_precision(), torch.are_deterministic_algorithms_enabled(), torch.backends.mkldnn.enabled,
        ],
        "variables": {name: value for name, value in environment.items() if name.startswith(_VARIABLES)},
        "modules": [[name, f"{kind.__module__}.{kind.__qualname__}"] for name, kind in modules],
        "taken": [[one.module, one.kind, one.operator, one.form, one.reason] for one in report.findings],
    }  # fmt: skip
    return blake3(closed_json.encode(said)).hexdigest()
