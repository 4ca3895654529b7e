"""Checks that every wait for another party has a bound, and that every place which might wait says
which.

The scan finds what can block: locks, waits on conditions and events, joins, queues, futures, system
calls on sockets and pipes, subprocesses, spinning. A call that carries its own limit is let pass.
Everything else must stand in known_waits.py, by file and expression, with the reason why it ends:
`straight: ...` for a mutex that is held over straight-line code only, without I/O, call-back, GIL
or another wait (the scan looks at what it is held over), `bounded: ...` for what bounds it
otherwise. An entry for a wait that is gone is a finding too.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.checks.known_waits import KNOWN
from tests.checks.sources import project_files

KINDS = ("straight: ", "bounded: ")
# A reason has at least so many words.
LEAST_WORDS = 5

# -- C++ -------------------------------------------------------------------------------------------

_CPP_NOISE = re.compile(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"', re.DOTALL)
_LOCK_TYPES = r"(?:lock_guard|unique_lock|scoped_lock|shared_lock)(?:\s*<[^;(){}]*>)?"
_CPP_PATTERNS = {
    # One lock is taken where it is declared, and the other is a member that a constructor takes.
    "lock": re.compile(rf"\b{_LOCK_TYPES}\s+\w+\s*[({{]\s*([\w.>\-\[\]*:]+)\s*[)}}]"),
    "lock member": re.compile(rf"\b{_LOCK_TYPES}\s+(\w+)\s*;"),
    "lock call": re.compile(r"([\w.>\-]*mutex\w*)(?:\.|->)lock\(\)"),
    "wait": re.compile(r"([\w.>\-]+?)(?:\.|->)wait\("),
    "join": re.compile(r"([\w.>\-]+?)(?:\.|->)join\(\)"),
    "call": re.compile(
        r"(?<![\w:])::(poll|ppoll|select|pselect|epoll_wait|recv|recvmsg|recvfrom|read|readv|write|writev|send|sendmsg|accept4?|"
        r"connect|waitpid|flock|pause|sigwait|sem_wait|msgrcv)\("
    ),
    "futex": re.compile(r"\b(SYS_futex)\b"),
    "type": re.compile(
        r"std::(future|shared_future|promise|async|latch|barrier|counting_semaphore|binary_semaphore|jthread|call_once)\b"
    ),
    "spin": re.compile(r"\b(_mm_pause|__builtin_ia32_pause|this_thread::yield|sched_yield)\b"),
    "gil": re.compile(r"\b(gil_scoped_acquire|PyGILState_Ensure)\b"),
    "device": re.compile(r"\b(\w*[sS]ynchronize)\s*\("),
}
_NEWLINES = re.compile(r"[^\n]")
# These calls leave the core, into a driver or a plug-in, or are of functions that were handed in.
_CPP_CALLS_OUT = re.compile(r"\b((?:table_\.|driver_->|runtime_->)\w+|function_|callback\w*)\s*\(")


@dataclass(frozen=True, slots=True)
class Wait:
    """A place that may block, with `what` it waits on as the code writes it. For a lock it has what
    the lock is held over that is no straight-line code.
    """

    where: str
    line: int
    what: str
    held_over: tuple[str, ...] = ()


def find(root: Path) -> list[str]:
    """Returns a finding for each wait that nobody accounts for, each account of no wait, and each
    mutex that is held over more than it may be.
    """
    waits = [wait for path in project_files(root, ".h", ".cc", ".cu", ".py") for wait in waits_of(path, root)]
    return findings_of(waits, KNOWN)


def findings_of(waits: list[Wait], known: Mapping[str, Mapping[str, str]]) -> list[str]:
    """Returns the findings for these waits and this table."""
    findings = []
    for wait in waits:
        reason = known.get(wait.where, {}).get(wait.what)
        at = f"{wait.where}:{wait.line}"
        if reason is None:
            findings.append(f"{at}: '{wait.what}' may wait without a bound; bound it, or account for it in known_waits.py")
        elif reason.startswith(KINDS[0]) and wait.held_over:
            findings.append(f"{at}: '{wait.what}' is held over {', '.join(wait.held_over)}, which is no straight-line code")
    seen = {(wait.where, wait.what) for wait in waits}
    for where, entries in known.items():
        for what, reason in entries.items():
            if (where, what) not in seen:
                findings.append(f"{where}: '{what}' of known_waits.py is not there any more; take it out")
            elif not reason.startswith(KINDS) or len(reason.split()) <= LEAST_WORDS:
                findings.append(f"{where}: '{what}': its reason must begin with one of {KINDS} and say why it ends")
    return findings


def waits_of(path: Path, root: Path) -> Iterator[Wait]:
    """Yields the places of one file that may block without a limit of their own."""
    where = path.relative_to(root)
    if where.parts[0] == "csrc":
        yield from _cpp_waits(path.read_text(encoding="utf-8"), str(where))
    elif path.suffix == ".py" and (where.parts[0] == "dflash_moe" or where.parts[:2] == ("bench", "lab")):
        yield from _python_waits(path.read_text(encoding="utf-8"), str(where))


def _cpp_waits(text: str, where: str) -> Iterator[Wait]:
    code = _CPP_NOISE.sub(lambda match: _NEWLINES.sub(" ", match[0]), text)
    sites = sorted(
        (match.start(), kind, match[1], match.end())
        for kind, pattern in _CPP_PATTERNS.items()
        for match in pattern.finditer(code)
    )
    sites = [site for site in sites if not _returns_at_once(code, *site[1:])]
    for start, kind, expression, end in sites:
        held_over: tuple[str, ...] = ()
        if kind == "lock":
            until = _end_of(code, end, "{}")
            inside = {_cpp_what(other, words) for at, other, words, _ in sites if end <= at < until}
            inside |= set(_CPP_CALLS_OUT.findall(code[end:until]))
            held_over = tuple(sorted(inside))
        yield Wait(where, code.count("\n", 0, start) + 1, _cpp_what(kind, expression), held_over)


def _returns_at_once(code: str, kind: str, expression: str, end: int) -> bool:
    """Says whether the arguments of a system call make it one that never waits."""
    arguments = code[end : _end_of(code, end, "()")] if kind == "call" else ""
    return "MSG_DONTWAIT" in arguments or (expression == "poll" and re.search(r",\s*0\s*$", arguments) is not None)


def _cpp_what(kind: str, expression: str) -> str:
    prefix = {"call": "::", "type": "std::"}.get(kind, kind.partition(" ")[0] + " ")
    return prefix + expression


def _end_of(code: str, at: int, brackets: str) -> int:
    """Returns where the bracket closes that was opened before `at`."""
    depth = 0
    for position in range(at, len(code)):
        depth += {brackets[0]: 1, brackets[1]: -1}.get(code[position], 0)
        if depth < 0:
            return position
    return len(code)


# -- Python ----------------------------------------------------------------------------------------

_LOCK_WORDS = re.compile(r"lock|mutex|gate|condition|semaphore", re.IGNORECASE)
# These methods wait unless they are given a limit, which is at this position among the arguments.
_LIMITED = {"wait": 0, "join": 0, "result": 0, "exception": 0, "get": 1, "acquire": 1, "communicate": 1, "poll": 0}
# These take other arguments where something else is meant: " ".join(words), a_map.get(key).
_NAMESAKES = {"get", "join", "poll"}
_SOCKET_CALLS = {"recv", "recvmsg", "recv_into", "recvfrom", "recv_fds", "accept", "connect", "sendall", "sendmsg", "send_fds"}
_FUNCTIONS_WITH_TIMEOUT = {"subprocess.run", "subprocess.check_call", "subprocess.check_output", "socket.create_connection"}
_FUNCTIONS_WITH_TIMEOUT |= {"as_completed", "concurrent.futures.as_completed", "futures.as_completed"}
_FUNCTIONS = {"os.read", "os.write", "os.waitpid", "os.wait", "input", "signal.pause", "signal.sigwait", "sys.stdin.read"}
# A lock may be held over these built-in functions and methods of containers.
_STRAIGHT = {
    "len", "min", "max", "sum", "any", "all", "int", "str", "float", "tuple", "list", "dict", "set", "sorted", "isinstance",
    "next", "append", "pop", "popleft", "items", "keys", "values", "get", "add", "remove", "discard", "clear", "update", "copy",
    "setdefault", "extend", "insert", "join", "monotonic", "enumerate", "range", "zip",
}  # fmt: skip
_POOLS = {"ThreadPoolExecutor", "ProcessPoolExecutor"}


def _python_waits(text: str, where: str) -> Iterator[Wait]:
    tree = ast.parse(text, filename=where)
    for node in ast.walk(tree):
        if isinstance(node, ast.With):
            for item in node.items:
                if (what := _lock_of(item.context_expr)) is not None:
                    inside = [found for inner in node.body for found in _calls_in(inner)]
                    yield Wait(where, node.lineno, what, tuple(sorted(set(inside))))
        elif isinstance(node, ast.Call) and (what := _waiting_call(node)) is not None:
            yield Wait(where, node.lineno, what)


def _lock_of(expression: ast.expr) -> str | None:
    name = ast.unparse(expression)
    last = name.partition("(")[0].rpartition(".")[2]
    if isinstance(expression, ast.Call) and _name_of(expression) in _POOLS:
        return f"leave {_name_of(expression)}"
    return f"lock {name}" if _LOCK_WORDS.search(last) else None


def _calls_in(node: ast.stmt) -> Iterator[str]:
    """Yields everything that a block calls and that is not known to be straight-line code."""
    for inner in ast.walk(node):
        if isinstance(inner, ast.Call) and ast.unparse(inner.func).rpartition(".")[2] not in _STRAIGHT:
            yield _waiting_call(inner) or f"call {ast.unparse(inner.func)}"
        elif isinstance(inner, ast.With):
            yield from (what for item in inner.items if (what := _lock_of(item.context_expr)) is not None)


def _name_of(call: ast.Call) -> str:
    name = ast.unparse(call.func)
    return name if name.count(".") <= 1 else name.rpartition(".")[2]


def _waiting_call(call: ast.Call) -> str | None:
    """Returns what the call waits on, None where it does not wait or has a limit."""
    keywords = {keyword.arg for keyword in call.keywords}
    name = ast.unparse(call.func)
    if name in _FUNCTIONS:
        return f"call {name}"
    if name in _FUNCTIONS_WITH_TIMEOUT:
        return None if "timeout" in keywords else f"call {name}"
    if name == "select.select":
        return None if len(call.args) > 3 else f"call {name}"
    if not isinstance(call.func, ast.Attribute):
        return None
    method = call.func.attr
    if method in _SOCKET_CALLS:
        return None if "MSG_DONTWAIT" in ast.unparse(call) else f"call {name}"
    if name == "select.poll":  # makes a poller
        return None
    place = _LIMITED.get(method)
    if place is None or keywords & {"timeout", "timeout_s", "blocking", "block"} or len(call.args) > place:
        return None
    if method in _NAMESAKES and (call.args or call.keywords):
        return None
    return f"call {name}"
