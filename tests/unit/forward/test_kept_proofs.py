"""A second start takes what the first one proved, and proves anew where anything differs on which a
proof depends, or where the file will not do.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import contextlib
import copy
import json
import os
import shutil
import threading
import time
from dataclasses import asdict, replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dflash_moe.config import CacheSettings
from dflash_moe.forward import host_model, take_layers
from dflash_moe.forward.host_model import open_host
from dflash_moe.forward.kept_proofs import ModelProven, circumstances
from dflash_moe.model import checkpoint_files
from dflash_moe.operators.layers import block_forms
from dflash_moe.operators.layers.block_forms import LayerProven
from dflash_moe.proofs.one_pass import opened_pass
from dflash_moe.proofs.verify import verify
from dflash_moe.store import closed_json, folder, proof_file
from dflash_moe.store.folder import PROOFS, CacheFolder
from tests.host_models import checkpoint, logits_of, prompt, start, topology
from tests.unit.store.test_proof_file import replaced, with_digest

pytestmark = pytest.mark.transformers
ARCH = "qwen3_moe"
DEPENDS = "model.norm (Qwen3MoeRMSNorm, torch.float32): other bits whole, beside 1 other sequences"


@pytest.fixture(scope="module")
def runtime():
    with start(ARCH, "f32") as found:
        yield found


@pytest.fixture
def source(tmp_path):
    """A checkpoint that a test may change."""
    return shutil.copytree(checkpoint(ARCH, "f32"), tmp_path / "model")


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint_files, "SETTLED_NS", 0)
    return CacheSettings(tmp_path / "store")


@pytest.fixture
def proofs_made(monkeypatch):
    """Names what was proven: layers, the loop over them, rows."""
    found = []
    makers = (block_forms.LayerForms, "_own"), (take_layers, "_probe_logits"), (host_model, "find_dependence")
    for owner, name in makers:
        monkeypatch.setattr(owner, name, noting(found, name, getattr(owner, name)))
    return found


def noting(found, name, function):
    def called(*arguments):
        found.append(name)
        return function(*arguments)

    return called


def files_in(cache):
    return sorted((cache.path / PROOFS).glob("*"))


# What is proven of a model of two layers that are taken.
ALL = ["_own"] * 2 + ["_probe_logits"] * 2 + ["find_dependence"]


@pytest.mark.parametrize(
    ("arch", "proven"), [(ARCH, ALL), ("deepseek_v3", ALL), ("cohere2_moe", ["find_dependence"])],
    ids=["taken", "latents", "kept"],
)  # fmt: skip
def test_a_second_start_proves_nothing_and_is_the_same(arch, proven, cache, proofs_made):
    with start(arch, "f32") as runtime:
        hosts = []
        for made in (proven, []):
            hosts.append(open_host(checkpoint(arch, "f32"), runtime, cache=cache))
            assert proofs_made == made
            proofs_made.clear()
        first, second = hosts
        assert second.report.to_json() == first.report.to_json()
        assert (second.packed.loop is None) == (first.packed.loop is None) == (proven != ALL)
        assert torch.equal(logits_of(second.packed, prompt()), logits_of(first.packed, prompt()))
    (file,) = files_in(cache)
    assert file.stat().st_size < 4096


def test_a_layer_that_keeps_its_code_keeps_it(runtime, source, cache, proofs_made, monkeypatch):
    monkeypatch.setattr(block_forms.LayerForms, "_why_not", lambda *_arguments: "its own code computes something else")
    first = open_host(source, runtime, cache=cache)
    monkeypatch.undo()
    monkeypatch.setattr(checkpoint_files, "SETTLED_NS", 0)
    second = open_host(source, runtime, cache=cache)
    reasons = {finding.reason for finding in second.report.findings if finding.kind == "Qwen3MoeDecoderLayer"}
    assert reasons == {"its own code computes something else"}
    assert second.report.to_json() == first.report.to_json()
    assert second.packed.loop is None


def test_a_loop_with_other_bits_is_not_taken(runtime, source, cache, monkeypatch):
    with monkeypatch.context() as patched:
        counter = iter(range(100))
        patched.setattr(take_layers, "_probe_logits", lambda *_arguments: [torch.tensor(next(counter))])
        assert open_host(source, runtime, cache=cache).packed.loop is None
    assert open_host(source, runtime, cache=cache).packed.loop is None
    assert open_host(source, runtime).packed.loop is not None


def test_a_model_whose_rows_depend_on_others_is_said_so_again(runtime, source, cache, caplog, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr(host_model, "find_dependence", lambda _packed: DEPENDS)
        open_host(source, runtime, cache=cache)
    caplog.clear()
    assert open_host(source, runtime, cache=cache).report.not_independent == DEPENDS
    assert f"rows depend on their batch: {DEPENDS}" in caplog.text
    assert open_host(source, runtime).report.not_independent == ""


@pytest.mark.parametrize("name", ["dflash_moe", "code", "machine", "transformers", "torch", "numpy"])
def test_other_code_or_another_machine_proves_anew(name, runtime, source, cache, proofs_made, monkeypatch):
    open_host(source, runtime, cache=cache)
    code = proof_file.proving_code()
    monkeypatch.setattr(proof_file, "proving_code", lambda: {**code, name: "0" * 64})
    open_host(source, runtime, cache=cache)
    assert proofs_made == ALL * 2
    open_host(source, runtime, cache=cache)
    assert proofs_made == ALL * 2
    assert len(files_in(cache)) == 2


def test_a_file_that_was_touched_proves_anew(runtime, source, cache, proofs_made):
    open_host(source, runtime, cache=cache)
    for name in ("model.safetensors", "config.json"):
        os.utime(source / name, (1, 1))
        open_host(source, runtime, cache=cache)
    assert proofs_made == ALL * 3


def test_other_settings_prove_anew(source, cache, proofs_made):
    for overrides in ({}, {"kv_dtype": "bf16"}, {"kv_memory": "1MiB"}, {"threads": 2}):
        with start(ARCH, "f32", **overrides) as runtime:
            open_host(source, runtime, cache=cache)
    assert proofs_made == ALL * 4
    with start(ARCH, "f32", kv_memory="64MiB") as runtime:
        open_host(source, runtime, cache=cache)
    assert proofs_made == ALL * 4, "more pages than proofs take are nothing to a proof"


def test_circumstances_are_those_of_torch_modules_and_settings(runtime, source, cache, monkeypatch):
    given = []

    def noted(*arguments):
        # The report goes on being written.
        given.append((*arguments[:3], copy.deepcopy(arguments[3])))
        return circumstances(*arguments)

    monkeypatch.setattr(host_model, "circumstances", noted)
    packed = open_host(source, runtime, cache=cache).packed
    (_, pool, settings, report) = given[0]
    first = circumstances(packed, pool, settings, report, {})
    assert circumstances(packed, pool, settings, report, {"HOME": "/x"}) == first
    others = [circumstances(packed, pool, settings, report, {name: "AVX2"}) for name in ("MKL_CBWR", "ATEN_CPU_CAPABILITY")]
    others.append(circumstances(packed, pool, (*settings, "more"), report, {}))
    torch.set_float32_matmul_precision("medium")
    try:
        others.append(circumstances(packed, pool, settings, report, {}))
    finally:
        torch.set_float32_matmul_precision("highest")
    with monkeypatch.context() as patched:
        patched.setattr(torch.__config__, "show", lambda: "another build")
        others.append(circumstances(packed, pool, settings, report, {}))
    report.findings[0] = replace(report.findings[0], form="another form")
    others.append(circumstances(packed, pool, settings, report, {}))
    assert len({first, *others}) == 1 + len(others)


def test_code_of_a_program_keeps_nothing(runtime, source, cache, proofs_made, monkeypatch):
    import transformers.models.qwen3_moe.modeling_qwen3_moe as qwen3_moe

    open_host(source, runtime, cache=cache)
    right = qwen3_moe.Qwen3MoeAttention.forward
    monkeypatch.setattr(qwen3_moe.Qwen3MoeAttention, "forward", lambda self, *given, **named: right(self, *given, **named))
    open_host(source, runtime, cache=cache)
    assert len(proofs_made) > len(ALL)
    assert len(files_in(cache)) == 1


@pytest.mark.parametrize("changes", [{"is_off": True}, {"panels": "off"}])
def test_without_panels_each_start_proves(changes, runtime, source, cache, proofs_made):
    for _ in range(2):
        open_host(source, runtime, cache=replace(cache, **changes))
    assert proofs_made == ALL * 2
    assert not cache.path.exists()


@pytest.mark.parametrize("command", ["verify", "diff"])
def test_verify_and_diff_prove_anew(command, runtime, source, cache, proofs_made):
    open_host(source, runtime, cache=cache)
    proofs_made.clear()
    overrides = {"kv_memory": "16MiB", "suspect_ms": 60_000.0, "cache_path": cache.path}
    if command == "verify":
        assert verify(source, topology("loopback"), overrides=overrides).excesses == []
    else:
        with opened_pass(source, runtime.spec, topology("loopback"), overrides, on_loading=None):
            pass
    assert proofs_made == ALL


def test_files_that_may_still_change_keep_nothing(runtime, source, cache, monkeypatch):
    monkeypatch.setattr(checkpoint_files, "SETTLED_NS", 3600 * 10**9)
    open_host(source, runtime, cache=cache)
    assert files_in(cache) == []


def test_files_that_change_meanwhile_keep_nothing(runtime, source, cache, monkeypatch):
    prove = host_model.find_dependence

    def touching(packed):
        os.utime(source / "config.json", (1, 1))
        return prove(packed)

    monkeypatch.setattr(host_model, "find_dependence", touching)
    open_host(source, runtime, cache=cache)
    assert files_in(cache) == []


def test_a_folder_that_others_may_write_is_not_used(runtime, source, cache, proofs_made):
    open_host(source, runtime, cache=cache)
    os.chmod(cache.path, 0o777)
    open_host(source, runtime, cache=cache)
    assert proofs_made == ALL * 2


@pytest.mark.parametrize("damage", ["cut", "flipped", "no such place", "no reason", "a further key", "text"])
def test_a_file_that_will_not_do_proves_anew_and_is_written_again(damage, runtime, source, cache, proofs_made, caplog):
    first = open_host(source, runtime, cache=cache)
    (file,) = files_in(cache)
    text, value = file.read_bytes(), json.loads(file.read_bytes())
    layer = value["proofs"]["layers"]["model.layers.0"]
    if damage == "no such place":
        layer["place"] = layer["num_candidates"]
    elif damage == "no reason":
        layer["place"] = None
    elif damage == "a further key":
        layer["weights"] = ""
    damaged = {"cut": text[:-7], "flipped": text.replace(b'"excess":0.', b'"excess":1.'), "text": b"[" * 100_000}
    replaced(file, damaged.get(damage, with_digest(value)))
    caplog.clear()
    second = open_host(source, runtime, cache=cache)
    assert str(file) in caplog.text
    assert proofs_made == ALL * 2
    assert file.read_bytes() == text
    assert second.report.to_json() == first.report.to_json()


def test_a_layer_with_other_candidates_is_proven_and_so_is_what_follows(runtime, source, cache, proofs_made):
    open_host(source, runtime, cache=cache)
    (file,) = files_in(cache)
    value, right = (json.loads(file.read_bytes()) for _ in range(2))
    value["proofs"]["layers"]["model.layers.1"]["num_candidates"] += 1
    replaced(file, with_digest(value))
    proofs_made.clear()
    open_host(source, runtime, cache=cache)
    assert proofs_made == ALL[1:]
    found = json.loads(file.read_bytes())["proofs"]
    # Without the first layer beside it, this one is compared in float64.
    for proofs in (found, right["proofs"]):
        del proofs["layers"]["model.layers.1"]["excess"]
    assert found == right["proofs"]


def test_they_are_kept_between_two_files_of_panels(runtime, source, cache, monkeypatch):
    """A worker writes panels meanwhile, and has the lock nearly all the time."""
    monkeypatch.setattr(folder, "SHORT_WAIT_S", 60.0)  # a busy machine may miss many gaps
    is_over = threading.Event()

    def write_panels():
        while not is_over.is_set():
            with held.writing(lambda: False):
                time.sleep(0.5)
            time.sleep(0.02)

    with contextlib.closing(CacheFolder.open(cache.path, allow_network=True)) as held:
        writer = threading.Thread(target=write_panels)
        writer.start()
        try:
            open_host(source, runtime, cache=cache)
        finally:
            is_over.set()
            writer.join()
    assert len(files_in(cache)) == 1


def test_they_are_not_awaited_for_long(runtime, source, cache, monkeypatch):
    monkeypatch.setattr(folder, "SHORT_WAIT_S", 0.05)
    with (
        contextlib.closing(CacheFolder.open(cache.path, allow_network=True)) as held,
        held.writing(lambda: False) as has_lock,
    ):
        assert has_lock
        open_host(source, runtime, cache=cache)
        assert files_in(cache) == []


def test_a_reason_beyond_all_lengths_is_not_kept(runtime, source, cache, monkeypatch):
    monkeypatch.setattr(host_model, "find_dependence", lambda _packed: "x" * 5000)
    assert len(open_host(source, runtime, cache=cache).report.not_independent) == 5000
    assert files_in(cache) == []


PROVEN = ModelProven({"model.layers.0": LayerProven(3, 1, "", 0.5), "model.layers.1": LayerProven(0, None, "why")}, True, "")
VALUES = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.lists(st.integers(), max_size=2)


@given(data=st.data())
def test_fields_of_any_value_are_proofs_or_refused(data):
    fields = asdict(PROVEN)
    owner = data.draw(st.sampled_from([fields, fields["layers"], *fields["layers"].values()]))
    owner[data.draw(st.sampled_from([*owner, "more"]))] = data.draw(VALUES)
    try:
        found = ModelProven.of_fields(fields)
    except ValueError:
        return
    assert ModelProven.of_fields(json.loads(closed_json.encode(asdict(found)))) == found
    assert all(0 <= one.place < one.num_candidates for one in found.layers.values() if one.place is not None)
