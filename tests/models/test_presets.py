"""`--preset fast` from the setting to the result: each layer in the class of its format, the host's
matrices by theirs, bits that do not depend on who holds what, and a verdict of `verify`.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("gguf")
pytest.importorskip("torch")

import dflash_moe as dm
from bench.models import gguf_files
from bench.models.gguf_files import write_gguf
from dflash_moe import _core
from dflash_moe.cli.main import run
from dflash_moe.model.make import MakeOptions, make_checkpoint
from dflash_moe.operators.layers.reads import packed_linears
from dflash_moe.proofs.verify import verify
from dflash_moe.testing.tiny import routed_batch
from dflash_moe.topology.numerics import class_on

pytestmark = pytest.mark.transformers

EXACT, INT8 = "f32-canonical", "int8-groups"
OPTIONS = MakeOptions(
    "qwen3_moe", num_layers=2, hidden_size=256, num_experts=4, top_k=2, moe_intermediate_size=256, dtype="bf16"
)
# On a processor without a class for bf16 the preset falls back to the exact one.
BF16 = class_on("bf16", "cpu") if class_on("bf16", "cpu") in _core.numerics_classes(_core.best_isa()) else EXACT
ONE = "workers: [{name: a, threads: 1}]\n"
TWO = "workers: [{name: a, threads: 1}, {name: b, threads: 1, address: loopback}]\n"


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("source") / "model"
    make_checkpoint(OPTIONS, folder)
    return folder


@pytest.fixture(scope="module")
def mixed(source, tmp_path_factory) -> Path:
    """Layer 0 has experts in q8_0, which are integers, and layer 1 in f16."""
    add = gguf_files._add

    def by_layer(writer: Any, name: str, value: Any, format_name: str, seed: int) -> None:
        add(writer, name, value, "f16" if "blk.1." in name and "_exps." in name else format_name, seed)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gguf_files, "_add", by_layer)
        return write_gguf(source, tmp_path_factory.mktemp("mixed") / "model.gguf", experts="q8_0", host="q8_0")


@pytest.fixture(scope="module")
def whole(source, tmp_path_factory) -> Path:
    return write_gguf(source, tmp_path_factory.mktemp("whole") / "model.gguf", experts="q8_0", host="q8_0")


def topology(text: str, preset: str = "fast") -> dm.Topology:
    return dm.Topology.parse(f"version: 1\npreset: {preset}\n{text}", "t.yaml")


def classes(path: Path, where: dm.Topology, **overrides: Any) -> list[set[str]]:
    with dm.ExpertRuntime.start(where, model=path, **overrides) as runtime:
        return [{shard.numerics for shard in shards} for shards in runtime.placement.layers]


def test_layers_of_unlike_formats_get_unlike_classes_on_one_worker(mixed):
    assert classes(mixed, topology(ONE)) == classes(mixed, topology(TWO)) == [{INT8}, {EXACT}]
    assert classes(mixed, topology(ONE, preset="exact")) == [{EXACT}, {EXACT}]
    # Python, environment and flag win over the file.
    assert classes(mixed, topology(ONE, preset="exact"), preset="fast") == [{INT8}, {EXACT}]
    assert classes(mixed, topology(ONE), preset="exact") == [{EXACT}, {EXACT}]
    stated = TWO.replace("{name: b,", "{name: b, activations: f32,")
    assert classes(mixed, topology(stated)) == [{EXACT}, {EXACT}]


def test_holders_of_one_shard_get_one_class_which_one_of_them_may_state(mixed, whole):
    replicated = "placement: {replicas: 2}\n" + TWO.replace(", address: loopback", "")
    assert classes(mixed, topology(replicated)) == [{INT8}, {EXACT}]
    for stated, expected in (("f32", EXACT), ("int8", INT8)):
        text = replicated.replace("{name: b,", f"{{name: b, activations: {stated},")
        assert classes(whole, topology(text)) == [{expected}, {expected}]


def test_a_layer_has_the_bits_that_its_class_has_where_it_is_stated(mixed, whole):
    batch = routed_batch(9, OPTIONS.hidden_size, OPTIONS.num_experts, OPTIONS.top_k)
    with dm.ExpertRuntime.start(topology(ONE), model=mixed, dtype="f32") as runtime:
        fast = [np.asarray(runtime.experts(layer, *batch)).tobytes() for layer in (0, 1)]
        assert runtime.stats()["numerics"]["classes"] == {"a": f"{INT8}, {EXACT}"}
    stated = dm.Topology.parse("version: 1\nworkers: [{name: a, threads: 1, activations: int8}]")
    with dm.ExpertRuntime.start(stated, model=whole, dtype="f32") as runtime:
        assert np.asarray(runtime.experts(0, *batch)).tobytes() == fast[0]
    with dm.ExpertRuntime.start(dm.Topology.local(1), model=mixed, dtype="f32") as runtime:
        assert np.asarray(runtime.experts(1, *batch)).tobytes() == fast[1]
        assert np.asarray(runtime.experts(0, *batch)).tobytes() != fast[0]


def test_the_hosts_matrices_get_the_class_of_their_formats_unless_it_is_stated(mixed, source):
    def dense(path: Path, text: str) -> set[str]:
        with dm.LLM(path, topology(text), kv_memory="16MiB") as llm:
            return {name for packed in packed_linears(llm.host.model) for name in packed.numerics}

    assert INT8 in dense(mixed, ONE)
    assert BF16 in dense(source, ONE)
    assert dense(source, "host: {activations: f32}\n" + ONE) == {EXACT}


@pytest.mark.parametrize("kind", ["mixed", "bf16"])
def test_verify_judges_what_the_preset_has_chosen(kind, mixed, source, caplog):
    path = mixed if kind == "mixed" else source
    with caplog.at_level("INFO", "dflash_moe.plan"):
        report = verify(path, dm.Topology.local(1, address="loopback"), overrides={"preset": "fast"})
    assert report.excesses == []
    assert [layer.numerics for layer in report.layers] == ([(INT8,), (EXACT,)] if kind == "mixed" else [(BF16,)] * 2)
    assert caplog.text.count("preset fast: ") == 1


def test_the_command_says_one_line_and_the_default_none(source, capsys):
    arguments = ["generate", "--model", str(source), "--prompt", "ab", "--max-tokens", "2", "--experts-on-card", "0"]
    assert run([*arguments, "--preset", "fast"]) == 0
    assert sum("preset fast: " in line for line in capsys.readouterr().err.splitlines()) == 1
    assert run(arguments) == 0
    assert "preset" not in capsys.readouterr().err


def test_a_preset_of_the_file_is_a_stated_setting():
    assert dict(topology(ONE).stated_settings) == {"preset": "fast"}
    assert "preset" not in dm.Topology.local(1).stated_settings
    assert dataclasses.replace(topology(ONE), preset=None).stated_settings == {}
