"""The files of a chat: texts, saved conversations and what was typed, each refused in one sentence
where something else lies there.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import json
import os
import stat

import pytest

from dflash_moe.cli.chat import files as chat_files
from dflash_moe.cli.chat.files import decoded, load_conversation, named_path, read_text, save_conversation, typed_file
from dflash_moe.errors import ConfigError

SAID = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Grüße"},
    {"role": "assistant", "content": "a\nb"},
]


def mode_of(path) -> int:
    return stat.S_IMODE(os.stat(path).st_mode)


def document(**changes) -> dict:
    return {"format": chat_files.FORMAT, "version": 1, "messages": SAID} | changes


# -- texts -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("raw", "text", "places"),
    [
        (b"caf\xe9", "caf\ufffd", "in one place"),
        (b"\xff a \xf0\x9f\x98", "\ufffd a \ufffd", "in 2 places"),
        ("an honest \ufffd".encode(), "an honest \ufffd", None),
        ("Grüße".encode(), "Grüße", None),
    ],
)
def test_bytes_that_are_no_text_are_replaced_and_that_is_said(capsys, raw, text, places):
    assert decoded(raw, "stdin") == text
    expected = "" if places is None else f"stdin: not UTF-8 text {places}, where \ufffd stands now\n"
    assert capsys.readouterr().err == expected


def test_a_text_is_read_without_its_byte_order_mark(tmp_path):
    path = tmp_path / "a b.txt"
    path.write_bytes(b"\xef\xbb\xbfone\ntwo\n")
    assert read_text(named_path(f'"{path}"')) == "one\ntwo\n"


def test_a_path_may_begin_with_a_home(monkeypatch):
    monkeypatch.setenv("HOME", "/of/mine")
    assert str(named_path("~/x")) == "/of/mine/x"
    with pytest.raises(ConfigError, match="nobody-of-this-name"):
        named_path("~nobody-of-this-name/x")


@pytest.mark.parametrize("read", [read_text, load_conversation])
def test_what_is_no_file_is_refused_at_once(tmp_path, read):
    os.mkfifo(tmp_path / "pipe")
    for path, words in (
        (tmp_path / "pipe", "cannot be read: it is a FIFO and not a regular file"),
        (tmp_path, "cannot be read: it is a folder and not a regular file"),
        ("/dev/null", "cannot be read: it is a device and not a regular file"),
        (tmp_path / "absent", "cannot be read: No such file or directory"),
        (tmp_path / ("n" * 300), "cannot be read: File name too long"),
        ("a\0b", "cannot be read: embedded null byte"),
    ):
        with pytest.raises(ConfigError, match=words):
            read(named_path(str(path)))


def test_a_file_larger_than_any_context_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(chat_files, "MAX_TEXT_BYTES", 1 << 20)
    path = tmp_path / "large"
    path.write_bytes(b"x" * ((1 << 20) + 1))
    with pytest.raises(ConfigError, match="larger than 1 MiB, more than any model reads"):
        read_text(path)


# -- conversations ---------------------------------------------------------------------------------


def test_a_conversation_comes_back_as_it_was_and_is_nobody_elses(tmp_path):
    path = tmp_path / "talk.json"
    previous = os.umask(0)
    try:
        save_conversation(path, SAID)
        assert mode_of(path) == 0o600
        assert load_conversation(path) == SAID
        save_conversation(path, SAID[:1])
    finally:
        os.umask(previous)
    assert load_conversation(path) == SAID[:1]
    assert [one.name for one in tmp_path.iterdir()] == ["talk.json"]


def test_a_file_that_is_no_conversation_is_not_overwritten(tmp_path):
    path = tmp_path / "notes.txt"
    path.write_text("mine")
    with pytest.raises(ConfigError, match=r"notes.txt: no saved conversation: .*; it is left as it is: choose another name"):
        save_conversation(path, SAID)
    assert path.read_text() == "mine"
    with pytest.raises(ConfigError, match="cannot be written: No such file or directory"):
        save_conversation(tmp_path / "absent" / "talk.json", SAID)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "no saved conversation: not JSON"),
        ("[" * 100_000, "no saved conversation: not JSON"),
        ("\xff", "no saved conversation: not JSON"),
        ("[]", r"no saved conversation: \[\] is no object with format and version and messages"),
        ('{"format": "x", "format": "x"}', "a field is there twice"),
        (document(more=1), "field 'more' is not known; it has format, version, messages and nothing else"),
        ({"format": "x"}, "field 'version' is missing"),
        (document(format="x"), "format is 'x', expected 'dflash-moe conversation'"),
        (document(version=True), "no saved conversation"),
        (document(version=2), "a conversation of version 2; this program reads version 1"),
        (document(messages={}), r"messages is {}, expected a list"),
        (document(messages=[SAID[0], "x"]), "message 2: 'x' is no object with role and content"),
        (document(messages=[SAID[0] | {"tool": 1}]), "message 1: field 'tool' is not known"),
        (document(messages=[{"role": "user", "content": 1}]), "message 1: content is 1, expected a text"),
    ],
)
def test_a_file_that_is_no_saved_conversation_says_what_is_wrong(tmp_path, text, words):
    path = tmp_path / "talk.json"
    path.write_text(text if isinstance(text, str) else json.dumps(text), encoding="latin-1")
    with pytest.raises(ConfigError, match=words) as refused:
        load_conversation(path)
    assert str(refused.value).startswith(str(path))
    assert "\n" not in str(refused.value)


# -- what was typed --------------------------------------------------------------------------------


def test_what_is_typed_lies_in_a_file_of_the_users_own(tmp_path):
    path = typed_file({"XDG_STATE_HOME": str(tmp_path / "state")})
    assert path == tmp_path / "state" / "dflash-moe" / "chat_history"
    assert (mode_of(path), mode_of(path.parent)) == (0o600, 0o700)
    path.write_text("\n# now\n+kept\n")
    os.chmod(path, 0o644)
    assert typed_file({"XDG_STATE_HOME": str(tmp_path / "state")}).read_text() == "\n# now\n+kept\n"
    assert mode_of(path) == 0o600


def test_without_a_variable_it_is_below_the_home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert typed_file({}) == tmp_path / ".local" / "state" / "dflash-moe" / "chat_history"


def test_what_was_typed_is_cut_back_to_its_newer_half(tmp_path, monkeypatch):
    monkeypatch.setattr(chat_files, "MAX_TYPED_BYTES", 1000)
    path = typed_file({"XDG_STATE_HOME": str(tmp_path)})
    entries = [f"\n# 2026\n+entry {number}\n" for number in range(100)]
    path.write_text("".join(entries))
    typed_file({"XDG_STATE_HOME": str(tmp_path)})
    kept = path.read_text()
    assert len(kept) <= 500
    assert kept
    assert "".join(entries).endswith(kept)
    assert kept.startswith("\n# 2026\n+entry ")


def test_where_there_can_be_no_file_for_it_that_is_said(tmp_path):
    (tmp_path / "dflash-moe").mkdir()
    os.mkfifo(tmp_path / "dflash-moe" / "chat_history")
    with pytest.raises(ConfigError, match="cannot be used: it is a FIFO"):
        typed_file({"XDG_STATE_HOME": str(tmp_path)})
    (tmp_path / "taken").write_text("")
    with pytest.raises(ConfigError, match="cannot be used: Not a directory"):
        typed_file({"XDG_STATE_HOME": str(tmp_path / "taken" / "x")})
    with pytest.raises(ConfigError, match="XDG_STATE_HOME is no absolute path"):
        typed_file({"XDG_STATE_HOME": "state"})
