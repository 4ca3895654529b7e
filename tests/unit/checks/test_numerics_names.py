"""The check of class names finds what it is for, and lets pass what may say a name.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.checks import numerics_names

TABLE = """constexpr NumericsFacts kTable[] = {
    {NumericsClass::kF32Canonical, "f32-canonical", "f32"},
    {NumericsClass::kBf16Dot, "bf16-dot", "bf16"},
};
"""


def findings(root: Path, name: str, text: str) -> list[str]:
    for path, content in ((numerics_names.TABLE, TABLE), (Path(name), text)):
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(content)
    return numerics_names.find(root)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("dflash_moe/placement/plan.py", 'PER_ARCHITECTURE = ("bf16-dot",)\n'),
        ("dflash_moe/protocol/identity.py", 'def is_bf16(name: str) -> bool:\n    return name.startswith("bf16-")\n'),
        ("dflash_moe/cli/doctor/doctor.py", 'print(f"numerics f32-canonical of {isa}")\n'),
        ("csrc/cards/gpu_layer.cc", "if (numerics == NumericsClass::kBf16Dot) return true;\n"),
        ("csrc/bindings/bind_plugin.cc", 'py::arg("numerics") = "f32-canonical"\n'),
    ],
)
def test_a_class_named_outside_of_the_table_is_found(tmp_path: Path, name: str, text: str) -> None:
    assert [finding.split(":")[0] for finding in findings(tmp_path, name, text)] == [name]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("csrc/compute/cpu/kernels_avx512bf16.cc", "kNumerics = NumericsClass::kBf16Dot;  // bf16-dot\n"),
        ("csrc/cards/gpu_layer.h", "// The bits of f32-canonical.\n"),
        ("dflash_moe/placement/plan.py", '"""Classes such as bf16-dot."""\nNAME = "bf16"\n'),
        ("tests/unit/test_classes.py", 'CLASS = "bf16-dot"\n'),
    ],
)
def test_kernels_comments_and_tests_may_say_which_class_they_mean(tmp_path: Path, name: str, text: str) -> None:
    assert findings(tmp_path, name, text) == []


def test_a_table_in_which_no_class_can_be_read_is_found(tmp_path: Path) -> None:
    (tmp_path / numerics_names.TABLE).parent.mkdir(parents=True)
    (tmp_path / numerics_names.TABLE).write_text("// rows in another form\n")
    assert len(numerics_names.find(tmp_path)) == 1
