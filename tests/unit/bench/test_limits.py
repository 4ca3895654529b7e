"""`bench limits`: bytes and multiply-adds against counts by hand, parts that add up to the whole, a
clock that changes no bit, the first layers of a model, and what bad input gets.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import json
import types
from collections import Counter
from contextlib import closing

import pytest

pytest.importorskip("torch")

import torch

from dflash_moe import ExpertRuntime, Topology, _core
from dflash_moe.bench import read_speed
from dflash_moe.bench.harness import Recorder, Silent
from dflash_moe.bench.limit_parts import Limits, OperationPeak, Part, Work, split_call, step_fields, worker_part
from dflash_moe.bench.limits import LimitsParams, Watch, Workload, run_limits
from dflash_moe.bench.model_host import MeasuredHost
from dflash_moe.bench.read_speed import ReadSpeed
from dflash_moe.bench.results import read_result
from dflash_moe.bench.token_reads import ExpertWork, Sides
from dflash_moe.cli.bench.limits import print_limits
from dflash_moe.cli.main import run
from dflash_moe.errors import ConfigError
from dflash_moe.forward.forward import StepRows
from dflash_moe.forward.host_model import open_host
from dflash_moe.integrations.transformers import experts_watched
from dflash_moe.operators.layers.reads import kv_bytes, linear_names, packed_linears
from tests.host_models import checkpoint, topology

pytestmark = pytest.mark.transformers

PROMPT, STEPS, SEQUENCES = 20, 3, 2
IDS = list(range(3, 40))


@pytest.fixture(scope="module")
def opened():
    """A tiny model in f32 with all experts in this process, in one thread."""
    placed = topology("loopback")
    with ExpertRuntime.start(placed, model=checkpoint("qwen3_moe", "f32"), kv_memory="16MiB") as runtime:
        host = MeasuredHost(runtime, open_host(checkpoint("qwen3_moe", "f32"), runtime), Sides.of(placed, {}))
        yield host


def watched(host, load, *, counts=False):
    watch = Watch(host, linear_names(host.model.model), ExpertWork(host.runtime, host.sides), counts)
    load.run(host.model.packed, IDS, watch)
    return watch


def test_bytes_and_multiply_adds_of_a_decode_are_those_counted_by_hand(opened):
    config = opened.model.model.config
    load = Workload("decode", SEQUENCES, 1, STEPS, PROMPT)
    watch = watched(opened, load)
    parts = {part.name: part for part in watch.parts}
    layers, hidden, heads = config.num_hidden_layers, config.hidden_size, config.num_attention_heads
    dim = hidden // heads
    queries, keys = heads * dim, config.num_key_value_heads * dim
    linears = {
        "query, key, value": (layers, hidden * (queries + 2 * keys)),
        "output": (layers, hidden * queries),
        "router": (layers, hidden * config.num_experts),
        "lm_head": (1, hidden * config.vocab_size),
    }
    names, held = linear_names(opened.model.model), Counter[str]()
    for packed in packed_linears(opened.model.model):
        name = names.get(packed.address, "")
        held["query, key, value" if name in ("key", "value") else name] += packed.resident_bytes
    for name, (calls, weights) in linears.items():
        work = parts[name].works[0]
        assert parts[name].calls == calls, name
        assert work.multiply_adds == {"f32-canonical": SEQUENCES * calls * weights}, name
        assert work.num_bytes == held[name] >= calls * weights * 4, name
    contexts = range(PROMPT + 1, PROMPT + STEPS + 1)
    attention = parts["attention"].works[0]
    seen = SEQUENCES * sum(contexts) / STEPS
    assert attention.multiply_adds == {"f32-canonical": pytest.approx(layers * seen * heads * 2 * dim)}
    assert attention.num_bytes == SEQUENCES * sum(kv_bytes(opened.model.model, one) for one in contexts) / STEPS
    assert parts["norm"].calls == 4 * layers + 1
    assert (parts["rotary"].calls, parts["append"].calls, parts["route"].calls) == (2 * layers, layers, layers)


def test_the_experts_of_the_clock_are_those_of_the_routing(opened):
    load = Workload("prefill", 1, 30, 1, 0)
    clocked = {part.name: part.works[0] for part in watched(opened, load).parts}
    routed = watched(opened, load, counts=True).work
    expected = sum(routed.multiply_adds.values())
    found = sum(clocked[name].multiply_adds["f32-canonical"] for name in ("expert gate, up", "expert down"))
    assert found == expected == sum(Counter(routed.multiply_adds).values()) > 0
    read = clocked["expert gate, up"].num_bytes + clocked["expert down"].num_bytes
    # What holders keep of an expert has biases and the like beside its panels.
    assert read == pytest.approx(routed.num_bytes["host"], rel=0.02)
    # Each of thirty rows goes to its experts once in each layer.
    config = opened.model.model.config
    weights = 3 * config.hidden_size * config.moe_intermediate_size
    assert expected == config.num_hidden_layers * 30 * config.num_experts_per_tok * weights


def test_every_moment_of_a_step_is_in_one_part(opened):
    watch = watched(opened, Workload("decode", 1, 1, STEPS, PROMPT))
    found = step_fields(watch.parts, watch.whole_s, Limits())
    total = sum(part["seconds"] for part in found["parts"]) + found["rest_s"]
    assert total == pytest.approx(watch.whole_s)
    assert found["rest_s"] >= 0
    # Only the two calls that start and stop the clock are in no part. Somebody else may have the
    # processor between them, but not each time.
    again = [watched(opened, Workload("decode", 1, 1, STEPS, PROMPT)) for _ in range(20)]
    assert min(one.whole_s - sum(part.seconds for part in one.parts) for one in again) < found["python_s"]
    assert {part["part"] for part in found["parts"]} >= {"Python and torch", "expert call", "expert groups", "add"}
    assert all(0 <= part["fork_wait_s"] <= part["seconds"] for part in found["parts"])
    # Nothing was measured that bounds it.
    assert (found["bound_s"], found["share"]) == (None, None)


def test_the_clock_changes_no_logit_and_ends_with_its_block(opened):
    forward = opened.model.packed

    def logits():
        sequence = forward.admit(len(IDS))
        try:
            return forward.forward([StepRows(sequence, IDS)])
        finally:
            sequence.release()

    before = logits()
    _core.start_operator_clock()
    during = logits()
    assert {one.operator for one in _core.stop_operator_clock()} > {"outside", "linear", "expert down"}
    assert torch.equal(before, during)
    assert torch.equal(before, logits())
    assert _core.stop_operator_clock() == []


def limits_of(speed, peak):
    limits = Limits({2: ReadSpeed(2, bytes_per_s=[speed])}, {("f32-canonical", 2): OperationPeak("f32-canonical", 2)})
    limits.peaks["f32-canonical", 2].per_s = [peak]
    return limits


def test_a_part_has_the_larger_of_its_bounds_and_a_step_their_sum():
    f32 = "f32-canonical"
    parts = [
        Part("outside", 0, 1.0),
        Part("linear", 1, 4.0, 0.5, [Work(2, 200.0, {f32: 10.0})]),
        Part("lm_head", 1, 3.0, 0.25, [Work(2, 100.0, {f32: 60.0})]),
    ]
    found = step_fields(parts, 9.0, limits_of(100.0, 30.0))
    assert [row["part"] for row in found["parts"]] == ["linear", "lm_head", "Python and torch"]
    bounds = [(row["bound_s"], row["bound_by"]) for row in found["parts"]]
    assert bounds == [(2.0, "bytes"), (2.0, "instructions"), (0.0, None)]
    assert [row["share"] for row in found["parts"]] == [0.5, pytest.approx(2 / 3), None]
    assert (found["fork_wait_s"], found["python_s"], found["rest_s"]) == (0.75, 1.0, 1.0)
    assert (found["bound_s"], found["share"]) == (4.0, pytest.approx(4 / 9))
    # A side whose memory is not this machine's has no limit that could be measured here.
    parts[1].works[0].threads = None
    assert step_fields(parts, 9.0, limits_of(100.0, 30.0))["share"] is None


def test_workers_compute_side_by_side_and_the_rest_of_the_call_is_its_way():
    def slices(call, worker, begin, end):
        times = {"worker_started_ns": begin * 10**9, "worker_finished_ns": end * 10**9}
        return {"call_id": call, "worker": worker, **times}

    traces = [slices(1, 0, 0, 2), slices(1, 1, 0, 3), slices(2, 0, 5, 9), slices(2, 2, 5, 30)]
    work = types.SimpleNamespace(num_bytes={"w0": 400, "w1": 40}, multiply_adds={("w0", "f32-canonical"): 8})
    sides = Sides({}, {"host": 1, "w0": 2, "w1": 2})
    part = worker_part(traces, ["w0", "w1", "host"], work, sides, "host", steps=2)
    assert (part.calls, part.seconds) == (1, 3.5)
    assert part.works == [Work(2, 200, {"f32-canonical": 4}), Work(2, 20, {})]
    parts = split_call([Part("expert call", 2, 5.0)], part)
    assert [(one.name, one.seconds) for one in parts] == [("expert call", 1.5), ("experts at workers", 3.5)]
    # The larger of both workers bounds them, because they read at the same time.
    assert step_fields(parts, 5.0, limits_of(100.0, 30.0))["bound_s"] == 2.0
    assert worker_part(traces[3:], ["w0", "w1", "host"], work, sides, "host", steps=2) is None


def test_a_run_has_local_rows_and_those_of_workers_and_prints_them(tmp_path, capsys, monkeypatch):
    # Eight times a last cache of 300 MB is 2 GB, which every thread would read in every round.
    monkeypatch.setattr(read_speed, "CACHES", 0)
    out = tmp_path / "limits.json"
    placed = tmp_path / "t.yaml"
    placed.write_text("version: 1\nhost: {threads: 1}\nworkers: [{name: w0, threads: 1}]\n")
    code = run(
        ["bench", "limits", "--model", str(checkpoint("qwen3_moe", "bf16")), "--topology", str(placed),
         "--sequences", "1,3", "--prefill", "24,60000", "--prompt-tokens", "8", "--new-tokens", "2",
         "--repeat", "1", "--layers", "1", "--json", str(out)],
    )  # fmt: skip
    said = capsys.readouterr()
    assert code == 0, said.err
    # The model has no positions for so many rows.
    assert "prefill 60,000 is left out" in said.err
    found = read_result(out, case="limits")
    names = [f"{where}, {load}" for where in ("local", "workers") for load in ("decode 1", "decode 3", "prefill 24")]
    assert [row["name"] for row in found["rows"]] == names
    for row in found["rows"]:
        parts = {part["part"]: part for part in row["parts"]}
        assert parts["output"]["calls"] == 1
        assert ("experts at workers" in parts) is (row["where"] == "workers") is not ("expert down" in parts)
        assert 0 < row["bound_s"] == pytest.approx(sum(part["bound_s"] for part in row["parts"]))
        assert row["share"] == pytest.approx(row["bound_s"] / row["step_s"])
        assert f"{row['name']}: " in said.out
    assert found["params"]["huge_pages"].keys() == {"local: host", "workers: host", "workers: w0"}
    assert said.out.count("huge pages") == 3
    assert json.loads(out.read_text())["complete"]


def test_a_system_that_does_not_say_what_lies_on_huge_pages_gets_a_line(capsys):
    pages = {"host": {"anonymous_bytes": 5, "huge_bytes": None}, "w0": {"anonymous_bytes": 5, "huge_bytes": 0}}
    print_limits(types.SimpleNamespace(rows=[], params={"huge_pages": pages}))
    assert capsys.readouterr().out.splitlines()[-2:] == [
        "host: this system does not say what lies on huge pages", "w0: nothing lies on huge pages",
    ]  # fmt: skip


def test_a_model_that_memory_does_not_hold_is_told_of_layers(monkeypatch):
    monkeypatch.setattr("dflash_moe.holders.memory_check.memory_available", lambda: 1000)
    params = LimitsParams(checkpoint("qwen3_moe", "bf16"), repeat=1)
    with pytest.raises(ConfigError, match=r"memory: .* GiB short.*--layers N measures the first N layers"):
        run_limits(
            params,
            Topology.parse("version: 1\nworkers: [{name: w0, threads: 1}]"),
            recorder=Recorder(None, Silent()),
            overrides={},
        )  # noqa: E501


def test_the_first_layers_of_a_model_give_what_the_whole_has_there(tmp_path):
    from bench.models.gguf_files import write_gguf
    from dflash_moe.model.first_layers import first_layers
    from dflash_moe.model.spec import model_spec

    whole = checkpoint("qwen3_moe", "f32")
    pytest.importorskip("gguf")
    file = write_gguf(whole, tmp_path / "m.gguf", "f32")
    seen: list[int] = []
    for path in (whole, file):
        full = model_spec(path)
        with (
            first_layers(path, 1) as cut,
            ExpertRuntime.start(topology("loopback"), model=cut, kv_memory="16MiB") as runtime,
        ):
            assert runtime.spec.layers == full.layers[:1]
            host = open_host(cut, runtime)
            assert host.model.config.num_hidden_layers == 1
            with closing(host.sequence(4)) as sequence, experts_watched(host.model, lambda at, _ids: seen.append(at)):
                assert sequence.forward([5, 6]).isfinite().all()
        assert not cut.exists()
        with pytest.raises(ConfigError, match=rf"--layers 9: .* has {len(full.layers)} layers"), first_layers(path, 9):
            pass
    assert seen == [0, 0]
