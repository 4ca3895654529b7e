"""Huge pages, as `doctor` shows them.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from pathlib import Path

import pytest

from dflash_moe.cli.doctor import probe_pages
from dflash_moe.cli.doctor.probe_pages import pages_line


@pytest.mark.parametrize(
    ("text", "word"), [("always [madvise] never\n", "madvise"), ("[always] madvise never\n", "always"),
                       ("always madvise [never]\n", "never"), ("", None), ("madvise", None)],
)  # fmt: skip
def test_the_word_in_brackets_is_the_one_that_holds(
    tmp_path: Path,
    text: str,
    word: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(probe_pages, "READ_BYTES", 4 << 20)
    switch = tmp_path / "enabled"
    switch.write_text(text)
    found = probe_pages.probe_pages(switch)
    assert found["huge_pages"] == word
    assert (found["small_over_huge"] is None) == (word in (None, "never"))


def test_nothing_is_read_where_memory_is_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe_pages, "memory_available", lambda: 100 << 20)
    switch = tmp_path / "enabled"
    switch.write_text("[always] madvise never\n")
    found = probe_pages.probe_pages(switch)
    assert found == {"huge_pages": "always", "small_over_huge": None}
    assert pages_line(found) == "pages      weights lie on huge pages (always)"


def test_a_system_without_the_switch_is_no_error(tmp_path: Path) -> None:
    found = probe_pages.probe_pages(tmp_path / "missing")
    assert found == {"huge_pages": None, "small_over_huge": None}
    assert "no switch" in pages_line(found)


def test_what_is_read_is_measured_and_said() -> None:
    line = pages_line({"huge_pages": "madvise", "small_over_huge": 1.184})
    assert line == (
        "pages      weights lie on huge pages (madvise); on small ones the same bytes take 1.18 times as "
        "long to read (one thread, now)"
    )
    assert "echo madvise" in pages_line({"huge_pages": "never", "small_over_huge": None})
