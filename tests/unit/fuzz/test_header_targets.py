"""The header fuzzers: the committed inputs and a short run find nothing, and a careless reader is a
finding.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import pytest

from dflash_moe.errors import CheckpointError
from dflash_moe.model.formats.gguf_header import GgufHeader
from dflash_moe.model.formats.stored_tensor import TensorInfo
from tests.fuzz import fuzz_gguf_header, fuzz_safetensors_header
from tests.fuzz.header_mutations import corpus, run

TARGETS = (fuzz_gguf_header, fuzz_safetensors_header)


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.NAME)
def test_the_committed_inputs_are_read_or_refused_in_words(target):
    inputs = corpus(target.NAME)
    assert len(inputs) >= 4
    assert [target.examine(path) for path in inputs] == [None] * len(inputs)


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.NAME)
def test_a_short_run_finds_nothing(target):
    inputs = [path.read_bytes() for path in corpus(target.NAME)]
    assert run(target.NAME, inputs, target.examine, 0.7, seed=7) == 0


def test_the_valid_inputs_are_not_refused():
    from dflash_moe.model.formats.gguf_header import read_gguf_header
    from dflash_moe.model.formats.safetensors_header import read_header

    gguf = {path.name: path for path in corpus("fuzz_gguf_header")}
    assert len(read_gguf_header(gguf["two_tensors"], 0).tensors) == 3
    safetensors = {path.name: path for path in corpus("fuzz_safetensors_header")}
    assert len(read_header(safetensors["two_tensors"], 0)) == 3
    for path in (gguf["truncated"], gguf["hostile_count"], gguf["empty"]):
        with pytest.raises(CheckpointError, match=path.name):
            read_gguf_header(path, 0)


def test_a_tensor_outside_its_file_is_a_finding(monkeypatch, tmp_path):
    path = tmp_path / "input"
    path.write_bytes(b"GGUF")
    tensor = TensorInfo(0, 100, "F32", (1,), 4)
    monkeypatch.setattr(fuzz_gguf_header, "read_gguf_header", lambda path, file: GgufHeader({}, {"a": tensor}, 4, 2))
    assert "tensor 'a' lies at 100" in fuzz_gguf_header.examine(path)
