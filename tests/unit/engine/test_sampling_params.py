"""SamplingParams: what is allowed, what is normalised, and that every absurd value is refused with
the field's name, the value and the allowed ones.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import dataclasses
import subprocess
import sys

import numpy as np
import pytest

from dflash_moe.engine.sampling.sampling_params import MAX_SEED, SamplingParams
from dflash_moe.errors import ConfigError

NAN, INF = float("nan"), float("inf")
REFUSED = [
    *(("temperature", value) for value in (-0.1, NAN, INF, -INF, 1e4 + 1, True, "1", None, 1 + 0j, 10**400)),
    *(("top_p", value) for value in (0, -1, 1.0001, NAN, False, "0.9", None)),
    *(("min_p", value) for value in (-1e-9, 1, NAN, True, [0.1])),
    *((f"{name}_penalty", value) for name in ("presence", "frequency") for value in (-2.001, 2.001, NAN, INF, True, "0")),
    *(("repetition_penalty", value) for value in (0, -1, 10.001, NAN, True, None)),
    *(("max_tokens", value) for value in (0, -1, 1.0, True, "64", None, 1 << 31)),
    *(("top_k", value) for value in (-1, 0.0, True, "5", None, 1 << 31)),
    *(("n", value) for value in (0, 65, 1.0, True, None)),
    *(("seed", value) for value in (-1, MAX_SEED + 1, 1.0, True, "1")),
    *(("logprobs", value) for value in (-1, 21, True, 1.0, "1")),
    *(("stop", value) for value in ("", [""], ["a"] * 17, ["a" * 1025], [b"a"], b"a", 5, None, {"a": 1})),
    *(("stop_token_ids", value) for value in ([-1], [1.0], [True], ["1"], 5, "12", None, {1: 2}, list(range(1025)))),
    *(("logit_bias", value) for value in ({1: 100.1}, {1: NAN}, {1: True}, {1: "1"}, {1: None}, {-1: 0}, {True: 0}, {"1": 0})),
    *(("logit_bias", value) for value in ({1.0: 0}, {1 << 31: 0}, dict.fromkeys(range(1025), 0), [(1, 2)], None)),
    *(("ignore_eos", value) for value in (0, 1, None, "yes")),
    *(("token_mask", value) for value in (5, "grammar", [True])),
]


@pytest.mark.parametrize(("name", "value"), REFUSED, ids=lambda value: repr(value)[:24])
def test_an_absurd_value_is_refused_by_name_with_what_is_allowed(name, value):
    with pytest.raises(ConfigError, match=rf"^{name}.*; allowed: ") as caught:
        SamplingParams(**{name: value})
    assert len(str(caught.value)) < 300


def test_every_field_has_a_value_that_is_refused():
    assert {field.name for field in dataclasses.fields(SamplingParams)} == {name for name, _ in REFUSED}


def test_the_bounds_themselves_are_allowed():
    lowest = SamplingParams(
        max_tokens=1, temperature=0, top_p=1e-9, top_k=0, min_p=0, presence_penalty=-2, frequency_penalty=-2,
        repetition_penalty=1e-9, logit_bias={0: -100}, seed=0, n=1, stop="a", stop_token_ids=[0], logprobs=0,
    )  # fmt: skip
    highest = SamplingParams(
        max_tokens=(1 << 31) - 1, temperature=1e4, top_p=1, top_k=(1 << 31) - 1, min_p=0.999, presence_penalty=2,
        frequency_penalty=2, repetition_penalty=10, logit_bias=dict.fromkeys(range(1024), 100), seed=MAX_SEED, n=64,
        stop=["a" * 1024] * 16, stop_token_ids=range(1024), logprobs=20,
    )  # fmt: skip
    assert (lowest.temperature, highest.seed, len(highest.stop), len(highest.logit_bias)) == (0.0, MAX_SEED, 16, 1024)


def test_values_become_plain_ones_and_the_callers_containers_are_copied():
    bias, stops = {np.int64(3): np.float32(0.5)}, ["end"]
    params = SamplingParams(temperature=np.float64(1), top_k=np.int32(5), logit_bias=bias, stop=stops, stop_token_ids={7})
    bias[4], stops[0] = 1.0, "other"
    assert (params.logit_bias, params.stop, params.stop_token_ids) == ({3: 0.5}, ("end",), (7,))
    assert [type(value) for value in (params.temperature, params.top_k, *params.logit_bias)] == [float, int, int]
    assert SamplingParams(stop="end").stop == ("end",)
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.top_k = 6
    assert hash(params) == hash(dataclasses.replace(params))


def test_ids_outside_the_vocabulary_are_refused():
    params = SamplingParams(logit_bias={9: 1.0}, stop_token_ids=[11])
    params.check_ids(12)
    with pytest.raises(ConfigError, match=r"^stop_token_ids: token id 11 is not allowed; allowed: 0\.\.10$"):
        params.check_ids(11)
    with pytest.raises(ConfigError, match=r"^logit_bias: token id 9 is not allowed; allowed: 0\.\.8$"):
        params.check_ids(9)


def test_a_mask_is_a_function_or_an_object_with_a_method():
    class Grammar:
        def allowed(self, token_ids):
            return None

    for mask in (None, lambda token_ids: None, Grammar()):
        assert SamplingParams(token_mask=mask).token_mask is mask


def test_the_parameters_need_no_torch():
    module = "dflash_moe.engine.sampling.sampling_params"
    program = f"import sys, {module} as module; module.SamplingParams(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False, timeout=60).returncode == 0
