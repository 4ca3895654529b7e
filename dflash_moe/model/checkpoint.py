"""A checkpoint as a worker sees it: checked headers, mapped files and a fingerprint, for
safetensors directories and GGUF files alike.

It needs neither torch nor transformers. Opening reads headers only, and weights are touched when an
expert is loaded.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dflash_moe.errors import CheckpointError, UnsupportedError, shown
from dflash_moe.model.checkpoint_files import INDEX_NAME, find_gguf, list_safetensors, read_json
from dflash_moe.model.formats.gguf_header import read_gguf_header
from dflash_moe.model.formats.packed_tensors import check_packed, join_packed
from dflash_moe.model.formats.safetensors_header import read_header
from dflash_moe.model.formats.scaled_tensors import join_scales
from dflash_moe.model.formats.stored_tensor import TensorInfo
from dflash_moe.model.formats.stub_pages import Stub, find_stub
from dflash_moe.model.formats.weight_formats import is_requantised
from dflash_moe.model.refusals import is_file, is_folder
from dflash_moe.topology.numerics import DEFAULT_NUMERICS

if TYPE_CHECKING:
    import numpy as np

    from dflash_moe import _core

MAX_CONFIG_BYTES = 16 << 20

# The fingerprint samples the content: enough that a fine-tuned or re-quantised copy differs, little
# enough to read in a second.
SAMPLE_BYTES = 32
MAX_SAMPLED_TENSORS = 4096

# These settings do not change what the weights mean. Those of config.json are whole names, and
# those of a GGUF file are the beginnings of names.
_VOLATILE_SETTINGS = {"transformers_version", "use_cache", "output_router_logits", "output_attentions", "output_hidden_states"}
_VOLATILE_METADATA = ("general.", "split.", "quantize.")
_ARCHITECTURE = "general.architecture"


@dataclass(slots=True)
class Checkpoint:
    """The files and tensors of one model. Files are mapped on first use and stay mapped as long as
    this object lives.

    `path` is the directory, or the GGUF file (the first part of a split one). `stored` are the
    tensors as the files list them, and `tensors` are the same with scales joined to their values.
    `metadata` is that of a GGUF file, None for safetensors.
    """

    path: Path
    files: tuple[Path, ...]
    stored: dict[str, TensorInfo]
    tensors: dict[str, TensorInfo]
    metadata: dict[str, Any] | None = None
    _mapped: dict[int, _core.MappedFile] = field(default_factory=dict)
    _fingerprint: str = ""
    # None before `stub` has looked, and then a tuple of what it found.
    _stub: tuple[Stub | None] | None = None

    @classmethod
    def open(cls, path: str | Path) -> Checkpoint:
        """Reads and checks all headers of a directory or a GGUF file. Raises CheckpointError naming
        file and tensor.
        """
        path = Path(path)
        if not is_file(path) and not is_folder(path):
            raise CheckpointError(
                f"checkpoint {path}: no such directory or file; pass the directory that holds config.json, or a GGUF file"
            )
        parts = find_gguf(path)
        return cls._open_gguf(parts) if parts else cls._open_safetensors(path)

    @classmethod
    def _open_safetensors(cls, directory: Path) -> Checkpoint:
        files, listed = list_safetensors(directory)
        stored: dict[str, TensorInfo] = {}
        for index, path in enumerate(files):
            _add_tensors(stored, read_header(path, index), files, path)
        for name, file_name in listed.items():
            if name not in stored or files[stored[name].file].name != file_name:
                raise CheckpointError(f"{directory / INDEX_NAME}: tensor {name!r} should be in {file_name}, but is not there")
        try:
            packed = join_packed(stored, lambda: read_json(directory / "config.json", MAX_CONFIG_BYTES))
            return cls(directory, files, stored, join_scales(packed))
        except (CheckpointError, UnsupportedError) as error:
            raise error.reworded(f"checkpoint {directory}: {error}") from None

    @classmethod
    def _open_gguf(cls, parts: tuple[Path, ...]) -> Checkpoint:
        stored: dict[str, TensorInfo] = {}
        headers = [read_gguf_header(path, index) for index, path in enumerate(parts)]
        for index, (path, header) in enumerate(zip(parts, headers, strict=True)):
            _check_part(path, index, len(parts), header.metadata)
            _add_tensors(stored, header.tensors, parts, path)
        metadata = headers[0].metadata
        if type(metadata.get(_ARCHITECTURE)) is not str:
            raise CheckpointError(f"{parts[0]}: metadata {_ARCHITECTURE} is missing; it is not the (first) file of a model")
        expected = metadata.get("split.tensors.count", len(stored))
        if expected != len(stored):
            found = f"its {len(parts)} parts have {len(stored)}"
            raise CheckpointError(f"{parts[0]}: split.tensors.count is {expected}, but {found}; a part is of another model")
        return cls(parts[0], parts, stored, stored, metadata)

    def mapped_file(self, index: int) -> _core.MappedFile:
        """Returns the mapping of `files[index]`, and makes it on first use."""
        if index not in self._mapped:
            from dflash_moe import _core

            self._mapped[index] = _core.MappedFile(str(self.files[index]))
        return self._mapped[index]

    def drop_pages(self) -> None:
        """Lets the resident pages of all mapped files go. A later read brings them back from the
        page cache.
        """
        for file in self._mapped.values():
            file.drop_pages()

    def config(self) -> dict[str, Any]:
        """Returns config.json as a map, or the metadata of a GGUF file. Raises CheckpointError when
        config.json is missing or no JSON map.
        """
        if self.metadata is not None:
            return self.metadata
        if not is_file(self.path / "config.json"):
            raise CheckpointError(
                f"checkpoint {self.path}: it has weights but no config.json, which says of what model they are; download the "
                "whole folder again, config.json and the tokenizer's files included"
            )
        return read_json(self.path / "config.json", MAX_CONFIG_BYTES)

    def values(self, name: str) -> np.ndarray[Any, Any]:
        """Returns a whole tensor in float32, whatever its format. It is for the host's weights.
        Errors are those of `dequantize`.
        """
        from dflash_moe.model.formats.tensor_values import read_values

        self.refuse_stubbed(name)
        self.check_packed(name)
        return read_values(self.files, self.tensors[name])

    def check_packed(self, name: str) -> None:
        """Holds what belongs to packed integers against their shape. Errors are those of
        `packed_tensors.check_packed`.
        """
        from dflash_moe.model.formats.tensor_values import read_bytes

        try:
            check_packed(name, self.tensors[name], lambda part: read_bytes(self.files, part))
        except (CheckpointError, UnsupportedError) as error:
            raise error.reworded(f"{self.files[self.tensors[name].file]}: {error}") from None

    def of_tensors(self, tensors: dict[str, TensorInfo]) -> Checkpoint:
        """Returns this checkpoint with other `tensors`, such as parts of its own
        (`TensorInfo.entries`). It is for `values` and `raw`.
        """
        self.stub()  # found once, and not again by each part
        return replace(self, tensors=tensors)

    def raw(self, name: str) -> np.ndarray[Any, Any]:
        """Returns the bytes of a tensor as they lie in the mapped file."""
        from dflash_moe.model.formats.tensor_values import read_bytes

        self.refuse_stubbed(name)
        return read_bytes(self.files, self.tensors[name])

    def fingerprint(self) -> str:
        """Returns a digest in hexadecimal of the names, dtypes and shapes of all tensors, samples
        of their contents, and the configuration. It is computed once. That of a stub is the one of
        the full file, which the stub records.
        """
        if not self._fingerprint:
            stub = self.stub()
            self._fingerprint = stub.fingerprint if stub is not None else self._compute_fingerprint()
        return self._fingerprint

    def stub(self) -> Stub | None:
        """Returns what the files say of themselves where they are a stub (`stub_pages.py`), else
        None. They are read for it once. Raises CheckpointError where a stub is damaged.
        """
        if self._stub is None:
            self._stub = (find_stub(self.files, self.stored) if self.metadata is not None else None,)
        return self._stub[0]

    def refuse_stub(self) -> None:
        """Raises CheckpointError where the files are a stub: somebody wants their experts."""
        if self.stub() is not None:
            raise CheckpointError(f"checkpoint {self.path}: it is a stub: it holds no experts; give the worker the full file")

    def refuse_stubbed(self, name: str) -> None:
        """Raises CheckpointError where the files are a stub and hold only pages in the place of
        tensor `name`.
        """
        stub = self.stub()
        if stub is not None and name in stub.tensors:
            raise CheckpointError(
                f"checkpoint {self.path}: it is a stub: it holds no values of tensor {name!r}; use the full file here"
            )

    def _settings(self) -> dict[str, Any]:
        config = self.config()
        if self.metadata is not None:
            kept = (key for key in config if key == _ARCHITECTURE or not key.startswith(_VOLATILE_METADATA))
            return {key: config[key] for key in kept}
        return {key: value for key, value in config.items() if key not in _VOLATILE_SETTINGS and key[:1] != "_"}

    def _compute_fingerprint(self) -> str:
        names = sorted(self.stored)
        digest = hashlib.sha256(json.dumps(self._settings(), sort_keys=True, separators=(",", ":")).encode())
        for name in names:
            info = self.stored[name]
            digest.update(f"\n{name} {info.dtype} {info.shape}".encode())
        step = max(1, -(-len(names) // MAX_SAMPLED_TENSORS))
        descriptors: list[int] = []
        path = self.path
        try:
            for path in self.files:
                descriptors.append(os.open(path, os.O_RDONLY | os.O_CLOEXEC))
            for name in names[::step]:
                info = self.stored[name]
                path = self.files[info.file]
                for third in (1, 2):
                    start = max(0, info.num_bytes * third // 3 - SAMPLE_BYTES)
                    count = min(SAMPLE_BYTES, info.num_bytes - start)
                    digest.update(os.pread(descriptors[info.file], count, info.offset + start))
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from None
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        return digest.hexdigest()


def shard_fingerprint(
    model_fingerprint: str, layer_name: str, experts: Sequence[int], weight_dtype: str = "", numerics: str = DEFAULT_NUMERICS
) -> int:
    """Returns 64 bits that name the weights of these experts (ascending ids) of this layer, as a
    holder computes with them.

    `weight_dtype` is what the holder keeps, and part of the name where that is other numbers than
    the checkpoint's. So is the numerics class where it rounds inputs, so that a call never takes a
    reply of another class for its own.
    """
    text = f"{model_fingerprint} {layer_name} {','.join(map(str, experts))}"
    if is_requantised(weight_dtype):
        text += f" {weight_dtype}"
    if numerics != DEFAULT_NUMERICS:
        text += f" {numerics}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")


def _check_part(path: Path, index: int, count: int, metadata: dict[str, Any]) -> None:
    """Raises CheckpointError where a part of a split GGUF file calls itself another one than its
    name does. Parts are found by their names, so that a renamed one stands in another's place.
    """
    own_count, own = metadata.get("split.count", count), metadata.get("split.no", index)
    if own_count == count and own == index:
        return
    named = f"its name makes it part {index + 1} of {count}" if count > 1 else "its name is that of a whole model"
    raise CheckpointError(
        f"{path}: it is part {own + 1 if type(own) is int else shown(own)} of {shown(own_count)} by its metadata, and {named}; "
        "give all parts the names they were downloaded with (NAME-00001-of-0000N.gguf), side by side in one folder"
    )


def _add_tensors(stored: dict[str, TensorInfo], found: dict[str, TensorInfo], files: Sequence[Path], path: Path) -> None:
    for name, info in found.items():
        if name in stored:
            raise CheckpointError(f"{path}: tensor {name!r} is also in {files[stored[name].file].name}; one must go")
        stored[name] = info
