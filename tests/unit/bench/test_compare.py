"""Verdicts from samples with a known truth; refusals of what cannot be compared.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import json
import random

import pytest

from dflash_moe.bench.compare import compare_files, compare_rows
from dflash_moe.bench.results import timing_fields
from dflash_moe.cli import main
from dflash_moe.errors import ConfigError

NAMES = ("a.json", "b.json")


def samples(seed, *, factor=1.0, rounds=9, noise=0.03, drift=0.0):
    """Seconds around `factor`; the drift of the machine (by round) is the same for every seed."""
    generator = random.Random(seed)
    return [factor * (1 + drift * at) * generator.gauss(1, noise) for at in range(rounds)]


def result(*rows, case="prefill", interleaved=True, **changed):
    params = {"model": "m", "workers": [{"name": "w0"}], "repeat": 9}
    return {
        "schema": 1, "case": case, "commit": "c" * 40, "dirty": False, "complete": True, "interleaved": interleaved,
        "machine": {"cpu": "x", "cores_usable": 2, "isa": "avx2"}, "params": params, "rows": list(rows), **changed,
    }  # fmt: skip


def row(name, seconds, **fields):
    return {
        "name": name,
        "dtype": "bf16",
        "prompt_tokens": 64,
        **timing_fields(seconds, per_round=fields.pop("per_round", 1)),
        **fields,
    }


def verdict(a, b, **fields):
    comparison = compare_files(result(row("x", a, **fields)), result(row("x", b, **fields)), names=NAMES, min_effect=0.02)
    (found,) = comparison.verdicts
    return found


def test_twenty_percent_more_is_slower_and_less_is_faster():
    assert verdict(samples(1), samples(2, factor=1.2)).verdict == "slower"
    found = verdict(samples(1), samples(2, factor=0.8))
    assert found.verdict == "faster"
    assert found.low < 0.8 < found.high < 1


def test_equal_speeds_cannot_be_told_apart():
    assert [verdict(samples(seed), samples(seed + 100)).verdict for seed in range(20)].count("cannot tell") >= 18


def test_a_sure_but_tiny_difference_does_not_count():
    found = verdict(samples(1, noise=1e-5), samples(2, factor=1.005, noise=1e-5))
    assert (found.verdict, found.why) == ("cannot tell", "less than 2.0% apart")
    assert found.low > 1


def test_too_few_rounds_cannot_tell_and_say_so():
    found = verdict(samples(1, rounds=4), samples(2, factor=3, rounds=4))
    assert (found.verdict, found.ratio) == ("cannot tell", None)
    assert "only 4 rounds; 5 are needed" in found.why


def test_many_samples_of_few_rounds_are_few():
    assert "only 2 rounds" in verdict(samples(1, rounds=40), samples(2, factor=3, rounds=40), per_round=20).why


def test_a_bad_round_widens_the_interval_of_its_samples():
    calm, disturbed = [1.0] * 100, [1.0] * 60 + [1.5] * 40  # two of five rounds were disturbed
    assert verdict(calm, disturbed, per_round=20).verdict == "cannot tell"


def test_the_same_files_give_the_same_interval():
    first, second = (verdict(samples(1), samples(2, factor=1.05)) for _ in range(2))
    assert first == second


@pytest.mark.parametrize("rounds", [999, 1001])  # drawn one by one, and by ranks
def test_the_interval_of_many_samples_has_the_width_theory_says(rounds):
    found = verdict(samples(1, rounds=rounds, noise=0.1), samples(2, rounds=rounds, noise=0.1))
    # A median's standard error is 1.2533 sigma / sqrt(n); the ratio of two has sqrt(2) of it, and
    # 95 % are 1.96 each way.
    expected = 2 * 1.96 * 2**0.5 * 1.2533 * 0.1 / rounds**0.5
    assert found.high - found.low == pytest.approx(expected, rel=0.25)


def test_rows_of_one_file_are_compared_round_by_round():
    drift = 0.2  # the machine gets slower all the time: only ratios within a round show the 10 %
    rows = (row("batched", samples(1, drift=drift, noise=0.005)), row("auto", samples(2, factor=0.9, drift=drift, noise=0.005)))
    paired = compare_rows(result(*rows), "a.json", "batched", "auto", min_effect=0.02)
    unpaired = compare_rows(result(*rows, interleaved=False), "a.json", "batched", "auto", min_effect=0.02)
    assert paired.verdicts[0].verdict == "faster"
    assert paired.warnings == ()
    assert unpaired.verdicts[0].verdict == "cannot tell"
    assert "not interleaved" in unpaired.warnings[0]


def test_rows_are_paired_by_dtype_and_sizes():
    rows = [row(name, samples(1), prompt_tokens=length) for name in ("batched", "auto") for length in (64, 512)]
    found = compare_rows(result(*rows), "a.json", "batched", "auto", min_effect=0.02)
    assert [(one.name, one.against) for one in found.verdicts] == [
        ("batched bf16 64 tokens", "auto bf16 64 tokens"),
        ("batched bf16 512 tokens", "auto bf16 512 tokens"),
    ]


def test_torch_is_compared_with_the_same_format_and_formats_with_each_other():
    def expert(name, weights, backend):
        return row(name, samples(1), format=weights, backend=backend, kernel=backend)

    rows = [expert("bf16", "bf16", "cpu"), expert("f32", "f32", "cpu")]
    rows += [expert("torch_loop", weights, "torch") for weights in ("bf16", "f32")]
    for first, second, against in (("bf16", "torch_loop", "torch_loop bf16 bf16"), ("bf16", "f32", "f32 f32 bf16")):
        (found,) = compare_rows(result(*rows), "a.json", first, second, min_effect=0.02).verdicts
        assert found.against.startswith(against)


def test_an_ignored_field_does_not_keep_rows_apart():
    a, b = (result(row("x", samples(1), isa=isa), params={"isa": isa}) for isa in ("avx2", "avx512"))
    with pytest.raises(ConfigError, match="--ignore isa"):
        compare_files(a, b, names=NAMES, min_effect=0.02)
    assert len(compare_files(a, b, names=NAMES, min_effect=0.02, ignored=["isa"]).verdicts) == 1


def test_other_machine_commit_and_missing_rows_are_warned_of():
    a = result(row("x", samples(1)), row("only-a", samples(1)))
    b = result(row("x", samples(1)), commit="d" * 40, complete=False, ended_by="Ctrl-C")
    b["machine"] = {"cpu": "y", "cores_usable": 2, "isa": "avx2"}
    text = "\n".join(compare_files(a, b, names=NAMES, min_effect=0.02).warnings)
    for said in (
        "different machines: cpu",
        "different commits",
        "b.json is incomplete (ended by Ctrl-C)",
        "not in b.json: only-a",
    ):
        assert said in text


@pytest.mark.parametrize(
    ("b", "said"),
    [
        (result(row("x", samples(1)), case="decode"), "b.json is a result of case 'decode', a.json of 'prefill'"),
        (result(row("x", samples(1)), params={"model": "other"}), "model is 'm' against 'other'; --ignore model"),
        (result(row("y", samples(1))), "no row in common: x bf16 64 tokens against y bf16 64 tokens"),
        (result(row("x", samples(1)), row("x", samples(2))), "b.json: two rows are 'x bf16 64 tokens'"),
        (result({"name": "x"}), "b.json: row 'x' lacks the field 'samples_s'"),
        (result({"name": "x", "samples_s": ["1"]}), "no list of positive seconds"),
        (result({"name": "x", "samples_s": [0.0]}), "no list of positive seconds"),
        (result({"name": "x", "samples_s": [float("inf")] * 9}), "no list of positive seconds"),
        (result({"name": "x", "samples_s": [10**400] * 9}), "no list of positive seconds"),
        (result({"name": "x", "samples_s": [1e-320] * 9}), "no list of positive seconds"),
        (result({"name": 7, "samples_s": [1.0]}), "field 'name' of row 7 is 7; is the file damaged?"),
        (result(row("x", samples(1), top_k=[8])), "field 'top_k' of row 'x' is [8]"),
    ],
)
def test_what_cannot_be_compared_is_refused_by_name(b, said):
    with pytest.raises(ConfigError) as caught:
        compare_files(result(row("x", samples(1))), b, names=NAMES, min_effect=0.02)
    assert said in str(caught.value)


def test_parameters_that_may_differ_can_be_named():
    a, b = result(row("x", samples(1))), result(row("x", samples(1)), params={"model": "other", "workers": [{"name": "w0"}]})
    assert len(compare_files(a, b, names=NAMES, min_effect=0.02, ignored=("model",)).verdicts) == 1


def command(tmp_path, capsys, a, b, *flags):
    for name, found in (("a.json", a), ("b.json", b)):
        (tmp_path / name).write_text(json.dumps(found))
    code = main.run(["bench", "compare", str(tmp_path / "a.json"), str(tmp_path / "b.json"), *flags])
    output = capsys.readouterr()
    return code, output.out, output.err


def test_command_exits_with_1_only_where_slower_was_to_fail(tmp_path, capsys):
    a, b = result(row("x", samples(1))), result(row("x", samples(2, factor=1.3)))
    code, text, _ = command(tmp_path, capsys, a, b)
    assert (code, "slower" in text) == (0, True)
    assert command(tmp_path, capsys, a, b, "--fail-if-slower")[0] == 1
    assert command(tmp_path, capsys, b, a, "--fail-if-slower")[0] == 0


def test_command_writes_verdicts(tmp_path, capsys):
    out = tmp_path / "verdicts.json"
    command(tmp_path, capsys, result(row("x", samples(1))), result(row("x", samples(2, factor=1.3))), "--json", str(out))
    assert json.loads(out.read_text())["verdicts"][0]["verdict"] == "slower"


def test_command_wants_two_files_or_rows(tmp_path, capsys):
    (tmp_path / "a.json").write_text(json.dumps(result(row("x", samples(1)))))
    assert main.run(["bench", "compare", str(tmp_path / "a.json")]) == 2
    assert "pass two results, or one result and --rows X Y" in capsys.readouterr().err
    assert main.run(["bench", "compare", str(tmp_path / "a.json"), "--rows", "x", "auto"]) == 2
    assert "has no row 'auto'; it has x" in capsys.readouterr().err
