"""The program that follows grammars, in processes of its own: a grammar or a schema comes from
whoever asks, and may take minutes, gigabytes, or more stack than there is, in a library that
nothing can interrupt.

Run as a script by `grammars.py`, with nothing of ours imported. It reads what it needs to know of a
tokenizer from the socket that is its stdin, and then gets one socket after the other, each with a
pipe. For each it forks a child, which follows one grammar: it has the tables of the tokenizer in
common with all others, and gives up what a grammar never needs. One that takes more than its limits
ends by itself, and so does one whose pipe is closed, whatever it is doing.

A message is a length of 4 bytes and so many more. A child is first told its grammar, in JSON; then
each message holds all tokens so far, as int32, and is answered with what may follow them. The first
byte of an answer is GRAMMAR, MASK or ERROR.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import sys

if __name__ == "__main__" and not getattr(sys.flags, "safe_path", False):
    # Python before 3.11 has no `-P`, and puts this folder first on the path.
    del sys.path[0]

import fcntl
import gc
import io
import json
import os
import resource
import signal
import socket
import struct
from array import array
from typing import Any

# Those who import this file for its limits need no llguidance.
STEP_S = 1.0  # of processor time, for a message
# What a child may need beside what it shares. A schema of 64 KiB takes 10 MiB, and the library's
# tables for it up to 100 MiB with the number of states below.
MEMORY_BYTES = 128 << 20
_MAX_LEXER_STATES = 50_000
# Answers that keep to one grammar at the same time, of which each has a state of its own. With more
# than these the one that was asked for longest ago is computed again when it is asked for.
MAX_STATES = 256
LENGTH = struct.Struct("<I")
GRAMMAR, MASK, ERROR = b"g", b"m", b"e"
# Characters of an error that are passed on.
_MAX_MESSAGE = 600
# Between the parts of JSON stands what models write: nothing, a blank, or a new line with its
# indent. With any number of them a model may never come to an end (the rule `space` of llama.cpp's
# json-schema-to-grammar.cpp).
JSON_OPTIONS: Any = {"whitespace_pattern": r" |\n{1,2}[ \t]{0,20}"}


def run(link: socket.socket) -> None:
    """Starts children until `link` ends."""
    # Without a buffer, which would take the descriptors that come behind.
    with link.makefile("rb", buffering=0) as messages:
        told = json.loads(_read(messages) or b"{}")
        text = _read(messages) or b""
    try:
        tokenizer = _tokenizer(told, text.decode())
    except Exception as error:  # noqa: BLE001 - the library raises what it likes for a tokenizer that it cannot read
        _write(link, ERROR, f"{type(error).__name__}: {error}"[:_MAX_MESSAGE])
        return
    del text
    # The kernel ends these before anything that has weights.
    with open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")
    os.nice(told["niceness"])
    with open("/proc/self/statm") as file:
        shared_bytes = int(file.read().split()[0]) * resource.getpagesize()
    # The collector would write into pages that are shared.
    gc.freeze()
    # Children that have ended are nobody's concern.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    _write(link, GRAMMAR, "")
    while (received := socket.recv_fds(link, 1, 2))[0]:
        descriptor, pipe = received[1]
        with socket.socket(fileno=descriptor) as sock:
            _fork(sock, pipe, link, tokenizer, shared_bytes)
        os.close(pipe)


def _fork(sock: socket.socket, pipe: int, link: socket.socket, tokenizer: Any, shared_bytes: int) -> None:
    try:
        child = os.fork()
    except OSError:
        return  # whoever asked sees that its socket is closed
    if child:
        return
    code = 1
    try:
        link.close()
        _give_up_rights(shared_bytes)
        _end_with(pipe)
        _follow(sock, tokenizer)
        code = 0
    finally:
        os._exit(code)


def _end_with(pipe: int) -> None:
    """Has the kernel end this process once the other end of a pipe is closed."""
    fcntl.fcntl(pipe, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(pipe, fcntl.F_SETFL, os.O_ASYNC | os.O_NONBLOCK)
    try:
        os.read(pipe, 1)
    except BlockingIOError:
        return
    os._exit(0)  # it was closed before


def _give_up_rights(shared_bytes: int) -> None:
    """Sets the limits. A hard limit cannot be raised again."""
    # Who started this may have ignored or blocked these signals, and children inherit that.
    for ending in (signal.SIGPROF, signal.SIGIO):
        signal.signal(ending, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGPROF, signal.SIGIO})
    limits = {
        resource.RLIMIT_AS: shared_bytes + MEMORY_BYTES,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_FSIZE: 0,
        # The open ones stay: its socket, its pipe and the null device.
        resource.RLIMIT_NOFILE: 0,
        resource.RLIMIT_NPROC: 0,
    }
    for which, limit in limits.items():
        resource.setrlimit(which, (limit, limit))


def _tokenizer(told: dict[str, Any], text: str) -> Any:
    """Returns the model's tokenizer as the library has it. Without a `text` it knows bytes and the
    special tokens alone, which is enough to compile a grammar.
    """
    from llguidance import LLTokenizer, TokenizerWrapper

    ends = told["end_ids"]
    if text:
        return LLTokenizer(text, n_vocab=told["vocab_size"], eos_token=ends)
    return LLTokenizer(TokenizerWrapper(_Bytes(told["vocab_size"], told["special"], ends)), eos_token=ends)


class _Bytes:
    """A tokenizer whose words are bytes, behind the ids of the model, and its special tokens."""

    bos_token_id = None

    def __init__(self, vocab_size: int, special: dict[str, int], ends: list[int]) -> None:
        self._first = vocab_size
        self.eos_token_id = ends[0]
        self.tokens = [b""] * vocab_size + [bytes([byte]) for byte in range(256)]
        for token, token_id in special.items():
            self.tokens[token_id] = token.encode()
        self.special_token_ids = sorted({*special.values(), *ends})

    def __call__(self, text: bytes) -> list[int]:
        return [self._first + byte for byte in text]


class _Refused(Exception):  # noqa: N818 - it is what the library says
    """A grammar that there is not, in the words of the library."""


def _follow(sock: socket.socket, tokenizer: Any) -> None:
    """Answers one after the other until `sock` ends."""
    states: list[tuple[bytes, Any]] = []
    first: Any = None
    messages = sock.makefile("rb")
    while (message := _read(messages)) is not None:
        signal.setitimer(signal.ITIMER_PROF, STEP_S)
        try:
            if first is None:
                grammar = _grammar(json.loads(message))
                first = _first_state(tokenizer, grammar)
                answer: tuple[bytes, str | bytes] = (GRAMMAR, grammar)
            else:
                answer = (MASK, _mask(states, first, message))
        except _Refused as refused:
            answer = (ERROR, str(refused))
        except BaseException as error:  # noqa: BLE001 - a fault of the library is raised as one
            answer = (ERROR, f"the library that follows it has failed: {type(error).__name__}")
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0.0)
        _write(sock, *answer)
        if first is None:
            return


def _grammar(source: dict[str, str]) -> str:
    """Returns the library's own form of a source: `kind`, `text`, and the Lark grammar `around` it,
    which is empty where there is none.
    """
    from llguidance import LLMatcher, grammar_from

    kind, text = source["kind"], source["text"]
    try:
        if kind == "json":
            grammar = LLMatcher.grammar_from_json_schema(text, defaults=JSON_OPTIONS)
        elif kind == "choice":
            texts = " | ".join(json.dumps(one, ensure_ascii=False) for one in json.loads(text))
            grammar = LLMatcher.grammar_from_lark(f"start: {texts}")
        else:
            grammar = grammar_from(kind, text)  # type: ignore[arg-type]
    except ValueError as error:
        raise _Refused(str(error)[:_MAX_MESSAGE]) from None
    if not source["around"]:
        return grammar
    # The library's own form of a grammar in Lark's notation is its text.
    answer = json.loads(grammar)["grammars"][0] if grammar.startswith("{") else {"lark_grammar": grammar}
    return json.dumps({"grammars": [{"lark_grammar": source["around"]}, {**answer, "name": "answer"}]})


def _first_state(tokenizer: Any, grammar: str) -> Any:
    """Returns the matcher of a grammar before any token."""
    from llguidance import LLMatcher, LLParserLimits

    limits = LLParserLimits(max_lexer_states=_MAX_LEXER_STATES, verbose_errors=False)
    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=limits)
    _check(matcher)
    # It says whether there is any text at all.
    probe = matcher.deep_copy()
    probe.compute_bitmask()
    _check(probe)
    return matcher


def _mask(states: list[tuple[bytes, Any]], first: Any, token_ids: bytes) -> bytes:
    """Returns the bits of what may follow the tokens. `states` are the matchers of choices, each
    with the tokens behind it, the latest at the end; one of them goes on where it can.
    """
    known, matcher = max(
        (state for state in states if token_ids.startswith(state[0])), key=lambda state: len(state[0]), default=(b"", None)
    )
    if matcher is None:
        matcher = first.deep_copy()
        del states[: len(states) - MAX_STATES + 1]
    else:
        states.remove((known, matcher))
    for token_id in array("i", token_ids[len(known) :]):
        # Behind its end a text has only tokens that say so, which the library need not hear of.
        if matcher.is_stopped():
            break
        matcher.consume_token(token_id)
    bits: bytes = matcher.compute_bitmask()
    _check(matcher)
    states.append((token_ids, matcher))
    return bits


def _check(matcher: Any) -> None:
    if matcher.is_error():
        # It ends with a dump of its state, which was left out.
        text = matcher.get_error().partition("<non-verbose/>")[0].strip()
        text = text.replace("NoExtensionBias", "no text fits it (NoExtensionBias)")
        raise _Refused(text[:_MAX_MESSAGE])


def _read(messages: io.RawIOBase | io.BufferedIOBase) -> bytes | None:
    head = _read_exactly(messages, LENGTH.size)
    return None if head is None else _read_exactly(messages, LENGTH.unpack(head)[0])


def _read_exactly(messages: io.RawIOBase | io.BufferedIOBase, size: int) -> bytes | None:
    parts = []
    while size:
        try:
            part = messages.read(size)
        except ConnectionResetError:
            return None
        if not part:
            return None
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def _write(sock: socket.socket, kind: bytes, content: str | bytes) -> None:
    body = kind + (content.encode("utf-8", "replace") if isinstance(content, str) else content)
    sock.sendall(LENGTH.pack(len(body)) + body)


if __name__ == "__main__":
    run(socket.socket(fileno=0))
