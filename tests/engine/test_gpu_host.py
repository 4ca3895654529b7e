"""A GPU as the host, simulated: tensors staged through pinned memory, experts kept on its own
device, and what is refused.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import numpy as np
import pytest

from dflash_moe import ConfigError, ExpertRuntime, Topology, TopologyError, UnsupportedError, _core
from dflash_moe.experts.device_tensors import DeviceTensors, open_host_device
from dflash_moe.experts.layer_table import LayerShape
from dflash_moe.protocol.devices import DeviceChoice
from dflash_moe.testing.tiny import routed_batch, tiny_checkpoint

torch = pytest.importorskip("torch")

NUM_EXPERTS, TOP_K, HIDDEN = 9, 3, 96
TOPOLOGY = """
version: 1
host: {%s, experts: {memory: 40%%}}
workers:
  - {name: near, backend: cpu, threads: 1}
  - {name: far, backend: cpu, threads: 1, address: unix}
"""
SIMULATED = "device: 'sim:0', simulate: %s"


@pytest.fixture(scope="module")
def spec(tmp_path_factory):
    return tiny_checkpoint(tmp_path_factory.mktemp("host"), hidden_size=HIDDEN, num_experts=NUM_EXPERTS, top_k=TOP_K)


def batches(dtype):
    """A decode step, a prefill, and rows that lie apart."""
    for tokens in (1, 5, 70):
        made = routed_batch(tokens, HIDDEN, NUM_EXPERTS, TOP_K, seed=tokens)
        hidden, ids, weights = (torch.from_numpy(np.asarray(part)) for part in made)
        yield hidden.to(dtype), ids, weights.to(dtype)
    wide = torch.randn(8, 2 * HIDDEN, generator=torch.Generator().manual_seed(1)).to(dtype)
    yield wide[:, HIDDEN:], torch.arange(24).reshape(8, 3) % NUM_EXPERTS, torch.full((8, 3), 0.25, dtype=dtype)


def bits(tensor):
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("vendor", ["cuda", "hip"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gpu_host_gives_the_bits_of_a_host_without_one(spec, vendor, dtype):
    with ExpertRuntime.start(Topology.parse(TOPOLOGY % "device: cpu"), model=spec, dtype="f32") as runtime:
        expected = [bits(runtime.experts(0, *batch)) for batch in batches(dtype)]
    with ExpertRuntime.start(Topology.parse(TOPOLOGY % (SIMULATED % vendor)), model=spec, dtype="f32") as runtime:
        assert [bits(runtime.experts(0, *batch)) for batch in batches(dtype)] == expected
        calls = [runtime.submit(0, *batch) for batch in batches(dtype)]
        assert [bits(call.result()) for call in calls] == expected
        counts = runtime.stats()["workers"]
    assert all(counts[name]["calls"] for name in ("near", "far", "host")), "no holder was left out"


def test_the_callers_own_result_tensor_is_filled(spec):
    with ExpertRuntime.start(Topology.parse(TOPOLOGY % (SIMULATED % "cuda")), model=spec) as runtime:
        hidden, ids, weights = next(batches(torch.float32))
        out = torch.full((1, HIDDEN), 7.0)
        assert runtime.experts(0, hidden, ids, weights, out=out) is out
        assert bits(out) == bits(runtime.experts(0, hidden, ids, weights))
        with pytest.raises(ConfigError, match=r"out: found shape \[2, 96\]"):
            runtime.experts(0, hidden, ids, weights, out=torch.zeros(2, HIDDEN))
        assert runtime.tensor_device == "cpu"


def test_inputs_may_change_once_submit_returned_because_they_were_staged(spec):
    with ExpertRuntime.start(Topology.parse(TOPOLOGY % (SIMULATED % "cuda")), model=spec) as runtime:
        hidden, ids, weights = next(batches(torch.float32))
        expected = bits(runtime.experts(0, hidden, ids, weights))
        call = runtime.submit(0, hidden, ids, weights)
        hidden.zero_()
        assert bits(call.result()) == expected


def test_devices_that_do_not_exist_are_refused_with_their_number(spec):
    topology = Topology.parse(TOPOLOGY % (SIMULATED.replace("sim:0", "sim:3") % "cuda"))
    with pytest.raises(ConfigError, match=r"host\.device sim:3 does not exist"):
        ExpertRuntime.start(topology, model=spec)
    with pytest.raises((ConfigError, UnsupportedError), match=r"host\.device cuda:200|backend 'cuda'"):
        ExpertRuntime.start(Topology.parse(TOPOLOGY % "device: 'cuda:200'"), model=spec)


@pytest.mark.parametrize("text", ["device: 'sim:0'", "device: cpu, simulate: cuda"])
def test_simulate_belongs_to_simulated_devices_and_only_there(text):
    with pytest.raises(TopologyError, match=r":3: host: device .* needs simulate: cuda or hip, others have none"):
        Topology.parse(TOPOLOGY % text, "t.yaml")


class Elsewhere:
    """A tensor on card 1 of a vendor, as DLPack describes it."""

    def __init__(self, *device):
        self.device = device

    def __dlpack_device__(self):
        return self.device


def test_a_tensor_on_another_device_is_refused_by_name_before_its_memory_is_touched():
    tensors = DeviceTensors(DeviceChoice("sim", 0, "cuda"))
    tensors._is_simulated = False  # as of a real card, whose tensors say where they are
    with pytest.raises(ConfigError, match=r"hidden_states: found on DLPack device \(2, 1\)"):
        tensors.bind(LayerShape(0, HIDDEN, HIDDEN), Elsewhere(2, 1), Elsewhere(2, 1), Elsewhere(2, 1), None)


class OnCard:
    """A tensor on card 0, which notes for which stream it is taken over."""

    def __init__(self, kind):
        self.kind, self.streams = kind, []

    def __dlpack_device__(self):
        return (self.kind, 0)

    def __dlpack__(self, stream=None):
        self.streams.append(stream)
        return torch.zeros(1, HIDDEN).__dlpack__()


@pytest.mark.parametrize(("kind", "expected"), [(2, 1), (10, 0)])
def test_tensors_are_taken_over_for_the_stream_of_a_step_as_dlpack_numbers_it(kind, expected):
    class Card:
        name, dlpack_device, stream = "card 0", (kind, 0), 0xABC0

    tensors = DeviceTensors(DeviceChoice("sim", 0, "cuda"))
    tensors.device = Card()
    tensor = OnCard(kind)
    for stream in (tensors.device.stream, 0, 0xDEF0):
        tensors.take_over_for(stream)
        # its capsule is the processor's
        with pytest.raises(UnsupportedError, match=f"expected is type {kind}, number 0"):
            tensors._view("hidden_states", tensor)
    assert tensor.streams == [0xABC0, expected, 0xDEF0]


def test_views_of_a_devices_tensors_are_taken_for_that_device_only():
    capsule = torch.zeros(2, 3).__dlpack__
    assert _core.DlpackView(capsule()).shape == (2, 3)
    with pytest.raises(UnsupportedError, match="on DLPack device type 1, number 0; expected is type 2, number 1"):
        _core.DlpackView(capsule(), (2, 1))


def test_a_simulated_device_copies_between_foreign_and_pinned_memory():
    device = open_host_device(DeviceChoice("sim", 0, "hip"))
    assert device.dlpack_device == (1, 0)
    assert device.stream == 0
    source, back = torch.arange(1000.0), torch.zeros(1000)
    block = device.staging(4000)
    device.copy_out([(source.data_ptr(), block.address, 4000)])
    device.copy_in([(back.data_ptr(), block.address, 2000), (back.data_ptr() + 2000, block.address + 2000, 2000)])
    assert torch.equal(source, back)
    address = block.address
    del block
    assert device.staging(3000).address == address, "blocks are used again"


@pytest.mark.parametrize(
    ("sealed", "opened", "registration"),
    [("", "", "read-only"), ("sealed: no", "", "writable"), ("sealed: no", "open: neither", "none")],
)
def test_doctor_says_how_device_steps_would_use_the_workers_memory(monkeypatch, sealed, opened, registration):
    from dflash_moe.cli.doctor.doctor import REGISTRATIONS, examine, print_findings

    real = open_host_device(DeviceChoice("sim", 0, "cuda"))
    assert real.refuses_replies(is_open=False) == real.refuses_replies(is_open=True) == ""

    class Choosy:
        name = "cuda 0 (choosy)"

        def refuses_replies(self, *, is_open):
            return opened if is_open else sealed

    monkeypatch.setattr("dflash_moe.experts.device_tensors.open_host_device", lambda choice: Choosy())
    found = examine(Topology.parse(TOPOLOGY % (SIMULATED % "cuda")))
    assert found["host_device"]["registration"] == registration
    assert any("only staged calls: open: neither" in problem for problem in found["problems"]) == (registration == "none")
    print_findings(found)
    assert REGISTRATIONS[registration]


def test_doctor_reports_a_device_that_does_not_exist(capsys):
    from dflash_moe.cli.doctor.doctor import examine, print_findings

    found = examine(Topology.parse(TOPOLOGY % (SIMULATED.replace("sim:0", "sim:3") % "cuda")))
    assert not found["host_device"]["available"]
    assert any("sim:3 does not exist" in problem for problem in found["problems"])
    print_findings(found)
    assert "host       sim:3: it cannot be used" in capsys.readouterr().out
