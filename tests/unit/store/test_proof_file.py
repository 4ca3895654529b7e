"""The files of what was proven of a model: found only for the same files, code and machine, read
only where they are whole and their own, counted and removed like specs.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import json
import os
from dataclasses import replace
from types import SimpleNamespace

import pytest
from blake3 import blake3

from dflash_moe.store import closed_json, proof_file
from dflash_moe.store.closed_file import MAX_DERIVED
from dflash_moe.store.folder import PROOFS, CacheFolder
from dflash_moe.store.proof_file import ProofFile, ProofKey, read_proofs, write_proofs
from tests.unit.store.stored_panels import MODEL, make_checkpoint, never, opened, overwrite

PROVEN = {"layers": {}, "is_loop_proven": True, "not_independent": ""}


@pytest.fixture
def folder(tmp_path):
    found = CacheFolder.open(tmp_path / "store", allow_network=False)
    yield found
    found.close()


@pytest.fixture
def key(tmp_path):
    found = ProofKey.of(make_checkpoint(tmp_path / "model"), MODEL)
    assert found is not None
    return found


def write(folder, key, proofs=PROVEN):
    with folder.writing(never):
        write_proofs(folder, ProofFile(key, proofs))
    return folder.path / PROOFS / key.name


def replaced(path, data):
    overwrite(path, 0, data)
    os.chmod(path, 0o600)
    os.truncate(path, len(data))
    os.chmod(path, 0o400)


def with_digest(value, **changes):
    """Returns the text of a file with changes whose digest fits what else it says."""
    value = {**{name: one for name, one in value.items() if name != "digest"}, **changes}
    return closed_json.encode({**value, "digest": blake3(closed_json.encode(value)).hexdigest()})


def test_what_was_written_is_read_by_its_key_alone(folder, key):
    file = write(folder, key)
    assert read_proofs(folder, key.name) == ProofFile(key, PROVEN)
    assert file.stat().st_mode & 0o777 == 0o400
    for other in (
        replace(key, under="1" * 64), replace(key, path="/other"), replace(key, model="0" * 64),
        replace(key, files=(key.files[0]._replace(entry_ns=1),)),
        *(replace(key, proved_by={**key.proved_by, name: "0" * 64}) for name in key.proved_by),
    ):  # fmt: skip
        assert other.name != key.name
        assert read_proofs(folder, other.name) is None


def test_the_key_names_the_compiled_core(tmp_path, monkeypatch):
    before = proof_file.proving_code()
    (tmp_path / "_core.so").write_bytes(b"other machine code")
    monkeypatch.setattr(proof_file, "_core", SimpleNamespace(__file__=str(tmp_path / "_core.so")))
    after = proof_file.proving_code()
    assert {name for name in before if before[name] != after[name]} == {"code"}


@pytest.mark.parametrize("package", ["torch", "transformers", "numpy"])
def test_the_key_names_the_versions_of_what_computes(package, monkeypatch):
    before, version = proof_file.proving_code(), proof_file.installed_versions
    monkeypatch.setattr(proof_file, "installed_versions", lambda *names: {**version(*names), package: "0.1"})
    after = proof_file.proving_code()
    assert {name for name in before if before[name] != after[name]} == {package}


def test_the_key_names_the_machine_and_its_instruction_sets(tmp_path, monkeypatch):
    said = "processor\t: 0\nmodel name\t: A\ncpu MHz\t\t: {}\nmicrocode\t: 0x1\nflags\t\t: fma {}\n"

    def digest_of(mhz, flag, machine="m"):
        for name, text in (("_CPUS", said.format(mhz, flag)), ("_MACHINE_ID", machine)):
            (tmp_path / name).write_text(text)
            monkeypatch.setattr(proof_file, name, tmp_path / name)
        return proof_file.machine_digest()

    first = digest_of(1000, "avx2")
    assert digest_of(2000, "avx2") == first
    assert len({first, digest_of(1000, "avx512f"), digest_of(1000, "avx2", "n")}) == 3
    monkeypatch.setattr(proof_file, "_CPUS", tmp_path / "none")
    assert proof_file.machine_digest() != first


def test_a_checkpoint_that_is_gone_and_a_transformers_under_development_have_no_key(tmp_path, monkeypatch):
    assert ProofKey.of(tmp_path / "none", MODEL) is None
    monkeypatch.setattr(proof_file, "installed_versions", lambda *_names: None)
    assert ProofKey.of(make_checkpoint(tmp_path / "model"), MODEL) is None


@pytest.mark.parametrize("damage", ["cut", "flipped", "other key", "other version", "no map", "empty", "writable", "link"])
def test_a_damaged_or_foreign_file_counts_as_none(damage, folder, key, tmp_path, caplog):
    file = write(folder, key)
    text = file.read_bytes()
    damaged = {
        "cut": text[:-7],
        "flipped": text.replace(b'"is_loop_proven":true', b'"is_loop_proven":null', 1),
        "other key": with_digest(json.loads(text), under="2" * 64),
        "other version": with_digest(json.loads(text), version=2),
        "no map": with_digest(json.loads(text), proofs=[]),
        "empty": b"",
    }
    if damage in damaged:
        assert damaged[damage] != text
        replaced(file, damaged[damage])
    elif damage == "link":
        file.rename(tmp_path / "elsewhere")
        file.symlink_to(tmp_path / "elsewhere")
    else:
        os.chmod(file, 0o620)
    assert read_proofs(folder, key.name) is None
    (line,) = caplog.messages
    assert str(file) in line
    write(folder, key)
    assert file.read_bytes() == text
    assert not file.is_symlink()


def test_a_file_of_another_user_counts_as_none(folder, key):
    if os.getuid() != 0:
        pytest.skip("only root gives a file to somebody else")
    os.chown(write(folder, key), 65_534, 65_534)
    assert read_proofs(folder, key.name) is None


def test_only_those_used_last_stay(folder, key):
    for number in range(MAX_DERIVED + 3):
        os.utime(write(folder, replace(key, under=f"{number:064x}")), (1000 + number, 1000 + number))
    kept = set(folder.sizes(PROOFS))
    # The last one was dated only after the others were counted.
    assert {replace(key, under=f"{number:064x}").name for number in range(3, MAX_DERIVED + 3)} == kept


def test_they_are_counted_and_removed_like_specs(tmp_path, folder, key, monkeypatch):
    write(folder, key)
    write(folder, replace(key, proved_by={**key.proved_by, "torch": "1.0"}))
    store = opened(tmp_path)
    try:
        assert store.num_bytes() == 2 * 4096
        removed = store.collect(is_over=never)
        assert (removed.num_files, removed.num_bytes) == (1, 4096)
        assert set(folder.sizes(PROOFS)) == {key.name}
        assert store.remove("0" * 64, is_over=never).num_files == 0
        assert store.remove(MODEL, is_over=never).num_files == 1
        write(folder, key)
        assert store.remove(key.path, is_over=never).num_files == 1
        write(folder, key)
        os.utime(tmp_path / "model" / "model.safetensors", (1, 1))
        assert store.collect(is_over=never).num_files == 1
        assert folder.sizes(PROOFS) == {}
    finally:
        store.close()
