"""The stub check sees a name on one side only and a parameter with another name.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from types import ModuleType, SimpleNamespace
from typing import Any

from tests.checks import stub_parity

STUB = """
def new_eventfd() -> int: ...
class Worker:
    kind: str
    def stop(self) -> None: ...
"""


def _documented(doc: str) -> SimpleNamespace:
    return SimpleNamespace(__doc__=doc)


def _module(**members: Any) -> ModuleType:
    module = ModuleType("core", doc=None)
    vars(module).update(members)
    return module


class _Worker:
    kind = "x"

    def stop(self) -> None:
        """stop(self: Worker) -> None"""


def test_equal_sides_pass() -> None:
    assert stub_parity.compare(STUB, _module(new_eventfd=_documented("new_eventfd() -> int\n"), Worker=_Worker)) == []


def test_name_on_one_side_only_is_found() -> None:
    missing = stub_parity.compare(STUB, _module(Worker=_Worker))
    extra = stub_parity.compare(STUB, _module(new_eventfd=None, Worker=_Worker, hidden=1))
    assert "new_eventfd is declared but not in the module" in missing[0]
    assert "hidden is in the module but not declared" in extra[0]


def test_other_parameter_name_is_found() -> None:
    module = _module(new_eventfd=_documented("new_eventfd(flags: int = 0) -> int"), Worker=_Worker)
    assert "new_eventfd declares (), the module takes (flags)" in stub_parity.compare(STUB, module)[0]


def test_positional_fast_path_may_be_declared_as_args() -> None:
    stub = "def run(*args: int) -> None: ...\n"
    assert stub_parity.compare(stub, _module(run=_documented("run(arg0: int, arg1: int) -> None"))) == []
    assert stub_parity.compare(stub, _module(run=_documented("run(layer: int, arg1: int) -> None")))


def test_signature_line_with_nested_brackets_is_read() -> None:
    doc = "f(self: _core.C, shards: Sequence[tuple[int, int]], *, spin: float = 0.5, cpus: list = [1, 2]) -> None\n\nText."
    assert stub_parity.parameters_of_docstring("f", doc) == ["self", "shards", "spin", "cpus"]
