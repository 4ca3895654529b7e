"""`verify` compares rows at positions far behind its prompt, at and around every integer of the
configuration, so that a layer that is wrong from one position on cannot pass.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import json
import shutil

import pytest

from dflash_moe import Topology
from dflash_moe.operators.layers import block_forms, layer_proof
from dflash_moe.proofs.verify import verify
from tests.host_models import checkpoint

pytestmark = pytest.mark.transformers

# Their queries are scaled by position; cosines depend on the last position; neither.
FAMILIES = ("mistral4", "phimoe", "gpt_oss")


@pytest.mark.parametrize("arch", FAMILIES)
def test_rows_at_far_positions_are_those_of_eager(arch):
    report = verify(checkpoint(arch, "f32"), Topology.local(1, threads=1), overrides={"kv_memory": "16MiB"})
    assert report.excesses == []
    assert report.positions is not None
    assert report.positions.count > 20
    assert report.to_json()["positions_last"] == report.positions.last >= 4095


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_a_layer_that_is_wrong_from_a_position_on_is_beyond_bounds(dtype, monkeypatch, tmp_path):
    # Queries are scaled behind all tokens of the prompt.
    folder = shutil.copytree(checkpoint("mistral4", dtype), tmp_path / "mistral4")
    config = json.loads((folder / "config.json").read_text())
    config["rope_parameters"]["original_max_position_embeddings"] = 128
    (folder / "config.json").write_text(json.dumps(config))
    # As if the proof had not looked.
    monkeypatch.setattr(layer_proof, "watched", lambda positions, _on_look: positions)
    monkeypatch.setattr(block_forms.LayerForms, "_why_not", lambda *_arguments: "")
    report = verify(folder, Topology.local(1, threads=1), overrides={"kv_memory": "16MiB"})
    assert report.host is not None
    assert any(finding.operator == "layer" for finding in report.host.findings)
    assert any("at positions up to" in excess for excess in report.excesses), report
