"""The C table as C, and the plug-ins as Python sees them.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from dflash_moe import ConfigError, _core

CSRC = Path(__file__).resolve().parents[3] / "csrc"
PROGRAM = """
#include "plugin/backend_abi.h"
#include <stddef.h>
_Static_assert(offsetof(dflash_backend_table, struct_size) == 0, "struct_size comes first");
_Static_assert(offsetof(dflash_caps, struct_size) == 0, "struct_size comes first");
_Static_assert(offsetof(dflash_batch, struct_size) == 0, "struct_size comes first");
_Static_assert(sizeof(dflash_matrix) == 56, "a record inside others never changes");
_Static_assert(sizeof(dflash_vector) == 24, "a record inside others never changes");
int main(void) { dflash_backend_entry entry = NULL; return entry != NULL; }
"""
# Formats with grids have no records on cards, those after them no panels anywhere.
NOT_ON_CARDS = ("iq1", "iq2", "iq3", "tq", "nvfp4")
SPEC = {"in_size": 64, "intermediate_size": 32, "out_size": 64}


@pytest.mark.skipif(shutil.which("g++") is None, reason="the core's compiler is not on PATH")
@pytest.mark.parametrize("standard", ["c11", "c17"])
def test_the_table_is_plain_c(standard, tmp_path):
    source = tmp_path / "uses_table.c"
    source.write_text(PROGRAM)
    command = ["g++", "-x", "c", f"-std={standard}", "-pedantic", "-Wall", "-Wextra", "-Werror", f"-I{CSRC}", "-fsyntax-only"]
    compiled = subprocess.run([*command, str(source)], capture_output=True, text=True, check=False, timeout=200)
    assert compiled.returncode == 0, compiled.stderr


def test_every_backend_can_be_probed_and_says_why_it_has_no_device():
    for name in ("cpu", "cuda", "hip", "sim"):
        found = _core.probe_backend(name)
        assert bool(found["devices"]) != bool(found["reason"])
    with pytest.raises(ConfigError, match="backend 'metal' is not known; known are cpu, cuda, hip, sim"):
        _core.probe_backend("metal")


def test_simulated_cards_of_both_vendors_can_be_opened():
    own = {"cuda": ["bf16-mma"], "hip": ["bf16-mfma", "f16-dot2"]}  # in bits of the card's
    for vendor, arch in (("cuda", "sim-cuda"), ("hip", "sim-hip")):
        device = _core.BackendDevice(backend="sim", simulate=vendor)
        assert device.arch == arch
        assert device.numerics_classes() == ["f32-canonical", "int8-groups", *own[vendor]]
        bytes_of_one, bytes_of_two = (device.layer_bytes(spec=SPEC, num_experts=count, weight_dtype="bf16") for count in (1, 2))
        assert 3 * 64 * 32 * 2 <= bytes_of_one < bytes_of_two <= device.free_bytes()
    with pytest.raises(ConfigError, match="device sim:2 does not exist; this machine has 2 such devices"):
        _core.BackendDevice(backend="sim", device=2)


# A case has many blocks, and the seed shuffles the threads of half of them at every turn. So one
# seed is many orders of every kernel, and the vendors have two.
@pytest.mark.parametrize(("vendor", "seed"), [("cuda", 1), pytest.param("hip", 2, marks=pytest.mark.long)])
def test_every_kernel_of_a_simulated_card_gives_the_reference_bits_whatever_the_order_of_its_threads(vendor, seed):
    device = _core.BackendDevice(backend="sim", simulate=vendor, seed=seed)
    cases = [device.self_test(number) for number in range(device.self_test(0)["num_cases"])]
    assert [case for case in cases if case["differing"]] == []
    assert all(case["elements"] > 1000 for case in cases)
    assert {case["formats"] for case in cases} == {name for name in _core.weight_formats() if not name.startswith(NOT_ON_CARDS)}
    assert {case["kernel"].split()[0] for case in cases} == set(device.numerics_classes())
