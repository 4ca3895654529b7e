"""Checkpoints in the formats people have, through two workers: verify, generate and inspect as with
floats.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import json
import time

import numpy as np
import pytest

import dflash_moe as dm
from bench.models.int4_files import write_int4
from bench.models.quantised_files import write_fp8, write_mxfp4
from dflash_moe.cli.main import run
from dflash_moe.model.make import MakeOptions, make_checkpoint

pytestmark = pytest.mark.transformers

TOPOLOGY = "version: 1\nworkers:\n  - {{name: w0, threads: 1{first}}}\n  - {{name: w1, threads: 1, address: unix}}\n"


def made(folder, arch: str, hidden_size: int, width: int):
    options = MakeOptions(
        arch, num_layers=2, hidden_size=hidden_size, num_experts=8, top_k=2, moe_intermediate_size=width, dtype="f32", seed=1
    )
    make_checkpoint(options, folder)
    return folder


@pytest.fixture(scope="module")
def qwen(tmp_path_factory):
    return made(tmp_path_factory.mktemp("qwen3"), "qwen3_moe", 256, 256)


@pytest.fixture(scope="module")
def gpt_oss(tmp_path_factory):
    return made(tmp_path_factory.mktemp("gpt_oss"), "gpt_oss", 64, 32)


@pytest.fixture
def verified(tmp_path, capsys):
    def verify(model, dtype: str, first: str = "") -> dict:
        topology, report = tmp_path / "topology.yaml", tmp_path / "report.json"
        topology.write_text(TOPOLOGY.format(first=first))
        arguments = ["verify", "--model", str(model), "--topology", str(topology), "--dtype", dtype, "--json", str(report)]
        assert run(arguments) == 0, capsys.readouterr().err
        found = json.loads(report.read_text())
        assert found["remote_calls"] > 0
        assert found["excesses"] == []
        return found | {"text": capsys.readouterr().out}

    return verify


def gguf_file(source, path, *formats: str):
    pytest.importorskip("gguf", reason="the gguf package is an extra of the tests")
    from bench.models.gguf_files import write_gguf

    return write_gguf(source, path, formats[0], down=formats[-1])


@pytest.mark.parametrize(
    "formats", [("f16",), ("q8_0",), ("q4_k", "q6_k"), ("iq3_xxs", "iq2_s"), ("iq1_m",), ("q2_k", "q3_k")], ids="+".join
)
def test_a_gguf_file_has_parity_with_itself_dequantised(qwen, tmp_path, verified, formats):
    found = verified(gguf_file(qwen, tmp_path / "m.gguf", *formats), "f32")
    assert found["formats"] == {"w0": ["+".join(formats)], "w1": ["+".join(formats)]}
    assert "w0 holds " + "+".join(formats) in found["text"]


def test_fp8_and_mxfp4_checkpoints_have_parity(qwen, gpt_oss, tmp_path, verified):
    assert verified(write_fp8(qwen, tmp_path / "fp8"), "f32")["formats"]["w1"] == ["fp8_e4m3_b128"]
    assert verified(write_mxfp4(gpt_oss, tmp_path / "mxfp4"), "bf16")["formats"]["w0"] == ["mxfp4"]


@pytest.mark.parametrize(
    ("method", "group", "is_symmetric"),
    [("awq", 128, False), ("gptq", 32, True), ("gptq_v2", -1, False), ("compressed-tensors", 64, False)],
)
def test_checkpoints_of_four_bit_integers_have_parity(qwen, tmp_path, verified, method, group, is_symmetric):
    model = write_int4(qwen, tmp_path / "int4", method, group=group, is_symmetric=is_symmetric)
    assert verified(model, "f32")["formats"] == {"w0": ["int4_zp"], "w1": ["int4_zp"]}


@pytest.mark.parametrize("scales", ["outputs", "tensor"])
def test_fp8_with_scales_of_other_shapes_has_parity(qwen, tmp_path, verified, scales):
    assert verified(write_fp8(qwen, tmp_path / "fp8", scales=scales), "bf16")["formats"]["w1"] == ["fp8_e4m3_b128"]


def test_packed_integers_are_inspected_and_a_mapped_worker_gives_the_bits_of_one_that_packs(qwen, tmp_path, capsys):
    model = write_int4(qwen, tmp_path / "int4", "awq", group=64)
    assert run(["model", "inspect", str(model), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["layers"][0]["weight_dtype"] == "int4_zp"
    rows, ids = random_calls(17)
    packed, mapped, rounded = (outputs(model, worker, rows, ids) for worker in (PACKED, MAPPED, PACKED + ", activations: int8"))
    assert np.array_equal(packed.view(np.uint32), mapped.view(np.uint32))
    assert 0 < np.abs(rounded - packed).max() < 0.05 * packed.std()


@pytest.mark.parametrize("kind", ["int4_zp", "fp8", "mxfp4", "gguf", "int8"])
def test_every_kind_of_checkpoint_is_mapped_from_panels_with_equal_bits(qwen, gpt_oss, tmp_path, kind):
    write = {
        "int4_zp": lambda: write_int4(qwen, tmp_path / "model", "awq", group=64),
        "fp8": lambda: write_fp8(qwen, tmp_path / "model"),
        "mxfp4": lambda: write_mxfp4(gpt_oss, tmp_path / "model"),
        "gguf": lambda: gguf_file(qwen, tmp_path / "m.gguf", "q4_k", "q6_k"),
        "int8": lambda: qwen,
    }
    model, own = write[kind](), ", weights: int8" if kind == "int8" else ""
    time.sleep(0.1)  # panels of what was changed a moment ago are not kept
    rows, ids = random_calls(17, 64 if kind == "mxfp4" else 256)
    packed = outputs(model, PACKED + own, rows, ids)
    for _first_and_second in range(2):
        stored = outputs(model, "weights_layout: stored" + own, rows, ids, cache_path=tmp_path / "cache")
        assert np.array_equal(packed.view(np.uint32), stored.view(np.uint32))
        assert list((tmp_path / "cache" / "panels").glob("*.panels"))


@pytest.mark.parametrize(("weights", "least", "most"), [("int8", 1e-3, 3e-2), ("int4", 2e-2, 4e-1)])
def test_requantised_weights_are_judged_by_their_own_truth_and_what_they_move_is_told(qwen, verified, weights, least, most):
    found = verified(qwen, "f32", first=f", weights: {weights}")
    assert found["formats"] == {"w0": [f"{weights}_g32"], "w1": ["f32"]}
    for layer in found["layers"]:
        assert layer["is_requantised"]
        assert least < layer["requantisation_error"] < most
        assert layer["remote_error"] < 1e-5
    assert "weights were requantised in 2 layers" in found["text"]


def test_generate_and_inspect_take_a_gguf_file(qwen, tmp_path, capsys):
    path = gguf_file(qwen, tmp_path / "m.gguf", "q8_0")
    report = tmp_path / "report.json"
    arguments = ["generate", "--model", str(path), "--prompt", "the", "--max-tokens", "3", "--json", str(report)]
    assert run(arguments) == 0, capsys.readouterr().err
    found = json.loads(report.read_text())
    assert len(found["token_ids"]) == 3
    assert found["prompt_tokens"] == 2  # the file's own merge of t and h
    assert found["calls"] > 0
    capsys.readouterr()
    assert run(["model", "inspect", str(path), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["model_type"], shown["layers"][0]["weight_dtype"]) == ("qwen3moe", "q8_0")
    assert shown["expert_bytes"] == 2 * 8 * 3 * 256 * 256 // 32 * 34
    assert run(["model", "inspect", str(qwen)]) == 0
    assert "with `weights: int4` at the workers the experts take" in capsys.readouterr().out


def test_a_stub_is_inspected_as_such_and_needs_workers_with_the_full_file(qwen, tmp_path, capsys):
    full, stub = gguf_file(qwen, tmp_path / "m.gguf", "q8_0"), tmp_path / "s.gguf"
    assert run(["model", "stub", str(full), str(stub)]) == 0
    shown = []
    for path in (full, stub):
        capsys.readouterr()
        assert run(["model", "inspect", str(path), "--json"]) == 0
        shown.append(json.loads(capsys.readouterr().out))
    assert [found.pop("is_stub") for found in shown] == [False, True]
    assert [found.pop("directory") for found in shown] == [str(full), str(stub)]
    assert shown[0] == shown[1]
    assert run(["model", "inspect", str(stub)]) == 0
    assert "a stub: it holds no experts, which workers load from the full file" in capsys.readouterr().out
    for command in (["generate", "--prompt", "the", "--max-tokens", "1"], ["verify"]):
        assert run([*command, "--model", str(stub)]) == 2
        assert "it is a stub: it holds no" in capsys.readouterr().err.strip().splitlines()[-1]


def test_a_file_that_is_no_checkpoint_ends_with_2_and_says_so(tmp_path, capsys):
    path = tmp_path / "m.gguf"
    path.write_bytes(b"GGUF\x03\0\0\0" + b"\xff" * 16)
    for command in (["model", "inspect", str(path)], ["verify", "--model", str(path)]):
        assert run(command) == 2
        last = capsys.readouterr().err.strip().splitlines()[-1]
        assert "m.gguf: number of tensors is 18446744073709551615" in last


# A busy machine writes what these tests pack in much less.
WRITTEN_S = 60.0
PACKED, MAPPED = "weights_layout: packed", "weights_layout: mapped"


def random_calls(num_rows: int, hidden_size: int = 256) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    rows = rng.standard_normal((num_rows, hidden_size), dtype=np.float32)
    return rows, np.array([rng.permutation(8)[:2] for _ in range(num_rows)])


def outputs(model, worker: str, rows: np.ndarray, ids: np.ndarray, **settings) -> np.ndarray:
    """What one worker of that kind answers for layer 1."""
    topology = dm.Topology.parse(f"version: 1\nworkers: [{{name: w0, threads: 2, {worker}}}]")
    with dm.ExpertRuntime.start(topology, model=model, **settings) as runtime:
        if "cache_path" in settings:
            until = time.monotonic() + WRITTEN_S
            while runtime.worker_stats()["w0"]["panel_shards_left"] and time.monotonic() < until:
                time.sleep(0.01)
        found = runtime.experts(1, rows, ids, np.full(ids.shape, 0.5, np.float32))
        assert runtime.placement.layout_of("w0") == ("mapped" if worker == MAPPED else "packed")
    return np.array(found)


def test_a_card_that_takes_packings_gives_the_bits_of_a_processor(qwen, tmp_path):
    rows, ids = random_calls(5)
    for model in (write_int4(qwen, tmp_path / "int4", "gptq", group=128), write_fp8(qwen, tmp_path / "fp8", scales="outputs")):
        processor, card = (outputs(model, worker, rows, ids) for worker in (PACKED, "backend: sim, simulate: cuda"))
        assert np.array_equal(processor.view(np.uint32), card.view(np.uint32))


def test_a_worker_that_computes_from_the_mapped_file_gives_the_bits_of_one_that_packs(qwen, tmp_path):
    model = gguf_file(qwen, tmp_path / "m.gguf", "q4_k", "q6_k")
    rows, ids = random_calls(17)
    packed, mapped = (outputs(model, worker, rows, ids) for worker in (PACKED, MAPPED))
    assert np.array_equal(packed.view(np.uint32), mapped.view(np.uint32))
