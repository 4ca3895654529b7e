"""The plug-in of SGLang as far as it needs no SGLang: what it refuses. No build of SGLang runs
without a card; tests/contracts/sglang.py has what is used of it.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from dflash_moe.errors import UnsupportedError
from dflash_moe.integrations.sglang.registration import check_version, refuse_layer, refuse_settings

LAYER = SimpleNamespace(num_experts=8, ffn=SimpleNamespace(in_size=96))
GIVEN = {
    "num_experts": 8, "hidden_size": 96, "num_fused_shared_experts": 0, "apply_router_weight_on_input": False,
    "routed_scaling_factor": None,
}  # fmt: skip


def server_args(folder, **changed):
    fields = {
        "model_path": str(folder), "pp_size": 1, "dp_size": 1, "moe_a2a_backend": "none", "enable_eplb": False,
        "enable_lora": None, "load_format": "auto", "device": "cuda", "disable_cuda_graph": False,
        "cuda_graph_backend_decode": "disabled", "cuda_graph_backend_prefill": "disabled",
    }  # fmt: skip
    return SimpleNamespace(**fields | changed)


@pytest.mark.parametrize("version", ["0.5.22", "0.5.24", "0.6.0", "dev"])
def test_a_version_outside_of_the_window_is_refused_with_both(version):
    with pytest.raises(UnsupportedError, match=rf"SGLang is {version}: .*>=0\.5\.23,<0\.5\.24"):
        check_version(version)
    check_version("0.5.23.post1")


def test_what_may_work_is_not_refused(tmp_path):
    refuse_settings(server_args(tmp_path), SimpleNamespace(moe_ep_size=1))
    refuse_settings(server_args(tmp_path, device="cpu", cuda_graph_backend_decode=None), SimpleNamespace(moe_ep_size=1))
    refuse_layer("layer.0", LAYER, GIVEN)


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"model_path": "somebody/model"}, "--model-path somebody/model"),
        ({"pp_size": 2}, "--pp-size 2"),
        ({"dp_size": 2}, "--dp-size 2"),
        ({"moe_a2a_backend": "deepep"}, "--moe-a2a-backend deepep"),
        ({"enable_eplb": True}, "--enable-eplb"),
        ({"enable_lora": True}, "--enable-lora"),
        ({"load_format": "dummy"}, "--load-format dummy"),
        ({"cuda_graph_backend_decode": None}, "--cuda-graph-backend"),
    ],
)
def test_a_setting_that_cannot_be_is_refused_by_its_flag(tmp_path, changed, named):
    with pytest.raises(UnsupportedError, match=named):
        refuse_settings(server_args(tmp_path, **changed), SimpleNamespace(moe_ep_size=1))
    with pytest.raises(UnsupportedError, match="--ep-size 2"):
        refuse_settings(server_args(tmp_path), SimpleNamespace(moe_ep_size=2))


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"num_experts": 9}, r"\(9, 96\), the checkpoint's \(8, 96\)"),
        ({"num_fused_shared_experts": 1}, "--disable-shared-experts-fusion"),
        ({"apply_router_weight_on_input": True}, "apply_router_weight_on_input"),
        ({"routed_scaling_factor": 2.5}, r"routed_scaling_factor 2\.5"),
    ],
)
def test_a_layer_that_workers_would_not_compute_the_same_is_refused(changed, named):
    with pytest.raises(UnsupportedError, match=named):
        refuse_layer("layer.0", LAYER, {**GIVEN, **changed})
