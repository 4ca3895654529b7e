"""The library of the C interface as a package has it: what it exports, and that a C compiler takes
its header and the documented example.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from dflash_moe import _core

ROOT = Path(__file__).resolve().parents[3]
PACKAGE = Path(_core.__file__).parent
LIBRARY = PACKAGE / "libdflash_moe.so"
HEADER = PACKAGE / "include" / "dflash_moe.h"
EXAMPLE = ROOT / "docs" / "examples" / "experts.c"
STRICT = ("-Wall", "-Wextra", "-Werror", f"-I{HEADER.parent}")


def compiled(*arguments: str) -> None:
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


def declared() -> set[str]:
    text = re.sub(r"/\*.*?\*/", "", HEADER.read_text(encoding="utf-8"), flags=re.DOTALL)
    return set(re.findall(r"DFLASH_MOE_API[^;]*?(dflash_moe_\w+)\(", text))


def symbols(option: str) -> list[str]:
    listed = subprocess.run(["nm", "-D", option, str(LIBRARY)], capture_output=True, text=True, timeout=60, check=True)
    return [line.split()[-1] for line in listed.stdout.splitlines()]


def test_library_exports_what_its_header_declares_and_nothing_else() -> None:
    assert len(declared()) == 15
    assert set(symbols("--defined-only")) == declared()


def test_library_needs_no_python() -> None:
    assert [name for name in symbols("--undefined-only") if name.startswith(("Py", "_Py"))] == []


def test_header_is_the_sources() -> None:
    assert HEADER.read_bytes() == (ROOT / "csrc" / "c_interface" / "dflash_moe.h").read_bytes()


@pytest.mark.parametrize(("compiler", "standard"), [("cc", "c99"), ("cc", "c11"), ("c++", "c++11")])
def test_header_stands_alone(tmp_path: Path, compiler: str, standard: str) -> None:
    source = tmp_path / ("alone.cc" if compiler == "c++" else "alone.c")
    source.write_text("#include <dflash_moe.h>\nint main(void) { return dflash_moe_interface_version() != 1; }\n")
    program = tmp_path / "alone"
    compiled(compiler, f"-std={standard}", "-pedantic", *STRICT, str(source), str(LIBRARY), "-o", str(program))
    assert subprocess.run([program], timeout=60, check=False, env={"LD_LIBRARY_PATH": str(PACKAGE)}).returncode == 0


def test_example_is_short_and_compiles_as_it_says(tmp_path: Path) -> None:
    text = EXAMPLE.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 60
    documented = re.search(r"^ \*   (cc -std=c11 .*)$", text, re.MULTILINE)
    assert documented is not None
    command = documented[1].replace("$package", str(PACKAGE)).replace('"', "").split()
    shutil.copy(EXAMPLE, tmp_path)
    done = subprocess.run(
        [*command, "-Wall", "-Wextra", "-Werror", "-o", "experts"], cwd=tmp_path, capture_output=True, text=True, timeout=120,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    environment = {key: value for key, value in os.environ.items() if not key.startswith("DFLASH_MOE_")}
    refused = subprocess.run([tmp_path / "experts"], capture_output=True, text=True, timeout=60, check=False, env=environment)
    assert refused.returncode == 1
    assert refused.stdout == ""
    assert refused.stderr == (
        "experts: DFLASH_MOE_HANDOVER names no supervisor's socket; start this program with `dflash-moe llama -- PROGRAM`\n"
    )
