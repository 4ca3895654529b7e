"""A checkpoint directory as a worker sees it: checked safetensors headers, mapped files, one expert's matrices, a fingerprint.

Needs neither torch nor transformers. Opening reads headers only; weights are touched when an expert is loaded.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dflash_moe.errors import CheckpointError, UnsupportedError
from dflash_moe.model.ffn import FfnSpec, TensorPattern
from dflash_moe.model.safetensors_header import MAX_HEADER_BYTES, read_header
from dflash_moe.model.stored_tensor import TensorInfo

if TYPE_CHECKING:
    from dflash_moe import _core

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
DTYPES = {"F32": "f32", "F16": "f16", "BF16": "bf16"}  # formats experts may be stored in
MAX_CONFIG_BYTES = 16 << 20

# Content samples of the fingerprint: enough that a fine-tuned or re-quantised copy differs, little enough to read in a second.
SAMPLE_BYTES = 32
MAX_SAMPLED_TENSORS = 4096

# Settings of config.json that do not change what the weights mean.
_VOLATILE_SETTINGS = {"transformers_version", "use_cache", "output_router_logits", "output_attentions", "output_hidden_states"}


@dataclass(slots=True)
class Checkpoint:
    """Files and tensors of one directory. Files are mapped on first use and stay mapped as long as this lives."""

    directory: Path
    files: tuple[Path, ...]
    tensors: dict[str, TensorInfo]
    _mapped: dict[int, _core.MappedFile] = field(default_factory=dict)
    _fingerprint: str = ""

    @classmethod
    def open(cls, directory: str | Path) -> Checkpoint:
        """Reads and checks all headers. CheckpointError naming file and tensor."""
        directory = Path(directory)
        if not directory.is_dir():
            raise CheckpointError(f"checkpoint {directory}: no such directory; pass the directory that holds config.json")
        files, listed = _list_files(directory)
        tensors: dict[str, TensorInfo] = {}
        for index, path in enumerate(files):
            for name, info in read_header(path, index).items():
                if name in tensors:
                    raise CheckpointError(f"{path}: tensor {name!r} is also in {files[tensors[name].file].name}; one must go")
                tensors[name] = info
        for name, file_name in listed.items():
            if name not in tensors or files[tensors[name].file].name != file_name:
                raise CheckpointError(f"{directory / INDEX_NAME}: tensor {name!r} should be in {file_name}, but is not there")
        return cls(directory, files, tensors)

    def mapped_file(self, index: int) -> _core.MappedFile:
        """The mapping of `files[index]`."""
        if index not in self._mapped:
            from dflash_moe import _core

            self._mapped[index] = _core.MappedFile(str(self.files[index]))
        return self._mapped[index]

    def drop_pages(self) -> None:
        """Lets the resident pages of all mapped files go; a later read brings them back from the page cache."""
        for file in self._mapped.values():
            file.drop_pages()

    def config(self) -> dict[str, Any]:
        """config.json. CheckpointError when it is missing or not a JSON map."""
        return read_json(self.directory / "config.json", MAX_CONFIG_BYTES)

    def fingerprint(self) -> str:
        """Hex digest of the tensors' names, dtypes, shapes, samples of their contents, and the configuration. Computed once."""
        if not self._fingerprint:
            self._fingerprint = self._compute_fingerprint()
        return self._fingerprint

    def _compute_fingerprint(self) -> str:
        names = sorted(self.tensors)
        config = {key: value for key, value in self.config().items() if key not in _VOLATILE_SETTINGS and key[:1] != "_"}
        digest = hashlib.sha256(json.dumps(config, sort_keys=True, separators=(",", ":")).encode())
        for name in names:
            info = self.tensors[name]
            digest.update(f"\n{name} {info.dtype} {info.shape}".encode())
        step = max(1, -(-len(names) // MAX_SAMPLED_TENSORS))
        descriptors = [os.open(path, os.O_RDONLY | os.O_CLOEXEC) for path in self.files]
        try:
            for name in names[::step]:
                info = self.tensors[name]
                for third in (1, 2):
                    start = max(0, info.num_bytes * third // 3 - SAMPLE_BYTES)
                    count = min(SAMPLE_BYTES, info.num_bytes - start)
                    digest.update(os.pread(descriptors[info.file], count, info.offset + start))
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        return digest.hexdigest()


def shard_fingerprint(model_fingerprint: str, layer_name: str, experts: Sequence[int]) -> int:
    """64 bits that name the weights of these experts (ascending ids) of this layer."""
    text = f"{model_fingerprint} {layer_name} {','.join(map(str, experts))}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")


def expert_sources(checkpoint: Checkpoint, ffn: FfnSpec, expert_id: int) -> dict[str, Any]:
    """Arguments of `_core.Worker.load_expert` that point into the mapped files.

    CheckpointError naming tensor, found and expected shape; UnsupportedError naming a format no kernel reads.
    """
    inner = (ffn.intermediate_size, ffn.in_size)
    outer = (ffn.out_size, ffn.intermediate_size)
    return {
        "gate": _matrix(checkpoint, ffn.gate_tensor, expert_id, *inner),
        "up": _matrix(checkpoint, ffn.up_tensor, expert_id, *inner),
        "down": _matrix(checkpoint, ffn.down_tensor, expert_id, *outer),
        "gate_bias": _vector(checkpoint, ffn.gate_bias_tensor, expert_id, ffn.intermediate_size),
        "up_bias": _vector(checkpoint, ffn.up_bias_tensor, expert_id, ffn.intermediate_size),
        "down_bias": _vector(checkpoint, ffn.down_bias_tensor, expert_id, ffn.out_size),
    }


def check_expert(checkpoint: Checkpoint, ffn: FfnSpec, expert_id: int) -> str:
    """The dtype that holds this expert's matrices exactly, after the checks of `expert_sources`; maps nothing."""
    inner, outer = (ffn.intermediate_size, ffn.in_size), (ffn.out_size, ffn.intermediate_size)
    dtypes: set[str] = set()
    for pattern, (outputs, inputs) in ((ffn.gate_tensor, inner), (ffn.up_tensor, inner), (ffn.down_tensor, outer)):
        if pattern is not None:
            dtypes.add(_locate(checkpoint, pattern, expert_id, _matrix_shape(pattern, outputs, inputs))[2])
    for pattern, outputs in (
        (ffn.gate_bias_tensor, ffn.intermediate_size),
        (ffn.up_bias_tensor, ffn.intermediate_size),
        (ffn.down_bias_tensor, ffn.out_size),
    ):
        if pattern is not None:
            _locate(checkpoint, pattern, expert_id, (_selection(pattern.part, outputs)[0],))
    return dtypes.pop() if len(dtypes) == 1 else "f32"


def stored_dtype(checkpoint: Checkpoint, pattern: TensorPattern, expert_id: int = 0) -> str:
    """`f32`, `f16` or `bf16`: the format of the tensor that holds this expert's values. Errors as `expert_sources`."""
    return _dtype_of(checkpoint, *_find(checkpoint, pattern, expert_id))


def read_json(path: Path, max_bytes: int) -> dict[str, Any]:
    """A JSON map from a file. CheckpointError naming the file."""
    try:
        with path.open("rb") as stream:
            text = stream.read(max_bytes + 1)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from None
    if len(text) > max_bytes:
        raise CheckpointError(f"{path}: over {max_bytes} bytes, which no such file needs; it is not what its name says")
    try:
        value = json.loads(text.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not JSON ({error})") from None
    if type(value) is not dict:
        raise CheckpointError(f"{path}: found a {type(value).__name__}, expected a map")
    return value


def _list_files(directory: Path) -> tuple[tuple[Path, ...], dict[str, str]]:
    """The weight files, and which file the index says each tensor is in (empty without an index)."""
    if (directory / INDEX_NAME).is_file():
        listed = read_json(directory / INDEX_NAME, MAX_HEADER_BYTES).get("weight_map")
        if type(listed) is not dict or not listed:
            raise CheckpointError(f"{directory / INDEX_NAME}: weight_map is missing or empty")
        for name, file_name in listed.items():
            if type(file_name) is not str or file_name != os.path.basename(file_name) or file_name in ("", ".", ".."):
                raise CheckpointError(f"{directory / INDEX_NAME}: tensor {name!r} is in {file_name!r}, not a file name")
        names = sorted(set(listed.values()))
        missing = [name for name in names if not (directory / name).is_file()]
        if missing:
            raise CheckpointError(
                f"checkpoint {directory}: {len(missing)} of {len(names)} weight files are missing, first {missing[0]}; "
                "download or copy them again"
            )
        return tuple(directory / name for name in names), listed
    if (directory / SINGLE_NAME).is_file():
        return (directory / SINGLE_NAME,), {}
    raise CheckpointError(f"checkpoint {directory}: {_what_is_there(directory)}")


def _what_is_there(directory: Path) -> str:
    wanted = f"neither {SINGLE_NAME} nor {INDEX_NAME} found"
    if any(directory.glob("*.gguf")):
        return f"{wanted}, only GGUF files, which this version does not read; use the safetensors checkpoint"
    if any(directory.glob("*.safetensors")):
        return f"{wanted}; there are other safetensors files, but without the index it is not known what belongs together"
    if any(directory.glob("pytorch_model*.bin")) or any(directory.glob("*.pt")) or any(directory.glob("*.pth")):
        return f"{wanted}, only pickled weights, which are never read; save the model again with safe_serialization"
    return f"{wanted}; pass the directory of a transformers checkpoint"


def _find(checkpoint: Checkpoint, pattern: TensorPattern, expert_id: int) -> tuple[str, TensorInfo]:
    name = pattern.tensor_name(expert_id)
    info = checkpoint.tensors.get(name)
    if info is None:
        raise CheckpointError(f"checkpoint {checkpoint.directory}: tensor {name!r} is missing (expert {expert_id})")
    return name, info


def _dtype_of(checkpoint: Checkpoint, name: str, info: TensorInfo) -> str:
    dtype = DTYPES.get(info.dtype)
    if dtype is None:
        where = checkpoint.files[info.file]
        raise UnsupportedError(f"{where}: tensor {name!r} has format {info.dtype}; supported: {', '.join(DTYPES)}")
    return dtype


def _locate(checkpoint: Checkpoint, pattern: TensorPattern, expert_id: int, shape: tuple[int, ...]) -> tuple[int, int, str]:
    """(file index, byte offset of this expert's first element, dtype) of a tensor that must have `shape`, experts apart."""
    name, info = _find(checkpoint, pattern, expert_id)
    dtype = _dtype_of(checkpoint, name, info)
    where = checkpoint.files[info.file]
    if (info.shape[1:] if pattern.is_packed else info.shape) != shape or len(info.shape) != len(shape) + pattern.is_packed:
        expected = [*(["experts"] if pattern.is_packed else []), *shape]
        raise CheckpointError(
            f"{where}: tensor {name!r} has shape {list(info.shape)}, expected {expected}; "
            "the checkpoint is not of the model that the host describes"
        )
    if not pattern.is_packed:
        return info.file, info.offset, dtype
    if not 0 <= expert_id < info.shape[0]:
        raise CheckpointError(f"{where}: tensor {name!r} has {info.shape[0]} experts, asked for {expert_id}")
    return info.file, info.offset + info.num_bytes // info.shape[0] * expert_id, dtype


def _selection(part: str, outputs: int) -> tuple[int, int, int]:
    """(outputs in the tensor, first one of the part, step)."""
    if part == "all":
        return outputs, 0, 1
    first, step = {"first_half": (0, 1), "second_half": (outputs, 1), "even": (0, 2), "odd": (1, 2)}[part]
    return 2 * outputs, first, step


_ITEM_BYTES = {"f32": 4, "f16": 2, "bf16": 2}


def _matrix(checkpoint: Checkpoint, pattern: TensorPattern | None, expert_id: int, outputs: int, inputs: int) -> Any:
    if pattern is None:
        return None
    file, offset, dtype = _locate(checkpoint, pattern, expert_id, _matrix_shape(pattern, outputs, inputs))
    stored, first, step = _selection(pattern.part, outputs)
    output_stride, input_stride = (1, stored) if pattern.is_transposed else (inputs, 1)
    offset += first * output_stride * _ITEM_BYTES[dtype]
    return checkpoint.mapped_file(file), offset, dtype, outputs, inputs, output_stride * step, input_stride


def _matrix_shape(pattern: TensorPattern, outputs: int, inputs: int) -> tuple[int, int]:
    stored = _selection(pattern.part, outputs)[0]
    return (inputs, stored) if pattern.is_transposed else (stored, inputs)


def _vector(checkpoint: Checkpoint, pattern: TensorPattern | None, expert_id: int, outputs: int) -> Any:
    if pattern is None:
        return None
    stored, first, step = _selection(pattern.part, outputs)
    file, offset, dtype = _locate(checkpoint, pattern, expert_id, (stored,))
    return checkpoint.mapped_file(file), offset + first * _ITEM_BYTES[dtype], dtype, outputs, step
