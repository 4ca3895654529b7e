"""What a checkpoint's layers are, from the folder where that was derived before, so that a host
which starts again imports neither torch nor transformers for it.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import contextlib
import logging
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dflash_moe.config.cache import CacheSettings
from dflash_moe.errors import DflashError, ProtocolError
from dflash_moe.model.architecture import load_architecture
from dflash_moe.model.checkpoint import Checkpoint
from dflash_moe.model.checkpoint_files import are_settled, checkpoint_path
from dflash_moe.model.ffn import FfnSpec
from dflash_moe.model.formats.weight_formats import FLOATS, FORMATS, split_formats
from dflash_moe.model.spec import LayerSpec, ModelSpec, check_dtype, has_ignored_scales, say_ignored_scales, spec_of
from dflash_moe.store import closed_json
from dflash_moe.store.closed_file import opened_for_derived
from dflash_moe.store.folder import SPECS, CacheFolder
from dflash_moe.store.spec_file import SpecFile, SpecKey, read_spec, write_spec

if TYPE_CHECKING:
    from dflash_moe.model.architecture import Architecture

log = logging.getLogger(__name__)

# The bounds are those of the wire (csrc/wire/limits.h), where it has one.
_LAYER = {
    "index": closed_json.whole(0, (1 << 31) - 1),
    "name": closed_json.matching(r"[!-~]{1,256}"),
    "num_experts": closed_json.whole(1, 65_535),
    "top_k": closed_json.whole(1, 65_535),
    "ffn": lambda value: type(value) is dict,
    "weight_dtype": lambda value: type(value) is str and all(one in FORMATS for one in split_formats(value)),
}
_MODEL = {
    "layers": closed_json.list_of(lambda value: type(value) is dict, 1, 4096),
    "dtype": closed_json.one_of(*FLOATS),
    "fingerprint": closed_json.matching(r"[!-~]{1,128}"),
    "config_name": closed_json.matching(r"\w{1,256}"),
    "has_ignored_scales": lambda value: type(value) is bool,
}
# JSON has no infinity, which here means that there is no limit. It stands as null.
_LIMITS = ("gate_max", "up_limit")
# A spec depends on classes of these alone, whose versions or code its key has.
_KNOWN_CODE = ("transformers", "dflash_moe")


def kept_model_spec(path: str | Path, dtype: str | None = None, *, cache: CacheSettings) -> ModelSpec:
    """As `model_spec`, from the folder of `cache` where it was derived before from the same files
    by the same code, and kept there where it was not. Errors are those of `model_spec`; a folder or
    file that will not do costs a line of the log.
    """
    check_dtype(dtype)
    path = Path(path)
    key = None if cache.is_off else SpecKey.of(path, dtype)
    # Another change while the files are read must show in their states.
    is_settled = key is not None and are_settled(key.files)
    with contextlib.nullcontext() if key is None else opened_for_derived(cache) as folder:
        kept = None if folder is None or key is None else read_spec(folder, key.name)
        if folder is not None and kept is not None and (spec := _used(folder, kept, path)) is not None:
            return spec
        checkpoint = Checkpoint.open(path)
        architecture = load_architecture(checkpoint)
        spec = spec_of(checkpoint, architecture, dtype)
        if folder is not None and key is not None and is_settled and _can_be_kept(checkpoint, architecture):
            _keep(folder, SpecFile(key, spec_fields(spec, has_ignored_scales=has_ignored_scales(checkpoint))), path)
    return spec


def spec_fields(spec: ModelSpec, *, has_ignored_scales: bool) -> dict[str, Any]:
    """Returns all of a spec for JSON, but for what follows from the rest."""
    layers = [
        {
            "index": layer.index,
            "name": layer.name,
            "num_experts": layer.num_experts,
            "top_k": layer.top_k,
            "ffn": {key: None if value == math.inf else value for key, value in layer.ffn.to_wire().items()},
            "weight_dtype": layer.weight_dtype,
        }
        for layer in spec.layers
    ]
    return {
        "layers": layers,
        "dtype": spec.dtype,
        "fingerprint": spec.fingerprint,
        "config_name": spec.config_name,
        "has_ignored_scales": has_ignored_scales,
    }


def spec_of_fields(value: Any, path: str) -> ModelSpec:
    """Returns the spec of `spec_fields` for the checkpoint at `path`. Raises ValueError naming the
    field that is none.
    """
    fields = closed_json.fields(value, _MODEL, "spec")
    layers = tuple(_layer(place, one) for place, one in enumerate(fields["layers"]))
    for what in ("index", "name"):
        if len({getattr(layer, what) for layer in layers}) != len(layers):
            raise ValueError(f"spec: two layers have one {what}")
    return ModelSpec(layers, fields["dtype"], fields["fingerprint"], fields["config_name"], path)


def _layer(place: int, value: Any) -> LayerSpec:
    fields = closed_json.fields(value, _LAYER, f"layer {place}")
    if fields["top_k"] > fields["num_experts"]:
        raise ValueError(f"layer {place}: top_k is {fields['top_k']} of {fields['num_experts']} experts")
    wire = {key: math.inf if one is None and key in _LIMITS else one for key, one in fields["ffn"].items()}
    try:
        ffn = FfnSpec.from_wire(wire)
    except (ProtocolError, OverflowError) as error:  # a whole number in the place of a float may be beyond all
        raise ValueError(f"layer {place}: {error}") from None
    size = ffn.stored_bytes(fields["weight_dtype"])
    return LayerSpec(**{**fields, "ffn": ffn}, expert_bytes=size)


def _used(folder: CacheFolder, kept: SpecFile, path: Path) -> ModelSpec | None:
    """Returns the spec in a file, None after a line in the log where it is none."""
    try:
        spec = spec_of_fields(kept.spec, str(checkpoint_path(path)))
    except ValueError as error:
        log.warning("%s counts as missing, and is written anew: %s", folder.path / SPECS / kept.key.name, str(error))
        return None
    if kept.spec["has_ignored_scales"]:
        say_ignored_scales(path)
    folder.touch(SPECS, kept.key.name)
    return spec


def _can_be_kept(checkpoint: Checkpoint, architecture: Architecture) -> bool:
    """Says whether the key names all that a spec depends on. It does not where a program has
    registered classes of its own at transformers, or config.json leaves to other things than itself
    of which model it is.
    """
    kinds = [type(architecture.config), architecture.model_class, *map(type, architecture.experts.values())]
    if any(kind.__module__.partition(".")[0] not in _KNOWN_CODE for kind in kinds):
        return False
    config = checkpoint.config()
    return checkpoint.metadata is not None or ("model_type" in config and "configuration_files" not in config)


def _keep(folder: CacheFolder, kept: SpecFile, path: Path) -> None:
    """Writes a file, unless the checkpoint has changed meanwhile, or another process writes for
    longer than anybody waits: then the next start does it.
    """
    if not folder.is_writable or SpecKey.of(path, kept.key.asked_dtype) != kept.key:
        return
    try:
        with folder.writing_a_little() as has_lock:
            if has_lock:
                write_spec(folder, kept)
    except (DflashError, OSError) as error:
        log.warning("what was derived of %s is not kept: %s", path, str(error))
