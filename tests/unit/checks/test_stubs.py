"""A stub has the types that callers know, and its docstrings keep to the width.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from tests.checks import stubs

WRITTEN = '''"""The module."""
from __future__ import annotations
import typing
__all__: list[str] = ["Client", "LIMIT"]
class Client:
    def run(self, layer: typing.SupportsInt | typing.SupportsIndex, box: dflash_moe._core.Box = None, *, w: bool) -> int:
        """
        Runs one call and waits for it. This sentence is here to be longer than the widest line is.
        """
    def close(self) -> None:
        ...
LIMIT: int = 3
'''


def test_types_are_those_of_callers() -> None:
    text = stubs.rewrite(WRITTEN)
    assert "def run(self, layer: int, box: Box | None=None, *, w: bool) -> int:" in text
    assert "from dflash_moe._core import Box" in text
    assert "typing" not in text


def test_values_and_the_list_of_names_are_left_out() -> None:
    text = stubs.rewrite(WRITTEN)
    assert "LIMIT: int\n" in text
    assert "__all__" not in text


def test_docstrings_keep_to_the_width() -> None:
    lines = stubs.rewrite(WRITTEN).splitlines()
    assert max(map(len, lines)) <= stubs.WIDTH
    assert '        """Runs one call and waits for it. This sentence is here to be longer than the widest line' in lines
    assert lines[lines.index("        is.") + 1].strip() == '"""'


def test_a_stub_that_cannot_be_made_here_is_said_and_is_no_finding(tmp_path, capsys) -> None:
    assert stubs.find(tmp_path) == []
    assert "not compared: dflash_moe._core is not built; run make" in capsys.readouterr().out
