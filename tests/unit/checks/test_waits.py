"""The check for waits, on files of its own: what it finds, what it lets pass, and that table and
code must agree both ways.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.checks import waits

BOUNDED = "bounded: it ends because this test says so"
STRAIGHT = "straight: nothing is called while it is held"


def waits_in(root: Path, name: str, text: str) -> list[waits.Wait]:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return list(waits.waits_of(path, root))


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("const std::lock_guard lock(mutex_);", "lock mutex_"),
        ("std::unique_lock<std::mutex> lock{device.mutex_};", "lock device.mutex_"),
        ("std::unique_lock<std::mutex> lock_;", "lock lock_"),
        ("mutex_.lock();", "lock mutex_"),
        ("while (is_taken) released_.wait(lock);", "wait released_"),
        ("thread_.join();", "join thread_"),
        ("std::future<int> later;", "std::future"),
        ("std::jthread thread;", "std::jthread"),
        ("::poll(&fd, 1, -1);", "::poll"),
        ("::recv(socket, bytes, 4, 0);", "::recv"),
        ("::syscall(SYS_futex, word, FUTEX_WAIT, 0, nullptr, nullptr, 0);", "futex SYS_futex"),
        ("while (!done) std::this_thread::yield();", "spin this_thread::yield"),
        ("py::gil_scoped_acquire locked;", "gil gil_scoped_acquire"),
        ("cuStreamSynchronize(stream);", "device cuStreamSynchronize"),
    ],
)
def test_what_blocks_in_cpp_is_found(tmp_path: Path, text: str, what: str) -> None:
    assert [wait.what for wait in waits_in(tmp_path, "csrc/a.cc", f"void f() {{\n  {text}\n}}\n")] == [what]


@pytest.mark.parametrize(
    "text",
    [
        "woken.wait_for(lock, limit);", "woken.wait_until(lock, when);", "::recv(s, b, 4, MSG_DONTWAIT);", "::poll(&fd, 1, 0);",
        "// thread_.join();", 'log("::poll(");', "/* mutex_.lock() */", "auto owner = weak_.lock();", "mutex_.try_lock();",
    ],
)  # fmt: skip
def test_what_has_its_own_limit_in_cpp_passes(tmp_path: Path, text: str) -> None:
    assert waits_in(tmp_path, "csrc/a.cc", f"void f() {{\n  {text}\n}}\n") == []


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("with self._lock:\n    pass", "lock self._lock"),
        ("self._lock.acquire()", "call self._lock.acquire"),
        ("event.wait()", "call event.wait"),
        ("thread.join()", "call thread.join"),
        ("orders.get()", "call orders.get"),
        ("future.result()", "call future.result"),
        ("process.communicate()", "call process.communicate"),
        ("subprocess.run(['x'])", "call subprocess.run"),
        ("select.select([a], [], [])", "call select.select"),
        ("poller.poll()", "call poller.poll"),
        ("sock.recv(4)", "call sock.recv"),
        ("sock.accept()", "call sock.accept"),
        ("os.waitpid(pid, 0)", "call os.waitpid"),
        ("with ThreadPoolExecutor() as pool:\n    pass", "leave ThreadPoolExecutor"),
        ("as_completed(futures)", "call as_completed"),
        ("input()", "call input"),
    ],
)
def test_what_blocks_in_python_is_found(tmp_path: Path, text: str, what: str) -> None:
    assert [wait.what for wait in waits_in(tmp_path, "dflash_moe/a.py", text)] == [what]


@pytest.mark.parametrize(
    "text",
    [
        "event.wait(3)", "event.wait(timeout=t)", "thread.join(5.0)", "', '.join(words)", "table.get(key)",
        "orders.get(timeout=1)", "future.result(timeout=0)", "subprocess.run(['x'], timeout=9)", "select.poll()",
        "select.select([a], [], [], 1.0)", "poller.poll(100)", "sock.recv(4, socket.MSG_DONTWAIT)",
        "lock.acquire(blocking=False)", "lock.acquire(True, 1.0)",
    ],
)  # fmt: skip
def test_what_has_its_own_limit_in_python_passes(tmp_path: Path, text: str) -> None:
    assert waits_in(tmp_path, "dflash_moe/a.py", text) == []


def test_the_table_and_the_code_must_agree_both_ways(tmp_path: Path) -> None:
    found = waits_in(tmp_path, "csrc/a.cc", "void f() {\n  thread_.join();\n}\n")
    assert waits.findings_of(found, {"csrc/a.cc": {"join thread_": BOUNDED}}) == []
    assert "csrc/a.cc:2: 'join thread_' may wait without a bound" in waits.findings_of(found, {})[0]
    stale = {"csrc/a.cc": {"join thread_": BOUNDED, "join other_": BOUNDED}}
    assert "'join other_' of known_waits.py is not there any more" in waits.findings_of(found, stale)[0]
    assert len(waits.findings_of(found, {"csrc/a.cc": {"join thread_": "bounded: yes"}})) == 1
    assert len(waits.findings_of(found, {"csrc/a.cc": {"join thread_": "it ends because this test says so"}})) == 1


@pytest.mark.parametrize(
    ("name", "text", "over"),
    [
        ("csrc/a.cc", "{ std::lock_guard lock(mutex_); ++count_; ::send(s, b, n, 0); }", ("::send",)),
        ("csrc/a.cc", "{ std::lock_guard lock(mutex_); table_.copy_in(host_); }", ("table_.copy_in",)),
        ("csrc/a.cc", "{ { std::lock_guard lock(mutex_); ++count_; } ::send(s, b, n, 0); }", ()),
        ("dflash_moe/a.py", "with self._lock:\n    self._report(len(x))", ("call self._report",)),
        ("dflash_moe/a.py", "with self._lock:\n    with self._other_lock:\n        pass", ("lock self._other_lock",)),
        ("dflash_moe/a.py", "with self._lock:\n    self._counts[name] = max(1, len(x))\nreport()", ()),
    ],
)
def test_straight_line_code_is_looked_at(tmp_path: Path, name: str, text: str, over: tuple[str, ...]) -> None:
    lock = next(wait for wait in waits_in(tmp_path, name, text) if "mutex_" in wait.what or "self._lock" in wait.what)
    assert lock.held_over == over
    findings = waits.findings_of([lock], {lock.where: {lock.what: STRAIGHT}})
    assert len(findings) == (1 if over else 0)
