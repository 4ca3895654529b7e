"""What `doctor` tells of the host's own operators and its KV cache.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import pytest

from dflash_moe import Topology, _core
from dflash_moe.cli.doctor.doctor import examine
from dflash_moe.cli.doctor.probe_host_operators import host_operator_lines, probe_host_operators
from dflash_moe.config import resolve_settings
from dflash_moe.topology.numerics import class_on

WORKERS = "workers: [{name: w0, backend: cpu, threads: 1%s}]"


def probed(head: str = "", worker: str = "", isa: str = "", **overrides: str):
    topology = Topology.parse(f"version: 1\n{head}\n{WORKERS % worker}\n")
    settings = resolve_settings(topology.stated_settings, **overrides)
    found = probe_host_operators(topology, settings, isa or _core.best_isa())
    return found, "\n".join(host_operator_lines(found))


@pytest.mark.parametrize(
    ("head", "isa", "reason"),
    [
        ("host: {operators: torch}", "", "host.operators: torch"),
        ("host: {device: 'cuda:0'}", "", "on cuda:0 the model keeps torch's"),
        ("host: {device: 'sim:0', simulate: hip}", "", "on sim:0 the model keeps torch's"),
        ("", "reference", "kernel set reference has none"),
    ],
)
def test_it_says_why_the_models_own_operators_stay(head, isa, reason):
    found, text = probed(head, isa=isa)
    assert found["taken"] is False
    assert reason in text
    assert "bit equality in company is not claimed" in text
    assert ("free on " in text) == ("device" in head)


def test_settings_of_the_kv_cache_are_shown_as_they_are_stated():
    _, text = probed("engine: {kv_memory: 2GiB, kv_dtype: f16}")
    assert "pages of 16 tokens in f16, 2.0 GiB at most" in text
    _, text = probed("host: {device: 'cuda:0'}\nengine: {kv_memory: 2GiB}")
    assert "pages of 16 tokens in the model's dtype, with the buffer that torch's attention gathers them into 2.0 GiB" in text
    _, text = probed()
    assert "bit equality in company" not in text
    assert "in the model's dtype, 25% of the memory that is free after the weights" in text
    assert "`verify` names the modules of a model that no form fits" in text


def test_linear_layers_follow_the_workers_unless_the_host_states_a_class():
    assert probed(worker=", activations: int8", isa="scalar")[0]["numerics"] == "int8-groups"
    stated = probed("host: {activations: int8}", isa="scalar")[0]
    assert (stated["taken"], stated["numerics"]) == (True, "int8-groups")
    wished = probed(worker=", activations: bf16", isa="scalar")[0]
    assert (wished["taken"], wished["numerics"]) == (True, "f32-canonical")
    impossible = probed("host: {activations: bf16}", isa="scalar")[0]
    assert not impossible["taken"]
    assert class_on("bf16", "cpu") in impossible["reason"]


def test_a_worker_at_loopback_is_named_with_the_hosts_pool(capsys):
    from dflash_moe.cli.doctor.doctor import print_findings

    text = "version: 1\nworkers: [{name: near, threads: 1, address: loopback}, {name: far, threads: 1}]\n"
    found = examine(Topology.parse(text))
    assert found["machine"]["threads"]["host_pool"] == ["operators", "experts", "encoding", "near"]
    print_findings(found)
    assert "(one pool: operators, experts, encoding, near; torch has one beside it)" in capsys.readouterr().out
