"""Compares two result files, or two rows of one, from their samples: faster, slower, or cannot
tell.

A verdict needs three things: enough rounds, a bootstrap interval of the ratio of medians that lies
wholly on one side of 1, and an effect of at least `min_effect`. Whole rounds are drawn, since
samples of one round share its disturbances; where two rows were measured in the same rounds, the
ratio is taken round by round.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dflash_moe.bench.results import require_fields
from dflash_moe.errors import ConfigError

# An interval of a median that is drawn from samples reaches from the least of them to the largest
# at most. With n independent samples the true median lies between these with a chance of
# 1 - 2 / 2^n: 94 % for 5, so that 95 % is nearly held, and only 88 % for 4.
MIN_ROUNDS = 5
DRAWS = 2000
# At most so many samples are drawn at a time, which bounds memory to tens of MB.
MAX_DRAWN = 1 << 22
MANY_ROUNDS = 1000
# A sample lies in this range, so that a ratio of two samples is finite.
SECONDS = (1e-12, 1e12)
SEED = 1
# These two percentiles enclose a 95 % interval.
CONFIDENCE = (2.5, 97.5)
# Rows are the same measurement when they agree in these fields, as far as a case has them.
IDENTITY = (
    "name", "dtype", "prompt_tokens", "new_tokens", "payload_bytes", "backend", "format", "tokens", "hidden_size",
    "moe_intermediate_size", "num_experts", "top_k", "threads", "routing", "weights_from", "isa", "kernel", "batch",
    "transport",
)  # fmt: skip
# Rows of one file are the same work done in two ways when they agree in these fields.
SIZES = tuple(key for key in IDENTITY if key not in ("name", "backend", "kernel", "isa"))
# These parameters do not change what one sample means.
FREE_PARAMS = {
    "processes", "repeat", "stream_repeat", "batches", "modes", "dtypes", "prompt_tokens", "payloads", "local_left_out",
    "families", "cores_usable", "oversubscribed", "pinned", "rounds", "estimate_s", "batch", "warmup", "with_loop", "kv_tokens",
    "huge_pages", "sequences", "prefill", "concurrency", "url", "tokens_per_word",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a comparison found. `ratio` is the time of `against` divided by that of `name`, so that
    `against` is faster below 1, and `low` and `high` enclose its 95 % interval.
    """

    name: str
    against: str
    ratio: float | None
    low: float | None
    high: float | None
    # The verdict is of `against`: faster, slower, or cannot tell.
    verdict: str
    why: str
    rounds: int


@dataclass(frozen=True, slots=True)
class Comparison:
    """The verdicts, and what a reader must know about them."""

    verdicts: tuple[Verdict, ...]
    warnings: tuple[str, ...]

    @property
    def has_slower(self) -> bool:
        """True where any verdict is `slower`."""
        return any(verdict.verdict == "slower" for verdict in self.verdicts)


def compare_files(
    a: Mapping[str, Any], b: Mapping[str, Any], *, names: tuple[str, str], min_effect: float, ignored: Iterable[str] = ()
) -> Comparison:
    """Compares the rows that both files have. `ignored` are parameters, and fields of rows, that
    may differ. Raises ConfigError for another case, other parameters, or no common row.
    """
    ignored = set(ignored)
    if a["case"] != b["case"]:
        raise ConfigError(f"{names[1]} is a result of case {b['case']!r}, {names[0]} of {a['case']!r}; compare equal cases")
    _check_params(a["params"], b["params"], names, ignored)
    fields = tuple(key for key in IDENTITY if key not in ignored)
    rows_a, rows_b = _by_identity(a["rows"], names[0], fields), _by_identity(b["rows"], names[1], fields)
    common = [key for key in rows_a if key in rows_b]
    if not common:
        raise ConfigError(
            f"{names[0]} and {names[1]} have no row in common: {_listed(map(label, rows_a.values()))} against "
            f"{_listed(map(label, rows_b.values()))}"
        )
    warnings = _warnings(a, b, names)
    for name, missing in ((names[1], rows_a.keys() - rows_b.keys()), (names[0], rows_b.keys() - rows_a.keys())):
        if missing:
            source = rows_a if name == names[1] else rows_b
            warnings.append(f"not in {name}: {_listed(label(row) for key, row in source.items() if key in missing)}")
    verdicts = tuple(
        _judge(label(rows_a[key]), "the same in B", _unpaired(rows_a[key], rows_b[key]), min_effect) for key in common
    )
    return Comparison(verdicts, tuple(warnings))


def compare_rows(found: Mapping[str, Any], file: str, first: str, second: str, *, min_effect: float) -> Comparison:
    """Compares every row called `second` with the row called `first` of the same dtype, prompt,
    payload and so on. Raises ConfigError where there is none.
    """
    rows = _by_identity(found["rows"], file, IDENTITY)
    names = list(dict.fromkeys(row["name"] for row in rows.values()))
    for wanted in (first, second):
        if wanted not in names:
            raise ConfigError(f"{file} has no row {wanted!r}; it has {_listed(names)}")
    pairs = _pairs(rows.values(), first, second, SIZES)
    if not pairs:
        # No row has a partner of its own format, so that the formats themselves are compared.
        pairs = _pairs(rows.values(), first, second, tuple(key for key in SIZES if key != "format"))
    verdicts = []
    for row, other in pairs:
        draw = _paired(row, other) if found.get("interleaved") else _unpaired(row, other)
        verdicts.append(_judge(label(row), label(other), draw, min_effect))
    if not verdicts:
        raise ConfigError(f"{file}: no row {first!r} has the dtype and sizes of a row {second!r}")
    warnings = (
        [] if found.get("interleaved") else [f"{file}: rows were not interleaved; a drift of the machine counts as an effect"]
    )
    return Comparison(tuple(verdicts), tuple(_incomplete(found, file) + warnings))


def _pairs(
    rows: Iterable[Mapping[str, Any]], first: str, second: str, fields: tuple[str, ...]
) -> list[tuple[Mapping[str, Any], Mapping[str, Any]]]:
    known = list(rows)
    return [
        (row, other)
        for row in known
        for other in known
        if row["name"] == first and other["name"] == second and _identity(row, fields) == _identity(other, fields)
    ]


def label(row: Mapping[str, Any]) -> str:
    """Returns the name of a row, and what tells it from others of that name."""
    shown = [str(row["name"])]
    units = {"prompt_tokens": " tokens", "payload_bytes": " B", "tokens": " tokens", "threads": " threads"}
    for key in (
        "transport",
        "format",
        "dtype",
        "prompt_tokens",
        "tokens",
        "payload_bytes",
        "threads",
        "routing",
        "weights_from",
    ):
        if row.get(key) is not None:
            shown.append(f"{row[key]:,}{units.get(key, '')}" if isinstance(row[key], int) else str(row[key]))
    return " ".join(shown)


@dataclass(frozen=True, slots=True)
class _Draws:
    rounds: int
    ratio: float
    # Every draw has one ratio.
    ratios: np.ndarray


def _rounds_of(row: Mapping[str, Any]) -> np.ndarray:
    """Returns the samples [num_rounds, samples_per_round] in seconds. An unfinished last round is
    left out.
    """
    samples = np.asarray(row["samples_s"], dtype=np.float64)
    per_round = max(1, int(row.get("samples_per_round", 1)))
    whole = len(samples) // per_round
    return samples[: whole * per_round].reshape(whole, per_round)


def _unpaired(a: Mapping[str, Any], b: Mapping[str, Any]) -> _Draws | int:
    """Draws rounds from each side by itself and compares the medians. Returns the number of rounds
    where they are too few.
    """
    rounds_a, rounds_b = _rounds_of(a), _rounds_of(b)
    rounds = min(len(rounds_a), len(rounds_b))
    if rounds < MIN_ROUNDS:
        return rounds
    generator = np.random.default_rng(SEED)
    ratios = _drawn_medians(rounds_b, generator) / _drawn_medians(rounds_a, generator)
    return _Draws(rounds, float(np.median(rounds_b) / np.median(rounds_a)), ratios)


def _paired(a: Mapping[str, Any], b: Mapping[str, Any]) -> _Draws | int:
    rounds_a, rounds_b = _rounds_of(a), _rounds_of(b)
    rounds = min(len(rounds_a), len(rounds_b))
    if rounds < MIN_ROUNDS:
        return rounds
    ratio = np.median(rounds_b[:rounds], axis=1) / np.median(rounds_a[:rounds], axis=1)
    drawn = _drawn_medians(ratio[:, None], np.random.default_rng(SEED))
    return _Draws(rounds, float(np.median(ratio)), drawn)


def _drawn_medians(rounds: np.ndarray, generator: np.random.Generator) -> np.ndarray:
    """Returns the median of every draw of as many rounds, with replacement."""
    if rounds.shape[1] == 1 and len(rounds) >= MANY_ROUNDS:
        # The rank of the median in the sample follows Beta((n + 1) / 2, (n + 1) / 2), so that there
        # is no need to draw n samples 2,000 times.
        half = (len(rounds) + 1) / 2
        ranks = (generator.beta(half, half, size=DRAWS) * len(rounds)).astype(np.int64)
        medians_of_draws: np.ndarray = np.sort(rounds[:, 0])[ranks.clip(0, len(rounds) - 1)]
        return medians_of_draws
    at_once = max(1, MAX_DRAWN // rounds.size)
    medians = []
    for start in range(0, DRAWS, at_once):
        picks = generator.integers(0, len(rounds), size=(min(at_once, DRAWS - start), len(rounds)))
        medians.append(np.median(rounds[picks].reshape(len(picks), -1), axis=1))
    return np.concatenate(medians)


def _judge(name: str, against: str, draws: _Draws | int, min_effect: float) -> Verdict:
    if isinstance(draws, int):
        why = f"only {draws} round{'s' if draws != 1 else ''}; {MIN_ROUNDS} are needed"
        return Verdict(name, against, None, None, None, "cannot tell", why, draws)
    low, high = (float(value) for value in np.percentile(draws.ratios, CONFIDENCE))
    if low <= 1 <= high:
        verdict, why = "cannot tell", "the interval contains 1"
    elif abs(draws.ratio - 1) < min_effect:
        verdict, why = "cannot tell", f"less than {min_effect:.1%} apart"
    else:
        verdict = "faster" if draws.ratio < 1 else "slower"
        why = f"takes {draws.ratio:.1%} of the time over {draws.rounds} rounds"
    return Verdict(name, against, draws.ratio, low, high, verdict, why, draws.rounds)


def _identity(row: Mapping[str, Any], fields: tuple[str, ...]) -> tuple[Any, ...]:
    return tuple(row.get(key) for key in fields)


def _by_identity(
    rows: Sequence[Mapping[str, Any]], file: str, fields: tuple[str, ...]
) -> dict[tuple[Any, ...], Mapping[str, Any]]:
    found: dict[tuple[Any, ...], Mapping[str, Any]] = {}
    for row in rows:
        require_fields(row, ("name", "samples_s"), file)
        _check_identity(row, file)
        _check_samples(row, file)
        if found.setdefault(_identity(row, fields), row) is not row:
            raise ConfigError(f"{file}: two rows are {label(row)!r}; nothing tells them apart, so they cannot be compared")
    return found


def _check_identity(row: Mapping[str, Any], file: str) -> None:
    for key in IDENTITY:
        allowed = str if key == "name" else str | int | float | None
        if not isinstance(row.get(key), allowed):
            raise ConfigError(f"{file}: field {key!r} of row {row['name']!r} is {_short(row[key])}; is the file damaged?")


def _check_samples(row: Mapping[str, Any], file: str) -> None:
    samples, per_round = row["samples_s"], row.get("samples_per_round", 1)
    least, most = SECONDS
    is_list = isinstance(samples, list) and all(isinstance(one, int | float) and least <= one <= most for one in samples)
    if not samples or not is_list or not isinstance(per_round, int) or per_round < 1:
        raise ConfigError(f"{file}: row {label(row)!r} has no list of positive seconds in 'samples_s'; is the file damaged?")


def _check_params(a: Mapping[str, Any], b: Mapping[str, Any], names: tuple[str, str], ignored: set[str]) -> None:
    skipped = FREE_PARAMS | ignored
    for key in dict.fromkeys([*a, *b]):
        if key not in skipped and a.get(key) != b.get(key):
            raise ConfigError(
                f"{names[0]} and {names[1]} measured different things: {key} is {_short(a.get(key))} against "
                f"{_short(b.get(key))}; --ignore {key} compares them all the same"
            )


def _warnings(a: Mapping[str, Any], b: Mapping[str, Any], names: tuple[str, str]) -> list[str]:
    found = _incomplete(a, names[0]) + _incomplete(b, names[1])
    for key in ("cpu", "cores_usable", "isa"):
        first, second = (one["machine"].get(key) for one in (a, b))
        if first != second:
            found.append(f"different machines: {key} is {_short(first)} in {names[0]}, {_short(second)} in {names[1]}")
    if a.get("commit") != b.get("commit"):
        found.append(f"different commits: {str(a.get('commit'))[:10]} in {names[0]}, {str(b.get('commit'))[:10]} in {names[1]}")
    for one, name in ((a, names[0]), (b, names[1])):
        if one.get("dirty"):
            found.append(f"{name} was measured on a changed working tree")
    return found


def _incomplete(found: Mapping[str, Any], name: str) -> list[str]:
    if found.get("complete", True):
        return []
    return [f"{name} is incomplete (ended by {found.get('ended_by', 'something unknown')}): fewer rounds than planned"]


def _listed(names: Iterable[str]) -> str:
    listed = list(names)
    return ", ".join(listed[:6]) + (f" and {len(listed) - 6} more" if len(listed) > 6 else "")


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
