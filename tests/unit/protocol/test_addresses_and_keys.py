"""Addresses and key files: the closed set of forms, and what is refused.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import resource
from pathlib import Path

import pytest

from dflash_moe.errors import ConfigError, DflashError
from dflash_moe.protocol.failures import ERROR_CLASSES, to_error, to_refusal
from dflash_moe.protocol.keys import (
    FileKey,
    read_any_key_file,
    read_key_file,
    worker_key,
    write_key_file,
    write_worker_key_file,
)
from dflash_moe.topology.addresses import Address, parse_address


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (None, Address("shared")),
        ("loopback", Address("loopback")),
        ("unix", Address("unix")),
        ("tcp", Address("tcp")),
        ("tcp://10.0.0.2:7171", Address("tcp", host="10.0.0.2", port=7171)),
        ("tcp://[::1]:7171", Address("tcp", host="::1", port=7171)),
        ("unix:///run/x.sock", Address("unix", path="/run/x.sock")),
    ],
)
def test_every_address_form_parses_and_prints_back(text: str | None, expected: Address) -> None:
    assert parse_address(text) == expected
    assert str(expected) == (text or "shared")


OPENSSL_OWN_KEY = "f80808c74d66c6427226e8b1815a450352db9b7cde36698bef2cac916b7d0663"
BAD = ["", "udp://x:1", "tcp://x", "tcp://:1", "tcp://x:70000", "tcp://::1:5", "unix://rel", "tcp://a b:1"]
LOCAL = {"127.0.0.1": True, "::1": True, "localhost": True, "0.0.0.0": False, "h": False}


@pytest.mark.parametrize("text", BAD)
def test_a_bad_address_is_refused_and_quoted(text: str) -> None:
    with pytest.raises(ConfigError, match="address") as caught:
        parse_address(text)
    assert repr(text) in str(caught.value)


@pytest.mark.parametrize(("host", "expected"), list(LOCAL.items()))
def test_only_this_machines_own_addresses_count_as_loopback(host: str, expected: bool) -> None:
    assert Address("tcp", host=host, port=1).is_loopback is expected


def test_a_made_key_is_private_and_reads_back(tmp_path: Path) -> None:
    path = tmp_path / "key"
    write_key_file(path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert len(read_key_file(path)) == 32
    with pytest.raises(ConfigError, match="exists"):
        write_key_file(path)


def test_a_key_that_does_not_fit_the_disk_leaves_no_file(tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, before[1]))
    try:
        with pytest.raises(ConfigError, match="key cannot be written: File too large"):
            write_key_file(tmp_path / "key")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not (tmp_path / "key").exists()


def test_a_key_file_others_can_read_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "key"
    write_key_file(path)
    path.chmod(0o640)
    with pytest.raises(ConfigError, match="mode 0640"):
        read_key_file(path)


@pytest.mark.parametrize("content", ["", "zz" * 32, "ab" * 31, "ab" * 33])
def test_a_malformed_or_missing_key_file_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "key"
    with pytest.raises(ConfigError, match="cannot be read"):
        read_key_file(path)
    path.write_text(content)
    path.chmod(0o600)
    with pytest.raises(ConfigError, match="64 hexadecimal digits"):
        read_key_file(path)


@pytest.mark.parametrize("content", ["00" * 32, "ff" * 32, "0123456789abcd" * 4 + "01234567"], ids=["zeros", "ones", "digits"])
def test_a_key_that_nobody_drew_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "key"
    path.write_text(content)
    path.chmod(0o600)
    with pytest.raises(ConfigError) as caught:
        read_key_file(path)
    assert str(caught.value) == (
        f"key file {path} repeats a few digits, which anybody can guess; `dflash-moe key make FILE` writes a random key"
    )


def test_errors_keep_their_class_across_the_wire_and_foreign_ones_become_worker_errors() -> None:
    for cls in set(ERROR_CLASSES.values()):
        assert type(to_error(to_refusal(cls("why\x1b[31m")), worker="w3")) is cls
    refusal = to_refusal(KeyError("x" * 9000))
    error = to_error(refusal, worker="w3")
    assert isinstance(error, DflashError)
    assert "w3: KeyError" in str(error)
    assert "\x1b" not in str(to_error(to_refusal(ConfigError("\x1b[31m")), worker="w3"))


def test_a_directory_as_key_file_is_refused_by_its_name(tmp_path):
    with pytest.raises(ConfigError, match=f"key file {tmp_path} cannot be read: it is a folder and not a regular file"):
        read_key_file(tmp_path)


def test_a_workers_own_key_comes_from_the_groups_and_its_name_alone(tmp_path: Path) -> None:
    group, own = tmp_path / "group", tmp_path / "w0"
    write_key_file(group)
    write_worker_key_file(own, worker="w0", group=group)
    assert own.stat().st_mode & 0o777 == 0o600
    found, shared = read_any_key_file(own), read_key_file(group)
    assert found == FileKey(worker_key(shared, "w0"), "w0")
    assert read_any_key_file(group) == FileKey(shared, "")
    keys = {shared, *(worker_key(key, name) for key in (shared, bytes(range(32))) for name in ("w0", "w1", "w"))}
    assert len(keys) == 7
    # HKDF-SHA256 as `openssl kdf` computes it: head and workers of every version need it.
    assert worker_key(bytes(range(32)), "w0").hex() == OPENSSL_OWN_KEY
    with pytest.raises(ConfigError, match=f"key file {own} is worker w0's own, .*give the group's key file"):
        read_key_file(own)
    with pytest.raises(ConfigError, match=f"key file {own} is worker w0's own"):
        write_worker_key_file(tmp_path / "w1", worker="w1", group=own)
    with pytest.raises(ConfigError, match="exists"):
        write_worker_key_file(own, worker="w0", group=group)


@pytest.mark.parametrize("name", ["", "host", "a b", "../x", "x" * 64])
def test_a_key_is_made_for_names_of_workers_only(tmp_path: Path, name: str) -> None:
    write_key_file(tmp_path / "group")
    with pytest.raises(ConfigError, match="--worker .* is no name of a worker; allowed: 1..63 letters"):
        write_worker_key_file(tmp_path / "own", worker=name, group=tmp_path / "group")
    assert not (tmp_path / "own").exists()


@pytest.mark.parametrize("rest", ["w0", "worker ", "worker host", "worker a b", "worker w0\nworker w1", "worker " + "x" * 64])
def test_a_key_file_says_whose_it_is_or_nothing(tmp_path: Path, rest: str) -> None:
    path = tmp_path / "key"
    path.write_text(f"{bytes(range(32)).hex()}\n{rest}\n")
    path.chmod(0o600)
    with pytest.raises(ConfigError, match="must hold 64 hexadecimal digits"):
        read_any_key_file(path)
