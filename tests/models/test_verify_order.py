"""In which order `verify` does its work: what is refused before anything is loaded, what is in
memory beside what, and how often the checkpoint is read.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from bench.models.families import tiny_options
from bench.models.gguf_files import write_gguf
from dflash_moe import Topology, _core
from dflash_moe.errors import ConfigError, UnsupportedError
from dflash_moe.model.checkpoint import Checkpoint
from dflash_moe.model.formats import tensor_values
from dflash_moe.model.make import make_checkpoint

pytestmark = pytest.mark.transformers

HEAD = "version: 1\n"
ONE = HEAD + "workers: [{name: w0, threads: 1}]\n"
# What is asked for, and what is said about it.
REFUSED = {
    "a card that does not exist": (
        HEAD + "host: {device: 'sim:3', simulate: cuda}\nworkers: [{name: w0, threads: 1}]\n",
        r"host\.device sim:3 does not exist",
    ),
    "a class that a card lacks": (
        HEAD + "workers: [{name: green, backend: sim, simulate: cuda, activations: bf16-wmma}]\n",
        r"worker green: its device .* does not compute numerics class bf16-wmma",
    ),
    "a class that weights do not fit": (
        HEAD + "workers: [{name: w0, threads: 1, activations: int8}]\n", r"w0.*int8-groups",
    ),
    "too little memory at a worker": (
        HEAD + "workers: [{name: w0, threads: 1, weights_layout: packed, memory: 1KiB}]\n", r"w0.*1\.0 KiB",
    ),
    "a worker that nobody may reach": (
        HEAD + "workers: [{name: far, threads: 1, address: 'tcp://10.255.255.1:7171'}]\n", r"worker far .*needs the shared key",
    ),
    "a card without its plug-in or driver": (HEAD + "workers: [{name: green, backend: cuda}]\n", r"worker green: .*cuda"),
}  # fmt: skip


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    directory = tmp_path_factory.mktemp("model")
    make_checkpoint(tiny_options("qwen3_moe"), directory)
    return directory


@pytest.mark.parametrize("what", REFUSED)
def test_bad_cards_and_topologies_are_refused_before_anything_is_loaded(what, checkpoint, monkeypatch):
    from dflash_moe.forward import host_model
    from dflash_moe.proofs import eager_pass
    from dflash_moe.proofs.verify import verify

    text, said = REFUSED[what]
    if "backend: cuda" in text and _core.probe_backend("cuda")["devices"]:
        pytest.skip("this machine has a card")

    def loads(*_: object, **__: object) -> None:
        raise AssertionError("weights were asked for")

    monkeypatch.setattr(Checkpoint, "values", loads)
    monkeypatch.setattr(eager_pass, "StreamedEager", loads)
    monkeypatch.setattr(host_model, "load_model", loads)
    with pytest.raises((ConfigError, UnsupportedError), match=said):
        verify(checkpoint, Topology.parse(text), dtype="f32")


def test_the_eager_model_is_gone_before_workers_load_and_there_again_after_they_left(checkpoint, monkeypatch):
    from dflash_moe.holders.fleet import Fleet
    from dflash_moe.proofs import eager_pass, streamed_eager, verify

    happened = []

    class Noted(streamed_eager.StreamedEager):
        def __init__(self, *arguments):
            happened.append("eager opens")
            super().__init__(*arguments)

        def close(self):
            super().close()
            happened.append(f"eager closes after {self.most_live} at a time")

    def noting(what, plain):
        def call(*arguments, **options):
            happened.append(what)
            return plain(*arguments, **options)

        return call

    monkeypatch.setattr(eager_pass, "StreamedEager", Noted)
    monkeypatch.setattr(Fleet, "start", noting("workers start", Fleet.start))
    monkeypatch.setattr(Fleet, "load", noting("workers load", Fleet.load))
    monkeypatch.setattr(verify, "open_host", noting("the host's model opens", verify.open_host))
    report = verify.verify(checkpoint, Topology.parse(ONE), dtype="f32")
    assert report.excesses == []
    opened = ["eager opens", "eager closes after 1 at a time"]
    assert happened == [
        "workers start", *opened, "workers start", "workers load", "the host's model opens", *opened,
    ]  # fmt: skip


def test_no_byte_of_a_quantised_file_is_read_more_than_three_times(tmp_path, monkeypatch):
    from dflash_moe.proofs.verify import verify

    make_checkpoint(replace(tiny_options("qwen3_moe"), hidden_size=64, moe_intermediate_size=32), tmp_path / "floats")
    path = write_gguf(tmp_path / "floats", tmp_path / "model.gguf", "q8_0")
    read = np.zeros(path.stat().st_size, np.int64)
    plain = tensor_values.read_bytes

    def counted(files, info):
        read[info.offset : info.offset + info.num_bytes] += 1
        return plain(files, info)

    monkeypatch.setattr(tensor_values, "read_bytes", counted)
    assert verify(path, Topology.parse(ONE)).excesses == []
    tensors = Checkpoint.open(path).tensors
    experts = np.zeros_like(read, dtype=bool)
    for name, info in tensors.items():
        if "_exps" in name:
            experts[info.offset : info.offset + info.num_bytes] = True
    # Some experts were chosen by no token, and truths are not asked of them.
    assert read[experts].max() == read.max() == 3
    assert read[experts].min() >= 2


def test_rows_are_kept_as_far_as_the_limit_goes(checkpoint, monkeypatch):
    from dflash_moe.proofs import eager_pass
    from dflash_moe.proofs.verify import verify

    hidden, top_k, layers = 96, 2, 2
    monkeypatch.setattr(eager_pass, "KEPT_BYTES", 10 * layers * (2 * 4 * hidden + top_k * (8 + 4)))
    report = verify(checkpoint, Topology.parse(ONE), dtype="f32")
    assert report.excesses == []
    assert [layer.tokens for layer in report.layers] == [10, 10]
