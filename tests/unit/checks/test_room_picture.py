"""The picture of the rooms is drawn from what is imported, without arrows that others imply.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from pathlib import Path

from tests.checks import room_picture


def _file(root: Path, name: str, text: str) -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_a_room_stands_above_what_it_imports_and_shows_no_detours(tmp_path: Path) -> None:
    _file(tmp_path, "dflash_moe/topology/spec.py", "from dflash_moe.errors import ConfigError\n")
    _file(tmp_path, "dflash_moe/errors.py", "")
    _file(tmp_path, "dflash_moe/model/spec.py", "from dflash_moe.topology import spec\n")
    _file(tmp_path, "dflash_moe/holders/fleet.py", "from dflash_moe.topology import spec\nfrom dflash_moe.model import spec\n")
    _file(tmp_path, "csrc/client/engine.cc", '#include "wire/frame.h"\n#include "base/result.h"\n')
    _file(tmp_path, "csrc/wire/frame.h", "")
    _file(tmp_path, "csrc/base/result.h", "")
    lines = [line.split() for line in room_picture.render(tmp_path).splitlines() if line.strip()]
    assert lines == [
        ["dflash_moe/"],
        ["holders", "->", "model"],
        ["model", "->", "topology"],
        ["topology"],
        ["csrc/"],
        ["client", "->", "wire"],
        ["wire"],
    ]


def test_a_stale_picture_is_found(tmp_path: Path) -> None:
    _file(tmp_path, "dflash_moe/model/spec.py", "")
    _file(tmp_path, "csrc/wire/frame.h", "")
    document = "# Architecture\n<!-- begin rooms -->\n<!-- end rooms -->\n"
    _file(tmp_path, room_picture.DOCUMENT, document)
    assert "stale" in room_picture.find(tmp_path)[0]
    room_picture.rewrite(tmp_path)
    assert room_picture.find(tmp_path) == []
    _file(tmp_path, "dflash_moe/model/spec.py", "from dflash_moe.topology import topology\n")
    _file(tmp_path, "dflash_moe/topology/topology.py", "")
    assert len(room_picture.find(tmp_path)) == 1
