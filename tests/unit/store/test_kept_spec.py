"""The kept spec of a model: equal to the derived one, found only for the same files and code, and
derived again where its file will not do.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import copy
import importlib.metadata
import json
import logging
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from bench.models.families import tiny_options
from dflash_moe.config import CacheSettings
from dflash_moe.errors import CheckpointError, ConfigError
from dflash_moe.model import checkpoint_files
from dflash_moe.model.make import MakeOptions, make_checkpoint
from dflash_moe.model.spec import model_spec
from dflash_moe.store import closed_json, kept_spec, spec_file
from dflash_moe.store.closed_file import MAX_DERIVED
from dflash_moe.store.folder import PANELS, SPECS
from dflash_moe.store.kept_spec import kept_model_spec, spec_fields, spec_of_fields
from dflash_moe.testing.tiny import tiny_checkpoint
from tests.unit.store.stored_panels import GROUP, never, of_model, opened, overwrite, pieces

pytestmark = pytest.mark.transformers
# A gate without limits, one with limits and biases, no gate, a stack that begins behind others.
FAMILIES = ["qwen3_moe", "gpt_oss", "nemotron_h", "deepseek_v3"]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Checkpoints by architecture, made once."""
    found = {}

    def make(arch):
        if arch not in found:
            folder = tmp_path_factory.mktemp("made")
            make_checkpoint(tiny_options(arch), folder)
            found[arch] = folder
        return found[arch]

    return make


@pytest.fixture
def source(made, tmp_path):
    """A checkpoint that a test may change."""
    folder = tmp_path / "model"
    folder.mkdir()
    for path in made("qwen3_moe").iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    return folder


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint_files, "SETTLED_NS", 0)
    return CacheSettings(tmp_path / "store")


@pytest.fixture
def derived(monkeypatch):
    """The checkpoints of which a spec was derived."""
    found = []
    load = kept_spec.load_architecture

    def loaded(checkpoint):
        found.append(checkpoint.path)
        return load(checkpoint)

    monkeypatch.setattr(kept_spec, "load_architecture", loaded)
    return found


def specs_in(cache):
    return sorted((cache.path / SPECS).glob("*"))


def replaced(path: Path, data: bytes) -> None:
    overwrite(path, 0, data)
    os.chmod(path, 0o600)
    os.truncate(path, len(data))
    os.chmod(path, 0o400)


def with_digest(value):
    """Returns the text of a file whose digest fits what else it says."""
    value.pop("digest")
    return closed_json.encode({**value, "digest": blake3(closed_json.encode(value)).hexdigest()})


@pytest.mark.parametrize("arch", FAMILIES)
def test_a_second_start_finds_an_equal_spec(arch, made, cache, derived):
    first = kept_model_spec(made(arch), cache=cache)
    assert kept_model_spec(str(made(arch)), cache=cache) == first == model_spec(made(arch))
    assert len(derived) == 1
    (file,) = specs_in(cache)
    assert file.stat().st_mode & 0o777 == 0o400


@pytest.mark.parametrize("arch", ["qwen3_moe", "gpt_oss"])
def test_that_of_a_gguf_file_is_found_by_a_relative_path(arch, cache, derived, tmp_path, monkeypatch):
    pytest.importorskip("gguf", reason="the gguf package is an extra of the tests")
    from bench.models.gguf_files import write_gguf

    options = MakeOptions(arch, num_layers=2, num_experts=4, top_k=2, moe_intermediate_size=256, dtype="f32")
    make_checkpoint(options, tmp_path / "made")
    path = write_gguf(tmp_path / "made", tmp_path / "m.gguf", "q4_k", down="q6_k")
    first = kept_model_spec(path, cache=cache)
    monkeypatch.chdir(tmp_path)
    assert kept_model_spec("m.gguf", cache=cache) == replace(first, path="m.gguf")
    assert kept_model_spec("m.gguf", cache=cache) == model_spec("m.gguf")
    assert len(derived) == 1


def test_it_is_found_without_torch(source, cache):
    kept_model_spec(source, cache=cache)
    text = (
        "import sys; from pathlib import Path; from dflash_moe.config import CacheSettings\n"
        "from dflash_moe.store.kept_spec import kept_model_spec\n"
        "assert kept_model_spec(sys.argv[1], cache=CacheSettings(Path(sys.argv[2]))).layers\n"
        "assert not {'torch', 'transformers'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", text, str(source), str(cache.path)], check=True, timeout=60)


def test_each_dtype_has_its_own(source, cache, derived):
    specs = [kept_model_spec(source, dtype, cache=cache) for dtype in (None, "f32", "bf16")]
    assert [spec.dtype for spec in specs] == [specs[0].dtype, "f32", "bf16"]
    assert [kept_model_spec(source, dtype, cache=cache) for dtype in (None, "f32", "bf16")] == specs
    assert len(derived) == len(specs_in(cache)) == 3
    with pytest.raises(ConfigError, match="dtype 'int8' is not allowed"):
        kept_model_spec(source, "int8", cache=cache)


def test_a_changed_configuration_is_derived_again(source, cache, derived):
    first = kept_model_spec(source, cache=cache)
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, "num_experts_per_tok": 1}))
    second = kept_model_spec(source, cache=cache)
    assert [layer.top_k for layer in second.layers] == [1] * len(first.layers)
    assert second == model_spec(source)
    (source / "more.json").write_text("{}")
    assert kept_model_spec(source, cache=cache) == second
    assert len(derived) == 3


@pytest.mark.parametrize("name", ["dflash_moe", "code", "transformers", "torch"])
def test_other_code_derives_again(name, source, cache, derived, monkeypatch):
    kept_model_spec(source, cache=cache)
    code = spec_file.deriving_code()
    monkeypatch.setattr(spec_file, "deriving_code", lambda: {**code, name: "0" * 64})
    kept_model_spec(source, cache=cache)
    kept_model_spec(source, cache=cache)
    assert len(derived) == len(specs_in(cache)) == 2


def test_a_transformers_under_development_keeps_nothing(monkeypatch):
    version = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version(name) + ".dev0")
    assert spec_file.deriving_code() is None


def test_classes_that_a_program_registered_keep_nothing(source, cache, monkeypatch):
    monkeypatch.setattr(kept_spec, "_KNOWN_CODE", ("dflash_moe",))
    assert kept_model_spec(source, cache=cache).layers
    assert specs_in(cache) == []


def test_files_that_may_still_change_keep_nothing(source, cache, monkeypatch):
    monkeypatch.setattr(checkpoint_files, "SETTLED_NS", 3600 * 10**9)
    kept_model_spec(source, cache=cache)
    assert specs_in(cache) == []


def test_files_that_change_meanwhile_keep_nothing(source, cache, monkeypatch):
    derive = kept_spec.spec_of

    def touching(*arguments):
        os.utime(source / "config.json", (1, 1))
        return derive(*arguments)

    monkeypatch.setattr(kept_spec, "spec_of", touching)
    kept_model_spec(source, cache=cache)
    assert specs_in(cache) == []


def test_a_cache_that_is_off_keeps_nothing(source, cache):
    assert kept_model_spec(source, cache=replace(cache, is_off=True)).layers
    assert not cache.path.exists()


def test_a_folder_that_is_only_read_is_only_read(source, cache, derived, monkeypatch):
    monkeypatch.setattr(kept_spec.CacheFolder, "is_writable", property(lambda _: False))
    kept_model_spec(source, cache=cache)
    assert specs_in(cache) == []
    monkeypatch.undo()
    monkeypatch.setattr(checkpoint_files, "SETTLED_NS", 0)
    first = kept_model_spec(source, cache=cache)
    before = specs_in(cache)[0].stat()
    monkeypatch.setattr(kept_spec.CacheFolder, "is_writable", property(lambda _: False))
    monkeypatch.setattr(kept_spec, "load_architecture", None)
    assert kept_model_spec(source, cache=cache) == first
    assert specs_in(cache)[0].stat().st_mtime_ns == before.st_mtime_ns


def test_a_folder_that_others_may_write_is_not_used(source, cache, derived, caplog):
    caplog.set_level(logging.INFO, "dflash_moe")
    kept_model_spec(source, cache=cache)
    os.chmod(cache.path, 0o777)
    caplog.clear()
    kept_model_spec(source, cache=cache)
    assert len(derived) == 2
    (line,) = caplog.messages
    assert line.startswith(f"what is derived of a model is not kept: cache folder {cache.path} has mode 0777")


def test_what_is_wrong_with_a_checkpoint_is_said_as_ever(tmp_path, cache):
    with pytest.raises(CheckpointError, match="no such directory or file"):
        kept_model_spec(tmp_path / "none", cache=cache)
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match="the folder is empty"):
        kept_model_spec(tmp_path / "empty", cache=cache)


@pytest.mark.parametrize("damage", ["cut", "flipped", "other model", "bad layer", "text", "empty", "writable", "link"])
def test_a_damaged_file_counts_as_none_and_is_written_anew(damage, source, cache, derived, caplog):
    first = kept_model_spec(source, cache=cache)
    (file,) = specs_in(cache)
    text = file.read_bytes()
    value = json.loads(text)
    value["spec"]["layers"][0]["num_experts"] = 0
    damaged = {
        "cut": text[:-7],
        "flipped": text.replace(b'"top_k":2', b'"top_k":3', 1),
        "other model": with_digest({**json.loads(text), "path": "/other"}),
        "bad layer": with_digest(value),
        "text": b"[" * 100_000,
        "empty": b"",
    }
    if damage in damaged:
        assert damaged[damage] != text
        replaced(file, damaged[damage])
    elif damage == "link":
        file.rename(source / "elsewhere")
        file.symlink_to(source / "elsewhere")
    else:
        os.chmod(file, 0o620)
    assert kept_model_spec(source, cache=cache) == first
    (line,) = caplog.messages
    assert str(file) in line
    assert specs_in(cache) == [file]
    assert not file.is_symlink()
    assert file.read_bytes() == text
    assert kept_model_spec(source, cache=cache) == first
    assert len(derived) == 2


def test_ignored_scales_are_said_each_time(source, cache, derived, caplog, monkeypatch):
    monkeypatch.setattr(kept_spec, "has_ignored_scales", lambda checkpoint: True)
    kept_model_spec(source, cache=cache)
    caplog.clear()
    kept_model_spec(source, cache=cache)
    assert caplog.messages == [f"checkpoint {source}: its static scales of activations (input_scale) are ignored"]
    assert len(derived) == 1


def test_only_those_used_last_stay(source, cache, monkeypatch):
    kept_model_spec(source, cache=cache)
    (first,) = specs_in(cache)
    value = json.loads(first.read_text())
    for number in range(MAX_DERIVED - 1):
        (cache.path / SPECS / f"{number}.json").write_text("old")
        os.utime(cache.path / SPECS / f"{number}.json", (1000 + number, 1000 + number))
    kept_model_spec(source, "f32", cache=cache)
    names = {path.name for path in specs_in(cache)}
    assert len(names) == MAX_DERIVED
    assert first.name in names
    assert "0.json" not in names
    assert "1.json" in names
    assert value["path"] == str(source)


def test_gc_drops_specs_that_nobody_finds_any_more(source, tmp_path, cache, monkeypatch):
    kept_model_spec(source, cache=cache)
    code = spec_file.deriving_code()
    monkeypatch.setattr(spec_file, "deriving_code", lambda: {**code, "torch": "1.0"})
    kept_model_spec(source, cache=cache)
    monkeypatch.setattr(spec_file, "deriving_code", lambda: code)
    store = opened(tmp_path)
    try:
        size = store.num_bytes()
        assert size == 2 * 4096
        removed = store.collect(is_over=never)
        assert (removed.num_files, removed.num_bytes) == (1, size // 2)
        (kept,) = specs_in(cache)
        os.utime(source / "config.json", (1, 1))
        assert store.collect(is_over=never).num_files == 1
        assert not kept.exists()
    finally:
        store.close()


def test_a_model_is_removed_with_its_specs(source, tmp_path, cache):
    first = kept_model_spec(source, cache=cache)
    kept_model_spec(source, "f32", cache=cache)
    store = opened(tmp_path)
    try:
        of_model(store, source).write(GROUP, pieces, is_over=never).close()
        assert store.remove("0" * 64, is_over=never).num_files == 0
        assert store.remove(first.fingerprint, is_over=never).num_files == 2
        kept_model_spec(source, cache=cache)
        assert store.remove(str(source), is_over=never).num_files == 2
        assert specs_in(cache) == []
        assert list((cache.path / PANELS).iterdir()) == []
    finally:
        store.close()


# -- hostile files ---------------------------------------------------------------------------------

SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20)
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3), max_leaves=6
)
HUGE = st.sampled_from([10**400, -(10**400), "x" * 10**5, float("inf"), "{expert}", 1 << 18])


def places(value, above=()):
    """Yields the way to every value inside a value."""
    inner = value.items() if type(value) is dict else enumerate(value) if type(value) is list else ()
    for key, one in inner:
        yield (*above, key)
        yield from places(one, (*above, key))


@given(data=st.data())
def test_fields_of_any_value_are_a_spec_or_refused(data, tmp_path_factory):
    fields = fields_of_tiny(tmp_path_factory)
    for _ in range(data.draw(st.integers(1, 3))):
        *way, last = data.draw(st.sampled_from(list(places(fields))))
        owner = fields
        for key in way:
            owner = owner[key]
        if type(owner) is dict and data.draw(st.booleans()):
            del owner[last]
            owner[data.draw(st.text(max_size=8))] = 0
        else:
            owner[last] = copy.deepcopy(data.draw(VALUES | HUGE))
    try:
        spec = spec_of_fields(fields, "/m")
    except ValueError:
        return
    again = spec_fields(spec, has_ignored_scales=False)
    assert spec_of_fields(json.loads(closed_json.encode(again)), "/m") == spec


@given(text=st.binary(max_size=300) | VALUES.map(lambda value: json.dumps(value).encode()))
def test_a_file_of_any_bytes_counts_as_none(tmp_path_factory, text):
    folder = kept_spec.CacheFolder.open(tmp_path_factory.mktemp("any") / "store", allow_network=False)
    try:
        with folder.writing(never), folder.new_file(SPECS, max(1, len(text))) as file:
            file.write_at(0, text)
            file.publish("0.json")
        assert spec_file.read_spec(folder, "0.json") is None
    finally:
        folder.close()


@given(data=st.data())
def test_no_flipped_bit_is_read(data, tmp_path_factory):
    folder = kept_spec.CacheFolder.open(tmp_path_factory.mktemp("bit") / "store", allow_network=False)
    key = spec_file.SpecKey(
        "/m", (checkpoint_files.FileState("m.gguf", 1, 2, 3, 4, 5),), "", {**spec_file.deriving_code(), "torch": "1"}
    )
    try:
        with folder.writing(never):
            spec_file.write_spec(folder, spec_file.SpecFile(key, fields_of_tiny(tmp_path_factory)))
        assert spec_file.read_spec(folder, key.name).key == key
        path = folder.path / SPECS / key.name
        text = bytearray(path.read_bytes())
        text[data.draw(st.integers(0, len(text) - 1))] ^= 1 << data.draw(st.integers(0, 7))
        replaced(path, bytes(text))
        assert spec_file.read_spec(folder, key.name) is None
    finally:
        folder.close()


def fields_of_tiny(tmp_path_factory):
    if not _TINY:
        spec = tiny_checkpoint(tmp_path_factory.mktemp("tiny") / "model")
        _TINY.append(closed_json.encode(spec_fields(spec, has_ignored_scales=False)))
    return json.loads(_TINY[0])


_TINY: list[bytes] = []
