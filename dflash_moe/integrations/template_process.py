"""The program that renders chat templates, in a process of its own: a template comes from whoever
made the model, and may loop, fill the memory or look for a way out of jinja2's sandbox.

Run as a script by `chat_template.py`, with nothing of ours imported. It reads requests from stdin
and writes answers to stdout, each a length of 4 bytes and JSON, and ends when stdin does. Before
the first request it gives up what a template never needs: files, processes, memory beyond its
limit. A request that takes more processor time than its limit ends the process by SIGPROF.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import sys

if not getattr(sys.flags, "safe_path", False):
    # Python before 3.11 has no `-P`, and puts this folder first on the path.
    del sys.path[0]

import json
import resource
import signal
import struct
import time
from datetime import datetime
from typing import Any, BinaryIO

# Those who import this file for its limits need no jinja2.
RENDER_S = 1.0  # of processor time, compiling included
MEMORY_BYTES = 256 << 20  # of address space; the interpreter with jinja2 takes 25 MiB of it
# A request says how many bytes of text it takes, so many at most: of the worst text, whose letters
# are six bytes of JSON for two of UTF-8, thirteen times as many are in memory at once.
MAX_TEXT_BYTES = MEMORY_BYTES // 16
LENGTH = struct.Struct("<I")
# What an answer says went wrong.
SYNTAX, REFUSED, FAILED, MEMORY, OUTPUT = "syntax", "refused", "failed", "memory", "output"
# Characters of an error that are passed on.
_MAX_MESSAGE = 1000
_TEMPLATE_FILE = "<template>"


def run(requests: BinaryIO, answers: BinaryIO) -> None:
    """Renders until `requests` ends."""
    environment = _environment()
    _warm_up(environment)
    _give_up_rights()
    _write(answers, {"ready": True})
    compiled: dict[str, Any] = {}
    while (request := _read(requests)) is not None:
        signal.setitimer(signal.ITIMER_PROF, RENDER_S)
        try:
            answer = _answer(environment, compiled, request)
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0.0)
        _write(answers, answer)


def _answer(environment: Any, compiled: dict[str, Any], request: dict[str, Any]) -> dict[str, Any]:
    import jinja2

    try:
        text = request["template"]
        if text not in compiled:
            compiled.clear()
            compiled[text] = environment.from_string(text)
        return _rendered(compiled[text], request["variables"], min(request["max_text_bytes"], MAX_TEXT_BYTES))
    except MemoryError:
        return {"error": MEMORY}
    except jinja2.TemplateSyntaxError as error:
        return {"error": SYNTAX, "message": _cut(error.message), "line": error.lineno}
    except _Refused as error:
        return {"error": REFUSED, "message": _cut(str(error))}
    except Exception as error:  # noqa: BLE001 - a template may raise whatever Python does
        return {"error": FAILED, "message": _cut(f"{type(error).__name__}: {error}"), "line": _line(error)}


def _rendered(template: Any, variables: dict[str, Any], max_text_bytes: int) -> dict[str, Any]:
    parts, size = [], 0
    for part in template.generate(variables):
        size += len(part.encode("utf-8", "surrogatepass"))
        if size > max_text_bytes:
            return {"error": OUTPUT}
        parts.append(part)
    return {"text": "".join(parts)}


class _Refused(Exception):  # noqa: N818 - it is what a template says
    """A template called `raise_exception`."""


def _environment() -> Any:
    """Returns the environment that templates of transformers' checkpoints are written for
    (https://huggingface.co/docs/transformers/chat_templating_writing).
    """
    from jinja2 import ext, nodes
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(ext.Extension):
        """`{% generation %}` marks what a model learns to write; to render it changes nothing."""

        tags = {"generation"}

        def parse(self, parser: Any) -> nodes.Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body, lineno=line)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, ext.loopcontrols], cache_size=0
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    # jinja2's own filter escapes what HTML does not take.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: Any) -> None:
    raise _Refused(str(message))


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _warm_up(environment: Any) -> None:
    """Loads what jinja2 and Python load late, for which no file can be opened afterwards: the time
    zone, and the modules that filters and errors need.
    """
    import encodings.idna  # noqa: F401
    import pprint  # noqa: F401
    import random  # noqa: F401
    import textwrap  # noqa: F401

    import jinja2.constants
    import jinja2.debug  # noqa: F401

    time.tzset()
    template = environment.from_string(
        "{% macro m(a) %}{{ a|tojson }}{% endmacro %}{% for i in range(2) %}{{ m([i, 'é']) }}{% endfor %}"
        "{{ strftime_now('%d %B %Y') }}{% generation %}{% endgeneration %}{{ {'a': 1}|pprint }}{{ 'a'.b.c }}"
    )
    try:
        "".join(template.generate({}))
    except Exception as error:  # noqa: BLE001 - its last expression fails, to load what errors need
        _line(error)


def _give_up_rights() -> None:
    """Sets the limits. A hard limit cannot be raised again."""
    # Who started this may have ignored or blocked the signal, and children inherit that.
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGPROF})
    limits = {
        resource.RLIMIT_AS: MEMORY_BYTES,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_FSIZE: 0,
        # The open ones stay: stdin, stdout and the null device.
        resource.RLIMIT_NOFILE: 0,
        resource.RLIMIT_NPROC: 0,
    }
    for which, limit in limits.items():
        resource.setrlimit(which, (limit, limit))


def _line(error: BaseException) -> int | None:
    """Returns the line of the template in which an error was raised."""
    found, trace = None, error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == _TEMPLATE_FILE:
            found = trace.tb_lineno
        trace = trace.tb_next
    return found


def _cut(text: str | None) -> str:
    return (text or "")[:_MAX_MESSAGE]


def _read(stream: BinaryIO) -> dict[str, Any] | None:
    head = stream.read(LENGTH.size)
    if len(head) < LENGTH.size:
        return None
    found: dict[str, Any] = json.loads(stream.read(LENGTH.unpack(head)[0]))
    return found


def _write(stream: BinaryIO, answer: dict[str, Any]) -> None:
    text = json.dumps(answer).encode("ascii")
    stream.write(LENGTH.pack(len(text)) + text)
    stream.flush()


if __name__ == "__main__":
    run(sys.stdin.buffer, sys.stdout.buffer)
