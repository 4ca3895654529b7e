"""Mode, slice, transport, threads, instruction set, shard holder and where weights lie change no
bit of `experts()`.

Each numerics class has bits of its own. One tiny model; every runtime's outputs are compared with
those of one reference runtime of its class, byte for byte.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import functools
import itertools
from contextlib import nullcontext

import numpy as np
import pytest

from dflash_moe import ExpertRuntime, Topology, _core
from dflash_moe.testing.tiny import routed_batch, tiny_checkpoint
from dflash_moe.topology.numerics import class_on
from tests.fabrics import require_fabric
from tests.float_modes import FOREIGN_MODES, float_mode

BF16_CLASS = class_on("bf16", "cpu")

NUM_EXPERTS, TOP_K, HIDDEN = 8, 3, 96
TOKENS = (1, 7, 130)
SLICES = (("stream", 1), ("stream", 4), ("stream", 32), ("batched", None))
DTYPES = ("f32", "bf16", "f16")
# class: what the topology says of a worker
CLASSES = {"f32-canonical": "", BF16_CLASS: ", activations: bf16", "int8-groups": ", activations: int8, weights: int8"}
ISAS = [isa for isa in _core.supported_isas() if isa != "reference"]
OFFERS = [(numerics, isa) for isa in ISAS for numerics in _core.numerics_classes(isa)]
ROUNDING = [numerics for numerics in _core.numerics_classes(_core.best_isa()) if numerics != "f32-canonical"]
# of the rounding classes, which differ from f32-canonical in kernels alone
FEW = (("stream", 4), ("batched", None))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return tiny_checkpoint(
        tmp_path_factory.mktemp("matrix"), hidden_size=HIDDEN, num_experts=NUM_EXPERTS, top_k=TOP_K, dtype="bf16"
    )


def topology(
    address: str, threads: int, lists: tuple[str, str] = ("0-4", "5-7"), numerics: str = "f32-canonical",
    own: tuple[str, str] = ("", ""),
) -> Topology:  # fmt: skip
    workers = "".join(
        f"  - {{name: w{i}, backend: cpu, threads: {threads}, experts: {{'*': '{ids}'}}"
        + (f", address: {address}" if address != "shared" else "")
        + CLASSES[numerics]
        + own[i]
        + "}\n"
        for i, ids in enumerate(lists)
    )
    return Topology.parse(f"version: 1\nplacement: {{policy: explicit}}\nworkers:\n{workers}")


def outputs(spec, where: Topology, *, modes=SLICES, dtypes=DTYPES, **overrides) -> dict[tuple, bytes]:
    """Result bytes by (mode, slice, dtype, layer, tokens); asserts that the workers were called."""
    found: dict[tuple, bytes] = {}
    with ExpertRuntime.start(where, model=spec, stream_tokens_max=32, batch_capacity=64, **overrides) as runtime:
        for dtype, (mode, stream_tokens) in itertools.product(dtypes, modes):
            extra = {} if stream_tokens is None else {"stream_tokens": stream_tokens}
            runtime.set_mode(mode, dtype=dtype, reply_dtype=dtype, **extra)
            for layer, tokens in itertools.product(range(len(runtime.layers)), TOKENS):
                before = runtime.stats()["totals"]["calls"]
                batch = routed_batch(tokens, HIDDEN, NUM_EXPERTS, TOP_K, seed=tokens)
                result = runtime.experts(layer, *batch)
                assert runtime.stats()["totals"]["calls"] > before
                found[mode, stream_tokens, dtype, layer, tokens] = np.asarray(result).tobytes()
    return found


@pytest.fixture(scope="module")
def references(checkpoint):
    """By class, when first asked for: reference kernels, loopback, one thread, whole chunks."""

    @functools.cache
    def reference(numerics: str) -> dict[tuple, bytes]:
        where = topology("loopback", 1, numerics=numerics)
        found = outputs(checkpoint, where, modes=(("batched", None),), cpu_isa="reference")
        return {(dtype, layer, tokens): data for (_, _, dtype, layer, tokens), data in found.items()}

    return reference


@pytest.fixture(scope="module")
def reference(references):
    return references("f32-canonical")


def assert_equal_to(reference, found):
    assert found
    for (mode, stream_tokens, dtype, layer, tokens), data in found.items():
        if data != reference[dtype, layer, tokens]:
            ours = np.frombuffer(data, np.uint32)
            theirs = np.frombuffer(reference[dtype, layer, tokens], np.uint32)
            first = int(np.flatnonzero(ours != theirs)[0])
            pytest.fail(
                f"{mode} slice {stream_tokens} {dtype} layer {layer} T={tokens}: element {first} is {ours[first]:#010x}, "
                f"reference {theirs[first]:#010x}; {int((ours != theirs).sum())} elements differ"
            )


@pytest.mark.parametrize("address", ["loopback", "shared", "unix", "tcp"])
@pytest.mark.parametrize("threads", [1, 2])
def test_bits_do_not_depend_on_transport_mode_slice_or_threads(checkpoint, reference, address, threads):
    assert_equal_to(reference, outputs(checkpoint, topology(address, threads)))


# The workers have one of libfabric's providers over ordinary networks, and the host offers all.
@pytest.mark.parametrize("provider", ["net", "tcp"])
def test_bits_do_not_depend_on_a_fabric(checkpoint, reference, monkeypatch, provider):
    require_fabric()
    monkeypatch.setenv("FI_PROVIDER", provider)
    assert_equal_to(reference, outputs(checkpoint, topology("tcp", 1), transport="fabric"))


def test_what_auto_chooses_over_a_slow_link_changes_no_bit(checkpoint, reference):
    slow = Topology.parse(
        "version: 1\nplacement: {policy: explicit}\nworkers:\n"
        "  - {name: w0, backend: cpu, threads: 1, experts: {'*': '0-4'}}\n"
        "  - {name: w1, backend: cpu, threads: 1, experts: {'*': '5-7'}, emulate: {delay_ms: 1, mbit_s: 40}}\n"
    )
    with ExpertRuntime.start(slow, model=checkpoint, mode="auto", dtype="f32", reply_dtype="f32") as runtime:
        batch = routed_batch(TOKENS[-1], HIDDEN, NUM_EXPERTS, TOP_K, seed=TOKENS[-1])
        # What is chosen follows from what was measured, and a busy machine measures something else.
        for _ in range(60):
            for _ in range(6):
                found = np.asarray(runtime.experts(0, *batch)).tobytes()
                assert found == reference["f32", 0, TOKENS[-1]]
            if runtime.stats()["auto"]["w1"]["chunks"][0]["taken"]["num_slices"] > 1:
                return
    pytest.skip("this machine is too busy: auto cut no chunk for the slow link")


@pytest.mark.parametrize(("numerics", "isa"), OFFERS)
def test_bits_do_not_depend_on_the_instruction_set(checkpoint, references, numerics, isa):
    modes = SLICES if numerics == "f32-canonical" else FEW
    found = outputs(checkpoint, topology("shared", 1, numerics=numerics), modes=modes, cpu_isa=isa)
    assert_equal_to(references(numerics), found)


STORED, MAPPED = ", weights_layout: stored", ", weights_layout: mapped"
# Room for a layer of each worker's experts, and not for two.
SLOTS = (STORED + ", memory: 200KiB", STORED + ", memory: 120KiB")


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.mark.parametrize(("numerics", "isa"), OFFERS)
def test_bits_do_not_depend_on_where_weights_lie(checkpoint, references, cache, numerics, isa):
    # Whoever starts the second time maps what the first has written. Integers that are made at load
    # lie in memory or in panels, whole.
    layouts = [(STORED, STORED), (STORED, STORED), SLOTS, (MAPPED, MAPPED)][: 2 if "int8" in CLASSES[numerics] else 4]
    for own in layouts:
        where = topology("shared", 1, numerics=numerics, own=own)
        found = outputs(checkpoint, where, modes=FEW, dtypes=("f32",), cpu_isa=isa, cache_path=cache)
        assert_equal_to(references(numerics), found)


@pytest.mark.parametrize("numerics", ROUNDING)
@pytest.mark.parametrize(("address", "threads"), [("loopback", 2), ("unix", 1)])
def test_bits_of_a_class_that_rounds_inputs_do_not_depend_on_transport_or_threads(
    checkpoint, references, numerics, address, threads
):
    where = topology(address, threads, numerics=numerics)
    assert_equal_to(references(numerics), outputs(checkpoint, where, modes=FEW, dtypes=("f32", "bf16")))


@pytest.mark.parametrize("numerics", ["f32-canonical", *ROUNDING])
def test_bits_do_not_depend_on_which_worker_holds_a_shard(checkpoint, references, numerics):
    swapped = topology("shared", 1, lists=("5-7", "0-4"), numerics=numerics)
    assert_equal_to(references(numerics), outputs(checkpoint, swapped, modes=FEW))


@pytest.mark.parametrize("address", ["loopback", "shared", "tcp"])
def test_bits_do_not_depend_on_the_floating_point_mode_of_the_caller(checkpoint, address):
    found = {}
    with ExpertRuntime.start(topology(address, 2), model=checkpoint, dtype="f32", reply_dtype="f32") as runtime:
        for mode, tokens, scale in itertools.product((None, *FOREIGN_MODES), TOKENS, (1.0, 1e-38)):
            hidden, ids, weights = routed_batch(tokens, HIDDEN, NUM_EXPERTS, TOP_K, seed=tokens)
            weights = (weights * scale).astype(np.float32)  # sums below the normal range
            with nullcontext() if mode is None else float_mode(mode):
                result = np.asarray(runtime.experts(0, hidden, ids, weights))
            assert np.any(result)
            found.setdefault((tokens, scale), []).append(result.tobytes())
    assert all(len(set(each)) == 1 for each in found.values())


@pytest.mark.parametrize("numerics", ["f32-canonical", *ROUNDING])
def test_bits_do_not_depend_on_the_neighbours_of_a_row(checkpoint, numerics):
    with ExpertRuntime.start(topology("loopback", 1, numerics=numerics), model=checkpoint) as runtime:
        hidden, ids, weights = routed_batch(33, HIDDEN, NUM_EXPERTS, TOP_K, seed=5)
        together = np.asarray(runtime.experts(0, hidden, ids, weights))
        for row in (0, 16, 32):
            alone = np.asarray(runtime.experts(0, hidden[row : row + 1], ids[row : row + 1], weights[row : row + 1]))
            assert alone.tobytes() == together[row : row + 1].tobytes()
