"""`dflash-moe verify` and `model` as a user runs them: exit codes, the last line, the report.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import json
import re

import pytest

from bench.models.families import tiny_options
from dflash_moe.cli.main import run
from dflash_moe.holders.audit import contents
from dflash_moe.model.make import make_checkpoint
from dflash_moe.operators.report import OPERATORS

pytestmark = pytest.mark.transformers


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    directory = tmp_path_factory.mktemp("model")
    make_checkpoint(tiny_options("mixtral"), directory)
    return directory


def last_line(capsys) -> str:
    return capsys.readouterr().err.strip().splitlines()[-1]


def test_parity_ends_with_0_and_writes_the_report(checkpoint, tmp_path, capsys):
    assert run(["verify", "--model", str(checkpoint), "--dtype", "f32", "--json", str(tmp_path / "report.json")]) == 0
    assert "parity: every bound held" in capsys.readouterr().out
    report = json.loads((tmp_path / "report.json").read_text())
    assert (report["case"], report["dtype"], report["excesses"]) == ("verify", "f32", [])
    assert [layer["index"] for layer in report["layers"]] == [0, 1]
    assert report["greedy_equal"] == report["greedy_tokens"] > 0
    assert (report["attention_paged"], report["rows_independent"], report["not_judged"]) == (True, True, "")
    taken = {found["operator"] for found in report["host"]["findings"]}
    assert {"router", "linear", "norm"} <= taken <= set(OPERATORS)
    assert (report["host_numerics"], report["kv_dtype"]) == (["f32-canonical"], "f32")


def test_the_host_keeps_the_models_own_operators_where_asked(checkpoint, tmp_path, capsys):
    arguments = ["verify", "--model", str(checkpoint), "--dtype", "f32", "--host-operators", "torch"]
    assert run([*arguments, "--json", str(tmp_path / "report.json")]) == 0
    said = capsys.readouterr().out
    assert "all modules stay in torch: host.operators: torch" in said
    assert "linear layers compute in torch" in said
    report = json.loads((tmp_path / "report.json").read_text())
    assert (report["host"]["findings"], report["attention_paged"], report["rows_independent"]) == ([], True, False)
    assert report["remote_calls"] > 0


def test_logits_are_reported_and_not_judged_where_pages_round(checkpoint, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("DFLASH_MOE_ENGINE_KV_DTYPE", "bf16")
    assert run(["verify", "--model", str(checkpoint), "--dtype", "f32", "--json", str(tmp_path / "report.json")]) == 0
    assert "reported, not judged: keys and values are kept in bf16" in capsys.readouterr().out
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["logits_rms"] > report["bounds"]["logits_rms"]


def test_a_model_that_computes_its_experts_itself_is_an_error(checkpoint, capsys, monkeypatch):
    from dflash_moe.proofs import verify

    plain = verify.open_host
    monkeypatch.setattr(verify, "open_host", lambda path, runtime: verify.HostModel(*_local(plain(path, runtime))))
    assert run(["verify", "--model", str(checkpoint), "--dtype", "f32", "--host-operators", "torch"]) == 1
    assert "the model's experts did not all go through the runtime: 0 remote calls" in last_line(capsys)


def _local(host):
    """The same host, whose experts compute zeros in this process."""
    from dflash_moe.integrations.transformers import without_experts

    own = host.model.forward

    def forward(*arguments, **options):
        with without_experts(host.model):
            return own(*arguments, **options)

    host.model.forward = forward
    return host.model, host.report, host.packed


def test_an_excess_ends_with_1_and_names_layer_and_bound(checkpoint, capsys):
    # too coarse for f32's bounds
    arguments = ["verify", "--model", str(checkpoint), "--dtype", "f32", "--reply-dtype", "bf16"]
    assert run(arguments) == 1
    assert "bounds exceeded; layer 0 (model.layers.0." in last_line(capsys)


def test_weights_are_compared_with_the_hosts_own_copy_where_asked(checkpoint, tmp_path, capsys):
    arguments = ["verify", "--model", str(checkpoint), "--dtype", "f32", "--weights", "--json", str(tmp_path / "report.json")]
    assert run(arguments) == 0
    printed = capsys.readouterr()
    assert "comparing weights with this host's own copy" in printed.err
    assert "weights: all 2 shards hold the bytes of this host's copy" in printed.out
    assert json.loads((tmp_path / "report.json").read_text())["compared_shards"] == 2


def test_weights_that_differ_end_with_2_and_name_layer_shard_and_both_values(checkpoint, capsys, monkeypatch):
    monkeypatch.setattr(contents, "own_checksum", lambda _checkpoint, _held, _report: 5)
    assert run(["verify", "--model", str(checkpoint), "--dtype", "f32", "--weights"]) == 2
    said = last_line(capsys)
    assert said.startswith("weights of model.layers.0.")
    held = r"worker memory holds content checksum 0x[0-9a-f]{16}"
    assert re.search(rf"shard 0: {held}, this host's own copy has 0x0{{15}}5; one of the two", said)


def test_a_model_that_cannot_be_supported_ends_with_2_and_names_class_and_field(checkpoint, tmp_path, capsys):
    for path in checkpoint.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "hidden_act": "mish"}))
    assert run(["verify", "--model", str(tmp_path)]) == 2
    assert "MixtralExperts.act_fn: found MishActivation" in last_line(capsys)
    assert run(["model", "inspect", str(tmp_path)]) == 0
    assert "not supported: MixtralExperts.act_fn" in capsys.readouterr().out


def test_a_damaged_checkpoint_ends_with_2_and_names_the_file(checkpoint, tmp_path, capsys):
    for path in checkpoint.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    assert run(["verify", "--model", str(tmp_path)]) == 2
    assert "truncated" in last_line(capsys)


def test_model_make_and_inspect_agree(tmp_path, capsys):
    directory = tmp_path / "made"
    sizes = ["--layers", "2", "--hidden-size", "64", "--num-experts", "6", "--top-k", "2", "--moe-intermediate-size", "32"]
    assert run(["model", "make", "--arch", "olmoe", "--out", str(directory), *sizes, "--dtype", "f16", "--seed", "4"]) == 0
    assert "wrote OlmoeForCausalLM" in capsys.readouterr().out
    assert run(["model", "inspect", str(directory), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["dtype"], len(shown["layers"]), shown["layers"][0]["num_experts"]) == ("f16", 2, 6)
    assert shown["expert_bytes"] == 2 * 6 * 3 * 64 * 32 * 2
    assert run(["model", "inspect", str(directory)]) == 0
    assert "0..1" in capsys.readouterr().out
