"""The checks of documents against code find a stale number, a missing row, a dangling link, an
uncited figure.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.checks import documents, error_catalogue, headers, links, message_tables, protocol_tables

ROOT = Path(__file__).resolve().parents[3]
COMPARED = (
    "docs/protocol.md", "docs/errors.md", "csrc/wire/frame_layout.h", "csrc/wire/limits.h", "csrc/transport/channel.h",
    "csrc/base/dtype.h", "csrc/base/error_code.h", "csrc/compute/experts/ffn_spec.h", "dflash_moe/errors.py",
)  # fmt: skip


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    """A root that holds only the compared files, free to be damaged."""
    for name in COMPARED:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    return tmp_path


def _replace(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


def test_documents_agree_with_the_code_today(copied: Path) -> None:
    assert protocol_tables.find(copied) == []
    assert error_catalogue.find(copied) == []


@pytest.mark.parametrize(
    ("header", "old", "new", "named"),
    [
        ("csrc/wire/limits.h", "kMaxRows = 4096", "kMaxRows = 2048", "kMaxRows"),
        ("csrc/wire/limits.h", "kMaxLayers", "kMaxLayersNow", "kMaxLayersNow"),
        ("csrc/transport/channel.h", "kMaxSlots = 256", "kMaxSlots = 64", "kMaxSlots"),
        ("csrc/wire/frame_layout.h", "kCallId = 16", "kCallId = 24", "call_id"),
        ("csrc/base/dtype.h", "kBF16 = 2", "kBF16 = 3", "kBF16"),
        ("csrc/compute/experts/ffn_spec.h", "kRelu = 3", "kRelu = 9", "kRelu"),
    ],
)
def test_changed_header_makes_the_protocol_document_stale(copied: Path, header: str, old: str, new: str, named: str) -> None:
    _replace(copied / header, old, new)
    assert any(named in finding for finding in protocol_tables.find(copied))


def test_changed_error_code_makes_the_catalogue_stale(copied: Path) -> None:
    _replace(copied / "csrc/base/error_code.h", "kTimeout = 6", "kTimeout = 66")
    assert any("kTimeout" in finding for finding in error_catalogue.find(copied))


def test_new_error_class_makes_the_catalogue_stale(copied: Path) -> None:
    path = copied / "dflash_moe/errors.py"
    path.write_text(path.read_text() + "\n\nclass NewError(DflashError):\n    exit_code = 1\n")
    assert any("NewError" in finding for finding in error_catalogue.find(copied))


def test_changed_message_field_makes_the_block_stale() -> None:

    text = (ROOT / "docs/protocol.md").read_text()
    rendered = message_tables.rendered("messages")
    assert message_tables.find_in_text(text, rendered) == []
    assert message_tables.find_in_text(text, rendered.replace("`protocol_min`", "`protocol_least`"))
    assert message_tables.find_in_text(text, rendered + "#### 99 New\n")


def test_constants_read_shifts_products_and_names(tmp_path: Path) -> None:
    header = tmp_path / "x.h"
    header.write_text("inline constexpr uint32_t kA = 256u << 20;\ninline constexpr uint64_t kB = kA * 2;  // twice\n")
    assert headers.constants(header) == {"kA": 256 << 20, "kB": 512 << 20}


def test_table_reader_returns_none_without_marker() -> None:
    assert documents.table("| a |\n|---|\n| 1 |\n", "x") is None
    assert documents.table("<!-- table: x -->\n\n| a |\n|---|\n| `1` |\n", "x") == [["1"]]


def test_dangling_link_and_anchor_are_found(tmp_path: Path) -> None:
    (tmp_path / "a.md").write_text("[b](b.md) [c](c.md#here) [d](c.md#gone) [web](https://example.org)\n")
    (tmp_path / "c.md").write_text("# Here\n")
    findings = links.find(tmp_path)
    assert len(findings) == 2
    assert "b.md" in findings[0]
    assert "c.md#gone" in findings[1]
