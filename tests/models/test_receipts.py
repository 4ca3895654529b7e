"""A receipt of `generate` is proven again by other holders, transports, modes, threads and kernel
sets, and whatever is not the same is named.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from dflash_moe import Topology, _core
from dflash_moe.cli.main import run
from dflash_moe.errors import ConfigError, UnsupportedError
from dflash_moe.model.checkpoint import Checkpoint
from dflash_moe.proofs.receipt import Receipt, read_receipt
from dflash_moe.proofs.replay import Replay, replay
from tests.host_models import checkpoint

MODEL = Path(__file__).parents[2] / "bench" / "demo_model" / "dflash_moe_demo" / "model"
PROMPT = "The following functions read and write a file; each of them returns a list of the"
THREE_WORKERS = "version: 1\nworkers:\n" + "".join(f"  - {{name: w{at}, backend: cpu, threads: 1}}\n" for at in range(3))
# One that is not loaded says so in this place.
LOADED: list[str] = []


def generate(folder: Path, *flags: str, topology: str = THREE_WORKERS) -> Path:
    """Writes a receipt and returns its path."""
    (folder / "topology.yaml").write_text(topology)
    path = folder / "R.json"
    arguments = ["generate", "--model", str(MODEL), "--topology", str(folder / "topology.yaml"), "--prompt", PROMPT]
    assert run([*arguments, "--max-tokens", "24", "--receipt", str(path), *flags]) == 0
    return path


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> Path:
    return generate(tmp_path_factory.mktemp("greedy"))


@pytest.fixture(scope="module")
def receipt(written) -> Receipt:
    return read_receipt(written)


@pytest.fixture(autouse=True)
def nothing_is_loaded_yet():
    LOADED.clear()


def on_loading(holder: str, _count: int, _total: int) -> None:
    LOADED.append(holder)


def again(receipt: Receipt, topology: Topology, path: Path = MODEL, **options: Any) -> Replay:
    return replay(receipt, path, topology, on_loading=on_loading, **options)


def test_a_receipt_says_what_was_computed_with(receipt):
    assert [len(layer.shards) for layer in receipt.layers] == [3] * 4
    assert {terms.numerics for layer in receipt.shard_map for terms in layer} == {"f32-canonical"}
    assert receipt.host.no_claim == ""
    assert any("layer" in operator for operator in receipt.host.operators)
    assert len(receipt.residuals.positions) == 16
    assert receipt.residuals.positions[-1] == len(receipt.prompt_ids) + len(receipt.tokens) - 2
    assert len({digest for row in receipt.residuals.digests for digest in row}) == 16 * 4


HOLDERS = {
    "one worker": (Topology.local(1), {"mode": "stream"}),
    "two workers over unix": (Topology.local(2, address="unix"), {"mode": "batched", "micro_batches": "2"}),
    "two workers over tcp": (Topology.local(2, threads=2, address="tcp"), {"max_batch_tokens": 7}),
    "within the host": (Topology.local(1, threads=2, address="loopback"), {}),
    "the host and a worker": (
        Topology.parse("version: 1\nhost: {experts: {memory: 40%}}\nworkers:\n  - {name: w, backend: cpu}\n"),
        {"speculate": "prompt"},
    ),
    "mapped weights": (
        Topology.parse("version: 1\nworkers:\n  - {name: w, backend: cpu, weights_layout: mapped}\n"),
        {"prefix_cache": False},
    ),
}


@pytest.mark.parametrize("name", HOLDERS)
def test_other_holders_prove_it(receipt, name):
    topology, settings = HOLDERS[name]
    found = again(receipt, topology, overrides=settings)
    assert found.differences == []
    assert (found.num_tokens, found.num_digests, found.close) == (24, 64, None)


@pytest.mark.parametrize("isa", [isa for isa in _core.supported_isas() if isa != "reference"])
def test_other_kernel_sets_prove_it(receipt, isa):
    assert again(receipt, Topology.local(1), overrides={"cpu_isa": isa}).differences == []


def test_drawn_tokens_are_proven_too(tmp_path):
    found = read_receipt(generate(tmp_path, "--temperature", "1.5", "--seed", "9", "--stop", "the"))
    assert found.sampling.seed == 9
    assert again(found, Topology.local(2)).differences == []


@pytest.mark.skipif("bf16-dot" not in _core.numerics_classes(_core.best_isa()), reason="the preset has no other class here")
def test_a_preset_is_proven_by_workers_that_nobody_asked_for_it(tmp_path):
    found = read_receipt(generate(tmp_path, "--preset", "fast"))
    assert {terms.numerics for layer in found.shard_map for terms in layer} == {"bf16-dot"}
    assert found.host.numerics["bf16"] == "bf16-dot"
    assert again(found, Topology.local(1)).differences == []


def test_workers_that_round_have_their_class_in_the_receipt(tmp_path):
    where = "version: 1\nhost: {activations: f32}\nworkers:\n  - {name: w, backend: cpu, weights: int8, activations: int8}\n"
    found = read_receipt(generate(tmp_path, topology=where))
    shard = found.layers[0].shards[0]
    assert (shard.terms.weights, shard.terms.numerics) == ("int8", "int8-groups")
    assert set(found.host.numerics.values()) == {"f32-canonical"}
    # The topology says nothing of classes; the receipt does.
    assert again(found, Topology.local(2)).differences == []


def edited(receipt_path: Path, change) -> Receipt:
    value = json.loads(receipt_path.read_text())
    change(value)
    path = receipt_path.with_name("edited.json")
    path.write_text(json.dumps(value))
    return read_receipt(path)


def test_an_edited_token_is_named(written):
    def change(value):
        value["tokens"][5] += 1

    found = again(edited(written, change), Topology.local(1))
    assert len(found.differences) == 1
    assert found.differences[0].startswith(f"token 5 at position {len(read_receipt(written).prompt_ids) + 5} is ")


def test_an_edited_digest_is_named_by_layer_and_position(written):
    positions = read_receipt(written).residuals.positions

    def change(value):
        value["residuals"]["sha256"][7][2] = "0" * 64

    found = again(edited(written, change), Topology.local(1))
    assert found.differences == [f"the residual stream parts at position {positions[7]} after layer 2; 1 of 64 digests differ"]


def flipped(folder: Path, name: str, byte: int) -> Path:
    """Copies the model and flips the highest bit of a byte of a tensor."""
    copied = folder / "copy"
    shutil.copytree(MODEL, copied)
    info = Checkpoint.open(copied).stored[name]
    with (copied / "model.safetensors").open("r+b") as file:
        file.seek(info.offset + byte)
        value = file.read(1)[0]
        file.seek(info.offset + byte)
        file.write(bytes([value ^ 0x80]))
    return copied


def test_a_flipped_weight_bit_is_named_by_layer_and_shard(receipt, tmp_path):
    name = "model.layers.2.mlp.experts.5.up_proj.weight"
    copied = flipped(tmp_path, name, 101)
    assert Checkpoint.open(copied).fingerprint() == receipt.fingerprint
    found = again(receipt, Topology.local(1), copied)
    assert "after layer 2" in found.differences[0]
    assert found.differences[-1].startswith("weights of 1 shards are not those of the receipt, first layer 2, shard 1: ")


def test_another_checkpoint_is_refused_before_anything_is_loaded(receipt):
    with pytest.raises(ConfigError, match="fingerprint"):
        again(receipt, Topology.local(1), checkpoint("qwen3_moe", "bf16"))
    assert not LOADED


def test_a_class_that_this_machine_lacks_is_refused_before_anything_is_loaded(written):
    lacking = "bf16-bfdot" if "bf16-bfdot" not in _core.numerics_classes(_core.best_isa()) else "bf16-dot"

    def change(value):
        for layer in value["layers"]:
            for shard in layer["shards"]:
                shard["numerics"] = lacking

    found = edited(written, change)
    with pytest.raises(UnsupportedError, match=lacking):
        again(found, Topology.local(1))
    assert not LOADED
    close = again(found, Topology.local(1), is_close=True)
    assert lacking in close.reason
    assert close.close is not None
    assert (close.close.num_equal, close.differences) == (24, [])


def test_parity_alone_is_refused_and_may_be_compared_by_tolerance(written, receipt):
    with pytest.raises(UnsupportedError, match=r"host\.operators.*--close"):
        again(receipt, Topology.local(1), overrides={"host_operators": "torch"})
    assert not LOADED
    found = again(receipt, Topology.local(1), overrides={"host_operators": "torch"}, is_close=True)
    assert found.differences == []
    assert found.close is not None
    assert 0 < max(found.close.rms) <= found.close.tolerance

    def change(value):
        value["host"]["no_claim"] = "some reason"

    with pytest.raises(UnsupportedError, match="some reason"):
        again(edited(written, change), Topology.local(1))


def test_close_names_what_exceeds_the_tolerance(written):
    def change(value):
        value["host"]["no_claim"] = "some reason"
        value["tokens"][5] = (value["tokens"][5] + 1) % 100

    found = again(edited(written, change), Topology.local(1), is_close=True)
    assert any(difference.startswith("token 5 at position ") for difference in found.differences)


def test_receipts_of_a_model_with_torchs_operators_claim_parity(tmp_path):
    found = read_receipt(generate(tmp_path, "--host-operators", "torch"))
    assert "torch" in found.host.no_claim
    assert found.residuals.num_layers == 4
    assert again(found, Topology.local(1), is_close=True).differences == []


def test_exit_codes_are_those_of_the_documents(written, tmp_path, capsys):
    assert run(["replay", str(written)]) == 0
    assert "proven: 24 tokens and 64 digests are equal bit by bit" in capsys.readouterr().out
    assert run(["replay", str(written), "--host-operators", "torch"]) == 2
    assert "--close" in capsys.readouterr().err.splitlines()[-1]
    assert run(["replay", str(written), "--host-operators", "torch", "--close"]) == 0
    assert "compared by tolerance, because" in capsys.readouterr().out
    assert run(["replay", str(written), "--model", str(flipped(tmp_path, "model.norm.weight", 1))]) == 1
    # The last norm decides nothing but tokens.
    assert re.fullmatch(r"replay: token \d+ at position \d+ is .*", capsys.readouterr().err.splitlines()[-1])
    assert run(["replay", str(MODEL / "config.json")]) == 2
    assert run(["replay", str(tmp_path / "missing.json")]) == 2


def test_several_prompts_have_no_receipt(tmp_path, capsys):
    (tmp_path / "prompts.jsonl").write_text('"a"\n"b"\n')
    path = tmp_path / "R.json"
    flags = ["--prompt-file", str(tmp_path / "prompts.jsonl"), "--receipt", str(path)]
    assert run(["generate", "--model", str(MODEL), *flags]) == 2
    assert "one prompt" in capsys.readouterr().err
    assert not path.exists()
