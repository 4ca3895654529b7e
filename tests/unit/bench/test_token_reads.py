"""The bytes that a token reads, against a count by hand; whose they are, and what they are held
against.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import dataclasses

import pytest

pytest.importorskip("torch")

import torch

from bench.models.families import tiny_options
from dflash_moe import ExpertRuntime, Topology
from dflash_moe.bench.forward import measure_once
from dflash_moe.bench.model_host import local_topology
from dflash_moe.bench.read_speed import ReadSpeed
from dflash_moe.bench.token_reads import Sides, count_reads, read_fields
from dflash_moe.forward.host_model import open_host
from dflash_moe.integrations.transformers import expert_calls
from dflash_moe.model.make import make_checkpoint
from dflash_moe.operators.layers.reads import dense_bytes, kv_bytes, packed_linears

pytestmark = pytest.mark.transformers

TWO = "version: 1\nhost: {threads: 1}\nworkers:\n  - {name: w0, threads: 1}\n  - {name: near, address: loopback}\n"
LONE = "version: 1\nworkers: [{name: near, address: loopback, threads: 1}]"
PROMPT = torch.arange(5)[None] + 3


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Checkpoints of families by name, in f32."""
    kept = {}

    def of(arch: str):
        if arch not in kept:
            kept[arch] = tmp_path_factory.mktemp(arch)
            make_checkpoint(tiny_options(arch, "f32"), kept[arch])
        return kept[arch]

    return of


def head_dim(config) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def dense_of_qwen3_moe(config) -> int:
    """The bytes of what a token reads of a qwen3_moe in f32 but experts, keys and values."""
    hidden, heads, kv_heads, dim = config.hidden_size, config.num_attention_heads, config.num_key_value_heads, head_dim(config)
    layer = 2 * heads * dim * hidden + 2 * kv_heads * dim * hidden + config.num_experts * hidden + 2 * hidden + 2 * dim
    return 4 * (config.num_hidden_layers * layer + hidden + hidden + config.vocab_size * hidden)


def expert_bytes(runtime) -> int:
    """The bytes of one expert as it is packed: what a worker holds, by its experts."""
    process = runtime.worker_processes()[0]
    held = sum(len(shard.experts) for shards in runtime.placement.layers for shard in shards if shard.holder == process.name)
    return process.weight_bytes // held


@pytest.mark.parametrize("operators", ["auto", "torch"])
def test_the_bytes_of_a_token_are_those_counted_by_hand(made, operators):
    directory = made("qwen3_moe")
    topology = Topology.parse(LONE)
    with ExpertRuntime.start(topology, model=directory, host_operators=operators) as runtime:
        host = open_host(directory, runtime)
        config = host.model.config
        reads = count_reads(host, runtime, PROMPT, 3, Sides.of(topology, {}))
        layers, expert = runtime.spec.layers, expert_bytes(runtime)
    experts = len(layers) * config.num_experts_per_tok * expert
    # Contexts of 6, 7 and 8 tokens.
    kv = 7 * config.num_hidden_layers * 2 * config.num_key_value_heads * head_dim(config) * 4
    by_hand = dense_of_qwen3_moe(config) + experts + kv
    assert set(reads) == {"host"}
    # Panels of the smallest matrices are padded to whole vectors; rotary modules have frequencies.
    assert by_hand <= reads["host"] <= (1.5 if operators == "auto" else 1.01) * by_hand


def test_experts_are_read_where_they_are_and_the_count_changes_no_token(made):
    directory, topology = made("qwen3_moe"), Topology.parse(TWO)
    sides = Sides.of(topology, {})
    assert (dict(sides.of_holder), dict(sides.threads)) == (
        {"host": "host", "w0": "w0", "near": "host"}, {"host": 1, "w0": 1},
    )  # fmt: skip
    with ExpertRuntime.start(topology, model=directory) as runtime:
        host = open_host(directory, runtime)
        before = measure_once(host, runtime, PROMPT, 4)
        made_before = set(expert_calls(host.model).values())
        reads = count_reads(host, runtime, PROMPT, 4, sides)
        assert {count - 5 for count in expert_calls(host.model).values()} == made_before
        assert measure_once(host, runtime, PROMPT, 4).token_ids == before.token_ids
        top_k, layers, expert = host.model.config.num_experts_per_tok, runtime.spec.layers, expert_bytes(runtime)
        every = len(layers) * top_k * expert
        rest = dense_bytes(host.model) + kv_bytes(host.model, 1) * 7.5
    assert 0 < reads["w0"] < every
    assert reads["w0"] % (expert / 4) == 0
    assert sum(reads.values()) == pytest.approx(rest + every)


@pytest.mark.parametrize("arch", ["gpt_oss", "deepseek_v3", "mixtral"])
def test_a_window_bounds_what_attention_reads_and_latents_are_counted(made, arch):
    directory = made(arch)
    with ExpertRuntime.start(Topology.parse(LONE), model=directory) as runtime:
        host = open_host(directory, runtime)
        config = host.model.config
        found = {context: kv_bytes(host.model, context) for context in (1, 2, 500, 1000)}
        packed = packed_linears(host.model)
        dense = dense_bytes(host.model)
    token = found[1]
    assert found[2] == 2 * token
    windowed = sum(kind == "sliding_attention" for kind in getattr(config, "layer_types", ()))
    full = config.num_hidden_layers - windowed
    assert found[1000] - found[500] == 500 * token * full // config.num_hidden_layers
    if arch == "deepseek_v3":
        assert token == config.num_hidden_layers * (2 * config.kv_lora_rank + config.qk_rope_head_dim) * 4
    assert dense >= sum(matrix.resident_bytes for matrix in packed) > 0


def test_a_share_needs_the_speed_of_whoever_reads():
    sides = Sides({"host": "host", "w0": "w0", "far": "far"}, {"host": 2, "w0": 1, "far": None})
    speeds = {1: ReadSpeed(1, bytes_per_s=[10.0, 30.0, 20.0]), 2: ReadSpeed(2, bytes_per_s=[40.0])}
    found = read_fields({"host": 80.0, "w0": 20.0, "far": 0.0}, sides, speeds, token_s=6.0)
    assert (found["read_bytes_per_token"], found["share_of_read"]) == (100.0, 0.5)
    assert [(part["side"], part["threads"], part["read_bytes_per_s"]) for part in found["reads"]] == [
        ("host", 2, 40.0), ("w0", 1, 20.0), ("far", None, None),
    ]  # fmt: skip
    assert read_fields({"host": 80.0, "far": 1.0}, sides, speeds, token_s=6.0)["share_of_read"] is None
    assert read_fields({"host": 80.0}, sides, {2: ReadSpeed(2)}, token_s=6.0)["share_of_read"] is None


def test_a_card_or_a_worker_elsewhere_has_no_threads_here():
    text = "version: 1\nworkers:\n  - {name: w0, threads: 1}\n  - {name: card, backend: sim, simulate: cuda}\n"
    sides = Sides.of(Topology.parse(text + "  - {name: far, address: 'tcp://10.0.0.2:7171'}\n"), {})
    assert {side: threads is None for side, threads in sides.threads.items()} == {
        "host": False, "w0": False, "card": True, "far": True,
    }  # fmt: skip


def test_all_experts_local_are_one_side_with_all_threads():
    topology = Topology.parse("version: 1\nworkers: [{name: w0, threads: 1}, {name: w1, threads: 2}]")
    local = local_topology(dataclasses.replace(topology), 4)
    assert dict(Sides.of(local, {}).threads) == {"host": 4}
