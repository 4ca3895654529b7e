"""Topology files: what is read, and the error with file and line for everything that is wrong.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_moe import _core
from dflash_moe.config import ACTIVATIONS, BLOCK_TOKENS, MemoryBudget, Settings, resolve_settings
from dflash_moe.errors import ConfigError, TopologyError
from dflash_moe.topology import Topology, WorkerSpec
from dflash_moe.topology.numerics import CLASSES, class_on, possible_classes
from dflash_moe.topology.parse import MAX_EXPERT_ID, MAX_FILE_BYTES, MAX_LAYER, MAX_WORKERS
from dflash_moe.topology.write import to_yaml

BF16_CLASS = class_on("bf16", "cpu")
BF16_OF_CARD = "bf16"  # of AMD's: which class it is, the card says

HEAD = "version: 1\n"
ONE = "workers: [{name: w0}]\n"
MATRIX = ("bf16-mma", "bf16-mfma", "bf16-wmma")
CONFIGS = Path(__file__).resolve().parents[3] / "configs"

FULL = """\
version: 1
host:
  device: CUDA:1
  threads: 2
  experts: {memory: 12.5%}
  operators: Torch
engine: {block_tokens: 16, kv_memory: 37.5%, kv_dtype: BF16, speculate: off, prefix_cache: on}
ipc: {mode: Stream, call_timeout_s: 5, stream_tokens: 8, required: 1, shared_bytes: 1MiB}
placement: {policy: explicit}
workers:
  - {name: w0, backend: cpu, threads: 3, memory: 8GiB, experts: {"*": "0-3,6"}}
  - {name: card, backend: hip, device: 2, experts: {"*": []}}
  - {name: fake, backend: sim, simulate: cuda, experts: {"*": 7}}
  - name: slow
    address: unix
    experts: {"*": "4-5", "3": [4, 5]}
    emulate: {delay_ms: 2, jitter_ms: 0.5, mbit_s: 200, slowdown: 4}
  - {name: far.b-2, address: "tcp://10.0.0.2:7171", experts: {"*": ""}}
"""


def test_every_key_is_read():
    topology = Topology.parse(FULL.replace('"*": ""', '"*": [8]'), "full.yaml")
    assert (topology.version, topology.source, topology.placement.policy) == (1, "full.yaml", "explicit")
    assert (topology.host.device, topology.host.threads, topology.host.experts_memory.resolve(800)) == ("cuda:1", 2, 100)
    assert dict(topology.ipc) == {
        "mode": "stream", "call_timeout_s": 5.0, "stream_tokens": 8, "required": True, "shared_bytes": 1 << 20,
    }  # fmt: skip
    assert dict(topology.engine) == {
        "block_tokens": BLOCK_TOKENS,
        "kv_memory": MemoryBudget(fraction=0.375),
        "kv_dtype": "bf16",
        "speculate": "off",
        "prefix_cache": True,
    }
    assert topology.host.operators == "torch"
    w0, card, fake, slow, far = topology.workers
    assert (w0.backend, w0.threads, w0.memory, w0.line) == ("cpu", 3, 8 << 30, 11)
    assert w0.experts.for_layer(0, 9) == (0, 1, 2, 3, 6)
    assert (card.backend, card.device, card.experts.for_layer(0, 9)) == ("hip", 2, ())
    assert (fake.backend, fake.simulate, fake.experts.for_layer(1, 9)) == ("sim", "cuda", (7,))
    assert (slow.emulate.delay_ms, slow.emulate.jitter_ms, slow.emulate.mbit_s, slow.emulate.slowdown) == (2, 0.5, 200, 4)
    assert slow.experts.for_layer(3, 9) == slow.experts.for_layer(2, 9) == (4, 5)
    assert slow.experts.named_layers() == (3,)
    assert str(far.parsed_address) == "tcp://10.0.0.2:7171"
    assert [worker.name for worker in topology.local_workers()] == ["w0", "card", "fake", "slow"]


def test_what_is_left_out_has_its_default():
    topology = Topology.parse(HEAD + "host:\nipc: {}\n" + ONE)
    assert (topology.host.device, topology.host.threads, topology.host.experts_memory.resolve(10**9)) == ("auto", None, 0)
    worker = topology.workers[0]
    assert (worker.backend, worker.threads, worker.memory, worker.address, worker.experts) == ("cpu", None, None, None, None)
    assert (topology.placement.policy, worker.parsed_address.kind, worker.is_started_by_host) == ("even", "shared", True)


# text, line of the error, what the message says
WRONG = [
    ("", 1, "empty"),
    ("# nothing\n", 1, "empty"),
    ("- 1\n", 1, "must be a map of keys, found a list"),
    ("version: 1\nfailure: {restart: {deats: 3}}\n" + ONE, 2, "unknown key 'failure.restart.deats'; did you mean 'deaths'"),
    ("version: 1\nfailure: {restrat: off}\n" + ONE, 2, "unknown key 'failure.restrat'; did you mean 'restart'"),
    ("version: 1\nfailure: {restart: {backoff_ms: [9, 3]}}\n" + ONE, 2, "failure.restart.backoff_ms: [9, 3] is not allowed"),
    ("version: 1\nfailure: {restart: {deaths: 0}}\n" + ONE, 2, "failure.restart.deaths: 0 is not allowed"),
    ("just words", 1, "must be a map of keys, found a value 'just words'"),
    (ONE, 1, "'version' is missing"),
    ("version: 2\n" + ONE, 1, "version 2 is not supported; this dflash_moe reads version 1"),
    ("version: true\n" + ONE, 1, "version True"),
    ('version: "1"\n' + ONE, 1, "version '1'"),
    (HEAD, 1, "'workers' is missing"),
    (HEAD + "workers: []\n", 2, "workers is empty"),
    (HEAD + "workers: {w0: 1}\n", 2, "workers must be a list, found a map"),
    (HEAD + "workers: [w0]\n", 2, "workers[0] must be a map"),
    (HEAD + f"workers: [{'{name: w0}, ' * (MAX_WORKERS + 1)}]\n", 2, f"at most {MAX_WORKERS}"),
    (HEAD + ONE + "worker: 1\n", 3, "unknown key 'worker'; did you mean 'workers'?"),
    (HEAD + "host: {treads: 1}\n" + ONE, 2, "unknown key 'host.treads'; did you mean 'threads'?"),
    (HEAD + "host:\n  experts:\n    memry: 1\n" + ONE, 4, "unknown key 'host.experts.memry'; did you mean 'memory'?"),
    (HEAD + "ipc: {moed: auto}\n" + ONE, 2, "unknown key 'ipc.moed'; did you mean 'mode'?"),
    (HEAD + "ipc: {zzz: 1}\n" + ONE, 2, "unknown key 'ipc.zzz'; known keys: mode"),
    (HEAD + "placement: {polcy: even}\n" + ONE, 2, "did you mean 'policy'?"),
    (HEAD + "workers:\n  - {name: w0, thread: 1}\n", 3, "unknown key 'workers[0].thread'; did you mean 'threads'?"),
    (HEAD + "workers:\n  - name: w0\n    emulate: {delay: 1}\n", 4, "did you mean 'delay_ms'?"),
    (HEAD + ONE + "version: 1\n", 3, "duplicate key 'version'; it is also on line 1"),
    (HEAD + "workers:\n- name: w0\n  name: w1\n", 4, "duplicate key 'workers[0].name'; it is also on line 3"),
    (HEAD + "workers: &a [{name: w0}]\n", 2, "anchors and aliases are not allowed"),
    (HEAD + "workers: *a\n", 2, "anchors and aliases are not allowed"),
    (HEAD + "workers: !!python/object:os.system [x]\n", 2, "tag"),
    (HEAD + "<<: {a: 1}\n" + ONE, 2, "unknown key '<<'"),
    (HEAD + "? [a]\n: 1\n" + ONE, 2, "a key must be a single word"),
    (HEAD + "workers: [" * 40, 2, "nested deeper than 16 levels"),
    (HEAD + "workers: workers: 1\n", 2, "mapping values are not allowed"),
    (HEAD + "workers: " + "[" * 40 + "]" * 40, 2, "nested deeper than 16 levels"),
    (HEAD + "workers: [{name: w0]\n", 2, "expected"),
    (HEAD + "--- \n" + HEAD + ONE, 2, "document"),
    (HEAD + "workers:\n\t- {name: w0}\n", 3, "cannot start any token"),
    (HEAD + "host: \x07\n" + ONE, 2, "character"),
    (HEAD + "host: {device: gpu}\n" + ONE, 2, "host.device: 'gpu' is not allowed; allowed: auto, cpu, cuda:N, hip:N"),
    (HEAD + "host: {threads: 0}\n" + ONE, 2, "host.threads: 0 is not allowed; allowed: whole numbers 1..1024"),
    (HEAD + "host: {threads: 1.5}\n" + ONE, 2, "host.threads: 1.5"),
    (HEAD + "host: {threads: true}\n" + ONE, 2, "host.threads: True"),
    (HEAD + "host: {experts: {memory: 101%}}\n" + ONE, 2, "'101%' is not allowed; allowed: 0%..100%"),
    (HEAD + "host: {experts: {memory: some}}\n" + ONE, 2, "'some' is not allowed; allowed: 0%..100%, bytes"),
    (HEAD + "ipc: {mode: fast}\n" + ONE, 2, "ipc.mode: 'fast' is not allowed; allowed: auto, batched, stream"),
    (HEAD + "ipc:\n  mode: auto\n  batch_capacity: 0\n" + ONE, 4, "ipc.batch_capacity: 0 is not allowed; allowed: 1..4096"),
    (HEAD + "ipc: {call_timeout_s: .inf}\n" + ONE, 2, "not a finite number"),
    (HEAD + "ipc: {call_timeout_s: [1]}\n" + ONE, 2, "must be a single value"),
    (HEAD + "placement: {policy: evn}\n" + ONE, 2, "allowed: even, memory, explicit; did you mean 'even'?"),
    (HEAD + "workers: [{backend: cpu}]\n", 2, "workers[0] has no name"),
    (HEAD + "workers: [{name: a b}]\n", 2, "worker name 'a b' is not allowed; allowed: 1..63 letters"),
    (HEAD + "workers: [{name: -a}]\n", 2, "worker name '-a' is not allowed"),
    (HEAD + f"workers: [{{name: {'x' * 64}}}]\n", 2, "is not allowed; allowed: 1..63"),
    (HEAD + "workers: [{name: [w0]}]\n", 2, "single value"),
    (
        HEAD + "workers:\n- backend: cpu\n  name: NO\n",
        4,
        "workers[0].name must be text, found NO, which YAML reads as False; put it",
    ),
    (HEAD + "workers: [{name: 1.0}]\n", 2, "workers[0].name must be text, found 1.0; put it in quotes"),
    (HEAD + "workers: [{name: 0777}]\n", 2, "workers[0].name: '0777' is no plain decimal number"),
    (HEAD + "workers: [{name: Host}]\n", 2, "worker name 'Host' is reserved for the host process"),
    (HEAD + "workers:\n- {name: a}\n- {name: a}\n", 4, "worker name 'a' is also on line 3"),
    (HEAD + "workers: [{name: a, backend: cpus}]\n", 2, "allowed: cpu, cuda, hip, sim; did you mean 'cpu'?"),
    (HEAD + "workers: [{name: a, threads: 1025}]\n", 2, "1..1024"),
    (HEAD + "workers: [{name: a, memory: 0}]\n", 2, "workers[0].memory: 0 is not allowed"),
    (
        HEAD + "workers: [{name: a, memory: 0777}]\n",
        2,
        "workers[0].memory: '0777' is no plain decimal number, and YAML would read",
    ),
    (HEAD + "workers: [{name: a, memory: 1__}]\n", 2, "write digits alone, the first of which is not 0"),
    (HEAD + "workers: [{name: a, memory: 0x10}]\n", 2, "workers[0].memory: '0x10' is no plain decimal number"),
    (HEAD + "workers: [{name: a, threads: 010}]\n", 2, "workers[0].threads: '010' is no plain decimal number"),
    (HEAD + "failure: {park_s: 1_0.5}\n" + ONE, 2, "failure.park_s: '1_0.5' is no plain decimal number"),
    (HEAD + "workers: [{name: a, memory: 8G}]\n", 2, "'8G' is not allowed; allowed: bytes, or a number with KiB"),
    (HEAD + "workers: [{name: a, memory: 50%}]\n", 2, "'50%' is not allowed"),
    (HEAD + "workers: [{name: a, device: 0}]\n", 2, "worker a has a device, but backend 'cpu'"),
    (HEAD + "workers: [{name: a, backend: cuda, device: -1}]\n", 2, "0..255"),
    (HEAD + "workers: [{name: a, weights: int2}]\n", 2, "allowed: auto, int8, int4"),
    (HEAD + "workers: [{name: a, activations: int4}]\n", 2, "allowed: f32, int8, bf16, f16"),
    (HEAD + "host: {activations: f64}\n" + ONE, 2, "allowed: f32, int8, bf16, f16"),
    (HEAD + "host: {operators: own}\n" + ONE, 2, "host.operators: 'own' is not allowed; allowed: auto, torch"),
    (HEAD + "host: {operators: tork}\n" + ONE, 2, "allowed: auto, torch; did you mean 'torch'?"),
    (HEAD + "host: {operator: torch}\n" + ONE, 2, "unknown key 'host.operator'; did you mean 'operators'?"),
    (HEAD + "engin: {}\n" + ONE, 2, "unknown key 'engin'; did you mean 'engine'?"),
    (HEAD + "engine: 16\n" + ONE, 2, "engine must be a map of keys"),
    (HEAD + "engine: {kv_memry: 1}\n" + ONE, 2, "unknown key 'engine.kv_memry'; did you mean 'kv_memory'?"),
    (HEAD + "engine:\n  block_tokens: 32\n" + ONE, 3, "engine.block_tokens: 32 is not allowed; allowed: 16, which is the page"),
    (HEAD + "engine: {kv_memory: 101%}\n" + ONE, 2, "engine.kv_memory: '101%' is not allowed; allowed: above 0% and at most"),
    (HEAD + "engine: {kv_memory: [1]}\n" + ONE, 2, "engine.kv_memory must be a single value"),
    (HEAD + "engine: {kv_dtype: fp8}\n" + ONE, 2, "engine.kv_dtype: 'fp8' is not allowed; allowed: auto, f32, f16, bf16"),
    (HEAD + "workers: [{name: a, cpus: some}]\n", 2, "workers[0].cpus: 'some' names no CPUs; write auto, none, or"),
    (HEAD + "workers: [{name: a, cpus: 3-1}]\n", 2, "'3-1' names no CPUs"),
    (HEAD + "workers: [{name: a, cpus: true}]\n", 2, "'True' names no CPUs"),
    (HEAD + "workers: [{name: a, cpus: '0-3,2'}]\n", 2, "lists a CPU of worker a twice"),
    (HEAD + "workers:\n- {name: a, cpus: 0-1}\n- {name: b, cpus: 1}\n", 4, "CPU 1 belongs to both a and b; list it once"),
    (HEAD + "workers: [{name: a, backend: sim}]\n", 2, "no simulate"),
    (HEAD + "workers: [{name: a, simulate: cuda}]\n", 2, "simulate belongs to sim"),
    (HEAD + "workers: [{name: a, backend: sim, simulate: cpu}]\n", 2, "allowed: cuda, hip"),
    (HEAD + "workers: [{name: a, address: udp}]\n", 2, "address 'udp' is not one of loopback, unix, tcp"),
    (HEAD + "workers: [{name: a, address: 'tcp://h'}]\n", 2, "tcp://HOST:PORT"),
    (HEAD + "workers: [{name: a, address: 'tcp://h:0'}]\n", 2, "port 0"),
    (HEAD + "workers: [{name: a, address: 'unix://x'}]\n", 2, "must be absolute"),
    (HEAD + "workers: [{name: a, address: 7171}]\n", 2, "workers[0].address must be text, found 7171"),
    (HEAD + "workers:\n- {name: a, address: 'tcp://h:1'}\n- {name: b, address: 'tcp://h:1'}\n", 4, "a and b have the same"),
    (HEAD + "workers: [{name: a, emulate: {slowdown: 0.5}}]\n", 2, "slowdown: 0.5 is not allowed; allowed: numbers 1..1000"),
    (HEAD + "workers: [{name: a, emulate: {delay_ms: -1}}]\n", 2, "numbers 0..60000"),
    (HEAD + "workers: [{name: a, emulate: {mbit_s: fast}}]\n", 2, "mbit_s: 'fast'"),
    (HEAD + "workers: [{name: a, emulate: {mbit_s: 0.000001}}]\n", 2, "allowed: 0 (no limit) or at least 0.01"),
    (HEAD + "workers: [{name: a, emulate: {jitter_ms: .nan}}]\n", 2, "'.nan' is not a finite number"),
    (HEAD + "workers: [{name: a, experts: {'*': 0-3}}]\n", 2, "placement.policy is 'even'; write policy: explicit"),
    (HEAD + "placement: {policy: explicit}\n" + ONE, 3, "worker w0 has no experts; placement.policy explicit needs it"),
    (HEAD + "placement: {policy: memory}\n" + ONE, 3, "worker w0 has no memory; placement.policy memory needs it"),
]

# contents of a worker's `experts`, what the message says
WRONG_EXPERTS = [
    ("0-3", "must be a map of keys"),
    ("{}", "is empty"),
    ("{x: 1}", "'x' is no layer; write 0..4095"),
    ("{'4096': 1}", "'4096' is no layer"),
    ("{'*': 3-1}", "'3-1' names no experts"),
    ("{'*': -1}", "'-1' names no experts"),
    ("{'*': a}", "'a' names no experts"),
    ("{'*': '0-3,,4'}", "'' names no experts"),
    ("{'*': 65535}", "names no experts"),
    ("{'*': 0-99999}", "names no experts"),
    ("{'*': '0-3,3'}", "expert 3 is listed twice"),
    ("{'*': [1, 1]}", "expert 1 is listed twice"),
    ("{'*': [[1]]}", "single value"),
    ("{'3': 1, '03': 2}", "layer 3 is listed twice"),
    ("{3: 1, '3': 2}", "duplicate key"),
]


@pytest.mark.parametrize(("text", "line", "says"), WRONG)
def test_a_wrong_topology_is_refused_with_file_and_line(text, line, says):
    with pytest.raises(TopologyError) as caught:
        Topology.parse(text, "some.yaml")
    assert str(caught.value).startswith(f"some.yaml:{line}: ")
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("experts", "says"), WRONG_EXPERTS)
def test_a_wrong_list_of_experts_is_refused(experts, says):
    with pytest.raises(TopologyError, match="^x:4: ") as caught:
        Topology.parse(HEAD + f"placement: {{policy: explicit}}\nworkers:\n- {{name: w0, experts: {experts}}}\n", "x")
    assert says in str(caught.value)


def test_files_are_bounded_readable_and_text(tmp_path):
    path = tmp_path / "t.yaml"
    with pytest.raises(TopologyError, match=r"t.yaml:1: .*No such file"):
        Topology.load(path)
    path.write_bytes(HEAD.encode() + b"# caf\xe9\n")
    with pytest.raises(TopologyError, match="t.yaml:2: the file is not UTF-8"):
        Topology.load(path)
    for filler in (b"#", b"\xe9"):
        path.write_bytes((HEAD + ONE).encode() + filler * MAX_FILE_BYTES)
        with pytest.raises(TopologyError, match=f"t.yaml:1: the file is larger than {MAX_FILE_BYTES}"):
            Topology.load(path)
    path.write_text(HEAD + ONE)
    assert Topology.load(str(path)).source == str(path)


def test_an_expert_beyond_the_layer_is_named():
    topology = Topology.parse(HEAD + "placement: {policy: explicit}\nworkers: [{name: w0, experts: {'*': 0-7}}]")
    with pytest.raises(ValueError, match="expert 7 does not exist in layer 2, which has experts 0-3"):
        topology.workers[0].experts.for_layer(2, 4)


CPUS = "is not allowed; allowed: auto, none, or a tuple of different CPUs, such as (0, 1)"
# fields of a WorkerSpec, and the whole message
WRONG_SPECS: list[tuple[dict[str, Any], str]] = [
    ({"name": ""}, "worker name '' is not allowed; allowed: 1..63 letters, digits, '_', '-', '.', the first a letter or digit"),
    ({"name": 3}, "worker name 3 is not allowed; allowed: 1..63 letters, digits, '_', '-', '.', the first a letter or digit"),
    ({"threads": "2"}, "worker a: threads '2' is not allowed; allowed: None, or a whole number, 1..1024"),
    ({"threads": True}, "worker a: threads True is not allowed; allowed: None, or a whole number, 1..1024"),
    (
        {"memory": "8GiB"},
        "worker a: memory '8GiB' is not allowed; allowed: None, or a whole number of bytes, 1..1125899906842624",
    ),
    ({"weights_layout": "zz"}, "worker a: weights_layout 'zz' is not allowed; allowed: auto, packed, mapped, stored"),
    ({"weights": ["int8"]}, "worker a: weights ['int8'] is not allowed; allowed: auto, int8, int4"),
    ({"activations": "f64"}, f"worker a: activations 'f64' is not allowed; allowed: None, {', '.join(ACTIVATIONS)}"),
    ({"backend": "cpus"}, "worker a: backend 'cpus' is not allowed; allowed: cpu, cuda, hip, sim"),
    ({"cpus": "zz"}, f"worker a: cpus 'zz' {CPUS}"),
    (
        {"cpus": (1, 1)},
        "worker a: cpus (1, 1) is not allowed; allowed: auto, none, or a tuple of different CPUs, such as (0, 1)",
    ),
    ({"experts": "0-3"}, "worker a: experts '0-3' is not allowed; allowed: None, or an object of class ExpertSelection"),
    ({"address": 7171}, "address 7171 is not one of loopback, unix, tcp, tcp://HOST:PORT, unix:///PATH or registered"),
    ({"device": 0}, "worker a has a device, but backend 'cpu'; devices belong to cuda and hip"),
    (
        {"backend": "cuda", "weights_layout": "mapped"},
        "worker a has backend cuda; only cpu computes from the mapped checkpoint",
    ),
    (
        {"backend": "hip", "weights_layout": "stored"},
        "worker a has backend hip; only cpu computes from stored panels; write weights_layout: auto",
    ),
]


@pytest.mark.parametrize(("fields", "says"), WRONG_SPECS)
def test_a_worker_that_a_program_makes_obeys_the_rules_of_a_file(fields, says):
    with pytest.raises(ConfigError) as caught:
        WorkerSpec(**{"name": "a", **fields})
    assert str(caught.value) == says


def test_a_name_that_yaml_takes_for_a_number_is_kept_as_it_is_written():
    topology = Topology.parse(HEAD + "workers: [{name: 12}, {name: 'NO'}, {name: '1.0'}, {name: 2020-01-01}]")
    assert [worker.name for worker in topology.workers] == ["12", "NO", "1.0", "2020-01-01"]


WRONG_LOCAL = [
    {"num_workers": 0}, {"num_workers": 257}, {"threads": 0}, {"memory": 0}, {"address": "x"}, {"names": ["host"]},
    {"names": ["a", "a"]},
]  # fmt: skip


@pytest.mark.parametrize("arguments", WRONG_LOCAL)
def test_local_topologies_obey_the_same_rules(arguments):
    with pytest.raises(ConfigError):
        Topology.local(**arguments)


def test_local_topologies_have_numbered_workers():
    topology = Topology.local(2, threads=3, address="unix", memory=5)
    assert [(w.name, w.threads, w.address, w.memory) for w in topology.workers] == [("w0", 3, "unix", 5), ("w1", 3, "unix", 5)]
    assert topology.worker("w1") is topology.workers[1]
    with pytest.raises(TopologyError, match="no worker is named 'w2'; it has w0, w1"):
        topology.worker("w2")


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.name)
def test_every_shipped_topology_opens_with_a_picture_and_parses(path):
    text = path.read_text(encoding="utf-8")
    head = text.partition("version:")[0]
    assert all(line.startswith("#") for line in head.splitlines())
    assert f"configs/{path.name}" in head, "the head names the command that uses the file"
    assert "--" in head
    assert Topology.load(path).workers


TOKENS = st.sampled_from(
    ["version: 1", "workers", ":", " ", "\n", "- ", "{", "}", "[", "]", ",", "name", "w0", "host", "ipc", "experts", "'*'",
     "0-3", "memory", "25%", "8GiB", "&a", "*a", "!!set", "|", ">", "? ", "#", "\t", "placement", "policy", "explicit",
     "emulate", "1e400", "0x_", "2001-99-99", ".nan", "~", "address", "tcp://[::1]:1", "9" * 5000, "\ud800", "\x00",
     "%YAML 1.1\n", "---", "1:2:3"]
)  # fmt: skip


def assert_read_or_refused(text: str) -> None:
    refusal = ""
    try:
        topology = Topology.parse(text)
    except TopologyError as error:
        refusal = str(error)
    assert refusal.startswith("<string>:") if refusal else topology.workers


@settings(max_examples=400, deadline=None)
@given(st.one_of(st.text(max_size=80), st.lists(TOKENS, max_size=25).map("".join)))
def test_any_text_gives_a_topology_or_a_topology_error(text):
    assert_read_or_refused(text)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_any_damage_to_a_topology_gives_a_topology_or_a_topology_error(data):
    at = data.draw(st.integers(0, len(FULL)))
    length = data.draw(st.integers(0, 6))
    assert_read_or_refused(FULL[:at] + data.draw(st.one_of(TOKENS, st.text(max_size=4))) + FULL[at + length :])


def test_numbers_to_the_base_60_are_refused_with_what_to_write():
    for text in ("version: 1:30", "version: 1:30.5", "version: 1" + ":59" * 3000):
        with pytest.raises(TopologyError, match="is a number to the base 60 in YAML; put it in quotes"):
            Topology.parse(f"{text}\n{ONE}")


@pytest.mark.parametrize("number", ["0x" + "f" * 5000, "0b" + "1" * 9000, "1" + "_0" * 4000, "1.0e+400", "-.inf", str(1 << 64)])
def test_numbers_of_any_length_are_refused_in_a_short_sentence(number):
    for line in (
        f"version: {number}\n{ONE}",
        f"{HEAD}workers: [{{name: {number}}}]",
        f"{HEAD}host: {{threads: {number}}}\n{ONE}",
    ):
        with pytest.raises(TopologyError, match=r"^<string>:\d+: ") as found:
            Topology.parse(line)
        assert len(str(found.value)) < 300


def test_bounds_of_ids_are_those_of_the_wire():
    limits = _core.wire_limits()
    assert (limits["max_experts_per_shard"], limits["max_layers"]) == (MAX_EXPERT_ID + 1, MAX_LAYER + 1)


def test_activations_name_a_numerics_class_and_the_host_follows_workers_that_agree():
    def classes(*workers: str, host: str = "") -> list[str]:
        lines = "".join(f"  - {{name: w{at}, activations: {asked}}}\n" for at, asked in enumerate(workers))
        topology = Topology.parse(f"{HEAD}{host}workers:\n{lines}")
        return [topology.numerics_of(holder) for holder in ("host", *(worker.name for worker in topology.workers))]

    assert classes("int8", "int8") == ["int8-groups"] * 3
    assert classes("bf16", "f32") == ["f32-canonical", BF16_CLASS, "f32-canonical"]
    assert classes("bf16", host="host: {activations: int8}\n") == ["int8-groups", BF16_CLASS]
    assert classes("bf16-bfdot", "bf16-dot") == ["f32-canonical", "bf16-bfdot", "bf16-dot"]
    assert Topology.local(1).numerics_of("w0") == Topology.local(1).numerics_of("host") == "f32-canonical"
    assert [name for name, facts in CLASSES.items() if not facts.is_bounded] == _core.numerics_classes("reference")
    assert set(ACTIVATIONS) == {"f32", "int8", "bf16", "f16", "bf16-dot", "bf16-bfdot", *MATRIX, "f16-dot2"}


def test_settings_that_stand_in_the_topology_are_stated_by_dotted_key():
    topology = Topology.parse(FULL.replace('"*": ""', '"*": [8]'))
    assert dict(topology.stated_settings) == {
        "ipc.mode": "stream", "ipc.call_timeout_s": 5.0, "ipc.stream_tokens": 8, "ipc.required": True,
        "ipc.shared_bytes": 1 << 20, "engine.block_tokens": 16, "engine.kv_memory": MemoryBudget(fraction=0.375),
        "engine.kv_dtype": "bf16", "engine.speculate": "off", "engine.prefix_cache": True, "host.operators": "torch",
    }  # fmt: skip
    settings = resolve_settings(topology.stated_settings, environ={"DFLASH_MOE_ENGINE_KV_DTYPE": "f32"})
    assert (settings.host_operators, settings.kv_dtype, settings.kv_memory.resolve(800)) == ("torch", "f32", 300)
    assert dict(Topology.local(1).stated_settings) == {}


def test_what_becomes_of_lost_workers_stands_one_level_deeper_and_is_written_back():
    text = HEAD + "failure: {restart: {backoff_ms: [50, 800], deaths: 3, window_s: 10}}\nworkers: [{name: w0}]\n"
    topology = Topology.parse(text)
    assert dict(topology.stated_settings) == {
        "failure.restart.backoff_ms": (50.0, 800.0), "failure.restart.deaths": 3, "failure.restart.window_s": 10.0,
    }  # fmt: skip
    settings = resolve_settings(topology.stated_settings, environ={})
    assert (settings.restart, settings.restart_backoff_ms, settings.restart_deaths) == (True, (50.0, 800.0), 3)
    assert Topology.parse(to_yaml(topology)).failure == topology.failure
    off = Topology.parse(HEAD + "failure: {restart: off}\nworkers: [{name: w0}]\n")
    assert not resolve_settings(off.stated_settings, environ={}).restart
    assert Topology.parse(to_yaml(off)).failure == {"restart": False}


def test_what_is_kept_on_disk_is_stated_and_written_back(tmp_path):
    for text, stated in {
        "{path: /var/kept, max_bytes: 200GiB, panels: on}": {
            "cache.path": Path("/var/kept"), "cache.max_bytes": 200 << 30, "cache.panels": "on",
        },
        "{path: None, panels: off}": {"cache.path": "none", "cache.panels": "off"},
        "{}": {},
    }.items():  # fmt: skip
        topology = Topology.parse(HEAD + f"cache: {text}\n" + ONE)
        assert dict(topology.stated_settings) == stated
        assert Topology.parse(to_yaml(topology)).cache == topology.cache
    resolved = resolve_settings(topology.stated_settings, environ={"DFLASH_MOE_CACHE_PATH": str(tmp_path)})
    assert resolved.cache.path == tmp_path


def test_a_flag_or_variable_for_the_hosts_activations_wins_over_the_file():
    topology = Topology.parse(HEAD + "host: {activations: int8}\nworkers: [{name: w0, activations: bf16}]\n")
    assert topology.with_settings(resolve_settings(topology.stated_settings, environ={})).activations_of("host") == "int8"
    settings = resolve_settings(topology.stated_settings, environ={"DFLASH_MOE_HOST_ACTIVATIONS": "F32"})
    changed = topology.with_settings(settings)
    assert (changed.activations_of("host"), changed.activations_of("w0")) == ("f32", "bf16")
    assert changed.numerics_of("host") == "f32-canonical"
    follows = Topology.parse(HEAD + "workers: [{name: w0, activations: bf16}]\n").with_settings(Settings())
    assert follows.activations_of("host") == "bf16"


def test_bf16_is_the_class_of_a_cards_matrix_units_and_names_of_classes_stay():
    asked = {
        "backend: cuda, activations: bf16": "bf16-mma",
        "backend: hip, activations: bf16": BF16_OF_CARD,
        "backend: sim, simulate: hip, activations: bf16": BF16_OF_CARD,
        "backend: cpu, activations: bf16": BF16_CLASS,
        **{f"backend: hip, activations: {name}": name for name in MATRIX},
        "backend: hip, activations: f16": "f16-dot2",
    }
    lines = "".join(f"  - {{name: w{at}, {entry}}}\n" for at, entry in enumerate(asked))
    topology = Topology.parse(f"{HEAD}workers:\n{lines}")
    assert [topology.numerics_of(worker.name) for worker in topology.workers] == list(asked.values())
    assert possible_classes("bf16") == ("bf16-mfma", "bf16-wmma")
    assert [possible_classes(name) for name in MATRIX] == [(name,) for name in MATRIX]


@pytest.mark.parametrize(
    ("device", "numerics"),
    [("cuda:0", "bf16-mma"), ("hip:1", BF16_OF_CARD), ("sim:0, simulate: cuda", "bf16-mma"), ("cpu", BF16_CLASS)],
)
def test_bf16_of_the_host_is_the_class_of_its_own_device(device, numerics):
    topology = Topology.parse(f"{HEAD}host: {{device: {device}, activations: bf16}}\n{ONE}")
    assert topology.numerics_of("host") == numerics


def test_cpus_are_a_word_or_a_list():
    text = HEAD + "workers:\n- {name: a, cpus: '2-3,0'}\n- {name: b, cpus: 1}\n- {name: c, cpus: NONE}\n- {name: d}\n"
    assert [worker.cpus for worker in Topology.parse(text).workers] == [(2, 3, 0), (1,), "none", "auto"]
