"""`diff` finds nothing between two runs of one model, however they were computed, and names layer
and expert of a planted difference.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from bench.models.families import tiny_options
from dflash_moe import Topology, _core
from dflash_moe.cli.main import run
from dflash_moe.errors import ConfigError
from dflash_moe.model.checkpoint import Checkpoint
from dflash_moe.model.make import make_checkpoint
from dflash_moe.proofs.diff import Side, diff
from dflash_moe.proofs.diff_report import DiffReport
from tests.host_models import checkpoint

MODEL = Path(__file__).parents[2] / "bench" / "demo_model" / "dflash_moe_demo" / "model"
TWO_WORKERS = Topology.local(2)


def flipped(folder: Path, source: Path, name: str, byte: int, mask: int = 0x80) -> Path:
    """Copies a model and flips bits of a byte of a tensor."""
    copied = folder / "copy"
    shutil.copytree(source, copied)
    opened = Checkpoint.open(copied)
    info = opened.stored[name]
    with opened.files[info.file].open("r+b") as file:
        file.seek(info.offset + byte)
        value = file.read(1)[0]
        file.seek(info.offset + byte)
        file.write(bytes([value ^ mask]))
    return copied


def compared(path: Path, topology: Topology = TWO_WORKERS, a: Path = MODEL, **overrides: Any) -> DiffReport:
    return diff(Side(a, TWO_WORKERS), Side(path, topology, overrides))


SETTINGS = {
    "another mode": (TWO_WORKERS, {"mode": "stream"}),
    "sockets": (Topology.local(2, address="unix"), {}),
    "other threads within the host": (Topology.local(2, threads=2, address="loopback"), {}),
    "another kernel set": (TWO_WORKERS, {"cpu_isa": "scalar" if "scalar" in _core.supported_isas() else "neon"}),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_a_model_does_not_differ_from_itself(name):
    topology, settings = SETTINGS[name]
    found = compared(MODEL, topology, **settings)
    assert found.not_bits == ""
    assert not found.parts
    assert (found.num_tokens, len(found.layers), found.kl, found.top1) == (96, 4, 0.0, 1.0)
    assert all(layer.experts is not None for layer in found.layers)


def test_a_flipped_bit_is_named_by_layer_and_expert(tmp_path):
    copied = flipped(tmp_path, MODEL, "model.layers.2.mlp.experts.5.up_proj.weight", 101)
    found = compared(copied)
    assert (found.not_bits, found.contents, found.asked_layer) == ("", [(2, 0)], 2)
    assert [(one.expert, one.has_other_bytes) for one in found.experts] == [(5, True)]
    assert found.fault().startswith("they part at layer 2 in the routed experts, expert 5, first at token ")
    # What comes behind it differs because of it, and not by itself.
    assert found.layers[3].free.first_row is not None
    assert found.layers[3].fed.first_row is None


def test_a_bit_that_no_token_shows_is_named_by_the_bytes(tmp_path):
    """The lowest bit of one weight is lost where results are rounded to bf16."""
    copied = flipped(tmp_path, MODEL, "model.layers.1.mlp.experts.3.down_proj.weight", 4, mask=1)
    found = compared(copied)
    assert found.contents == [(1, 0)]
    assert [one.expert for one in found.experts] == [3]
    assert "layer 1" in found.fault()
    assert "expert 3" in found.fault()


@pytest.mark.parametrize(
    ("tensor", "named"),
    [
        ("model.layers.1.self_attn.v_proj.weight", "at layer 1"),
        ("model.layers.3.mlp.gate.weight", "at layer 3 in what its router is given or chooses"),
        ("model.norm.weight", "behind the last layer"),
        ("model.embed_tokens.weight", "at the embedding"),
    ],
)
def test_a_flipped_bit_of_the_hosts_own_weights_is_named_by_its_place(tmp_path, tensor, named):
    # The embedding's first row is that of token 0, so that the tokens have to have it.
    copied = flipped(tmp_path, MODEL, tensor, 1)
    found = diff(Side(MODEL, TWO_WORKERS), Side(copied, TWO_WORKERS), prompt=None, seed=seed_with_token(0))
    assert named in found.fault()
    assert not found.experts


def seed_with_token(token: int) -> int:
    """A seed whose random tokens have this one."""
    import torch

    vocab_size = Checkpoint.open(MODEL).config()["vocab_size"]
    for seed in range(10_000):
        drawn = torch.randint(0, vocab_size, (96,), generator=torch.Generator().manual_seed(seed))
        if bool((drawn == token).any()):
            return seed
    raise AssertionError(token)


def test_other_shard_maps_are_compared_by_tolerance():
    found = compared(MODEL, Topology.local(3))
    assert found.not_bits == "the shard maps differ"
    assert found.tolerance == 1e-2
    assert 0 < max(layer.experts.rms for layer in found.layers if layer.experts is not None) < 1e-2


def test_requantised_weights_part_by_their_experts():
    where = Topology.parse(
        "version: 1\nworkers:\n"
        + "".join(f"  - {{name: w{at}, backend: cpu, weights: int4, activations: f32}}\n" for at in range(2))
    )
    found = compared(MODEL, where)
    assert found.not_bits == "the weights are kept in other formats"
    assert found.parts
    assert found.asked_layer == 0
    assert len(found.experts) == 14
    assert found.experts[0].rms >= found.experts[-1].rms > found.tolerance


def test_torchs_operators_promise_no_bits():
    found = compared(MODEL, host_operators="torch")
    # Its matrices are computed in another class, and by other modules.
    assert found.not_bits.startswith("the host's numerics is {} in B, and {")
    assert len(found.layers) == 4
    # A layer by itself is within the bound of one layer.
    assert all(layer.fed.first_row is None for layer in found.layers)


def test_a_model_without_paged_attention_is_compared_too(tmp_path):
    # Its fourth layer is the first that has attention.
    path = tmp_path / "qwen3_next"
    make_checkpoint(dataclasses.replace(tiny_options("qwen3_next", "f32"), num_layers=4), path)
    found = diff(Side(path, Topology.local(1)), Side(path, Topology.local(1), {"mode": "stream"}))
    assert "not promised" in found.not_bits
    assert not found.parts


def test_other_models_are_not_comparable():
    with pytest.raises(ConfigError, match="not comparable: vocab_size"):
        compared(checkpoint("qwen3_moe", "bf16"))


def test_exit_codes_are_those_of_the_documents(tmp_path, capsys):
    copied = flipped(tmp_path, MODEL, "model.layers.2.mlp.experts.5.up_proj.weight", 101)
    out = tmp_path / "out.json"
    (tmp_path / "one.yaml").write_text("version: 1\nworkers:\n  - {name: w, backend: cpu}\n")
    flags = ["--topology", str(tmp_path / "one.yaml"), "--prompt", "def f(x):"]
    assert run(["diff", str(MODEL), str(MODEL), *flags]) == 0
    assert "no difference: every bit is the same" in capsys.readouterr().out
    assert run(["diff", str(MODEL), str(copied), *flags, "--json", str(out)]) == 1
    assert "layer 2 in the routed experts, expert 5" in capsys.readouterr().err.splitlines()[-1]
    assert json.loads(out.read_text())["experts"][0]["expert"] == 5
    assert run(["diff", str(MODEL), str(copied), *flags, "--tolerance", "0.5"]) == 1
    assert "other bytes" in capsys.readouterr().err.splitlines()[-1]
    assert run(["diff", str(MODEL), str(checkpoint("qwen3_moe", "bf16")), *flags]) == 2
    assert "not comparable" in capsys.readouterr().err
    assert run(["diff", str(MODEL), str(MODEL), *flags, "--preset-b", "slow"]) == 2
    assert "--preset-b" in capsys.readouterr().err


def test_a_preset_is_given_for_one_side(tmp_path, capsys):
    (tmp_path / "one.yaml").write_text("version: 1\nworkers:\n  - {name: w, backend: cpu}\n")
    flags = ["--topology", str(tmp_path / "one.yaml"), "--preset-b", "fast", "--tolerance", "1"]
    assert run(["diff", str(MODEL), str(MODEL), *flags]) == 0
    assert "compared by tolerance 1" in capsys.readouterr().out
