"""Speculation: what prompt lookup finds, what steps are taken to cost, and that drafts are made
where they pay and nowhere else. Steps are simulated: a known stream of tokens and known seconds.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_moe.engine.prompt_lookup import CATCH_UP, PromptLookup
from dflash_moe.engine.sampling.acceptance import LAST_WAIT, PROBE_CREDIT, PROBE_DRAFTS, PROBE_SHARE, Acceptance
from dflash_moe.engine.speculate import MAX_DRAFTS, Drafter, Speculator, choose_counts
from dflash_moe.engine.step_price import POINTS, StepPrice
from dflash_moe.errors import ConfigError

# What m rows of one sequence were measured to take, relative to one, on the reference model.
MEASURED = {1: 1.0, 2: 1.15, 3: 1.31, 4: 1.42, 5: 1.5, 8: 1.73, 9: 1.81}


def measured_seconds(num_rows: int) -> float:
    above = min(rows for rows in (*MEASURED, 10**6) if rows >= num_rows)
    if above in MEASURED:
        below = max(rows for rows in MEASURED if rows <= num_rows)
        share = (num_rows - below) / max(1, above - below)
        return 0.03 * (MEASURED[below] + share * (MEASURED[above] - MEASURED[below]))
    return 0.03 * (MEASURED[9] + 0.08 * (num_rows - 9))


# ------------------------------------------------------------------------------- prompt lookup


def naive_draft(token_ids: Sequence[int], most: int, longest: int, shortest: int) -> list[int]:
    """Scans the whole sequence for the most recent occurrence of its longest suffix."""
    for size in range(min(longest, len(token_ids) - 1), shortest - 1, -1):
        suffix = list(token_ids[-size:])
        for end in range(len(token_ids) - 1, size - 1, -1):
            if list(token_ids[end - size : end]) == suffix:
                text = list(token_ids)
                for place in range(most):
                    text.append(text[end + place])
                return text[len(token_ids) :]
    return []


def test_the_longest_suffix_is_continued_from_where_it_last_stood():
    lookup = PromptLookup()
    # The pair 2, 3 last stood before 50, but 1, 2, 3 before 40.
    assert lookup.draft("a", [1, 2, 3, 40, 41, 2, 3, 50, 1, 2, 3], 2) == [40, 41]
    assert lookup.draft("b", [1, 2, 3, 40, 1, 2, 3, 50, 51, 1, 2, 3], 2) == [50, 51]
    assert lookup.draft("c", [1, 2, 3, 4, 2, 3], 3) == [4, 2, 3]
    assert list(lookup.draft("d", [1, 2, 3, 4, 5, 3], 4)) == []
    assert PromptLookup(shortest=1).draft("d", [1, 2, 3, 4, 5, 3], 2) == [4, 5]
    assert list(lookup.draft("e", [], 4)) == list(lookup.draft("f", [7], 4)) == []


def test_a_short_period_is_continued_for_any_length():
    assert PromptLookup().draft("a", [9, 1, 2, 1, 2, 1, 2], 7) == [1, 2, 1, 2, 1, 2, 1]
    assert PromptLookup().draft("a", [5] * 4, 6) == [5] * 6


@given(
    st.lists(st.lists(st.integers(0, 3), max_size=8), min_size=1, max_size=12),
    st.integers(1, 3).flatmap(lambda shortest: st.tuples(st.just(shortest), st.integers(shortest, 4))),
    st.integers(0, 6),
    st.sampled_from([1, 2**31 - 4, 2**20]),
)
def test_an_index_that_grows_finds_what_a_scan_of_everything_finds(parts, sizes, most, scale):
    shortest, longest = sizes
    lookup, token_ids = PromptLookup(longest, shortest), []
    for part in parts:
        token_ids += [token * scale % 2**31 for token in part]
        assert list(lookup.draft("a", token_ids, most)) == naive_draft(token_ids, most, longest, shortest)


class CountedTokens(list):
    """A list that counts how many of its tokens were read."""

    num_read = 0

    def __getitem__(self, place):
        found = super().__getitem__(place)
        self.num_read += len(found) if isinstance(place, slice) else 1
        return found

    def __iter__(self):
        raise AssertionError("the whole context was read")


def test_a_step_reads_its_new_tokens_and_not_the_context():
    lookup = PromptLookup()
    token_ids = CountedTokens(random.Random(1).choices(range(50), k=3 * CATCH_UP))
    for calls in range(1, 4):
        token_ids.num_read = 0
        lookup.draft("a", token_ids, 8)
        assert token_ids.num_read <= 2 * CATCH_UP + 30
        assert lookup.num_indexed["a"] == min(calls * CATCH_UP, len(token_ids) - 1)
    for _ in range(20):
        token_ids.append(7)
        token_ids.num_read = 0
        lookup.draft("a", token_ids, 8)
        assert token_ids.num_read <= 30


def test_all_indexes_together_hold_what_was_allowed_and_a_dropped_one_makes_room():
    lookup = PromptLookup(max_indexed=10)
    lookup.draft("a", [1, 2, 3] * 3, 4)
    assert list(lookup.draft("b", [4, 5, 6] * 2, 2)) == []
    assert lookup.num_indexed == {"a": 8, "b": 2}
    lookup.drop("a")
    assert lookup.draft("b", [4, 5, 6] * 2, 2) == [4, 5]
    lookup.drop("b")
    lookup.drop("never seen")
    assert lookup.num_indexed == {}
    assert lookup.draft("c", [1] * 11, 1) == [1]
    assert lookup.num_indexed == {"c": 10}


def test_a_sequence_that_became_shorter_is_indexed_anew():
    lookup = PromptLookup(max_indexed=6)
    lookup.draft("a", [1, 2, 3, 1, 2, 3, 4], 2)
    assert list(lookup.draft("a", [8, 9, 7, 1, 2], 2)) == []
    assert lookup.draft("a", [8, 9, 7, 1, 2, 8, 9], 1) == [7]
    assert lookup.num_indexed == {"a": 6}


def test_wrong_sizes_are_refused():
    for arguments in ({"longest": 1}, {"shortest": 0}, {"max_indexed": -1}):
        with pytest.raises(ConfigError, match=f"{next(iter(arguments))}={next(iter(arguments.values()))}"):
            PromptLookup(**arguments)


# ---------------------------------------------------------------------------- the price of a step


def test_an_unmeasured_price_is_what_reading_the_experts_would_take():
    price = StepPrice(8 / 32)
    assert [round(price.seconds(rows), 2) for rows in range(1, 6)] == [1, 1.75, 2.31, 2.73, 3.05]
    # Where all experts are read a row still costs a part of a step.
    assert price.seconds(41) - price.seconds(40) == pytest.approx(0.15)
    assert StepPrice(1).seconds(3) == pytest.approx(1.3)
    assert StepPrice(8 / 128).seconds(2) == pytest.approx(1.9375)
    for share in (0, 1.01, -1):
        with pytest.raises(ConfigError, match=f"expert_share={share} is not allowed"):
            StepPrice(share)


def test_prices_are_linear_between_measured_points_and_assumed_beyond():
    price = StepPrice(0.25)
    for rows in (1, 5) * 3:
        price.observe(rows, measured_seconds(rows))
    assert price.seconds(1) == pytest.approx(0.03)
    assert price.seconds(5) == pytest.approx(0.045)
    assert price.seconds(3) == pytest.approx(0.0375)
    assert price.seconds(8) == pytest.approx(0.045 * price.assumed(8) / price.assumed(5))


def test_one_slow_step_says_nothing_and_a_point_needs_three():
    price = StepPrice(0.25)
    for _ in range(10):
        price.observe(1, 0.03)
    price.observe(2, 3.0)
    price.observe(2, 0.035)
    assert price.seconds(2) == pytest.approx(0.03 * 1.75)
    price.observe(2, 0.035)
    assert price.seconds(2) == pytest.approx(0.035)
    price.observe(1, 30.0)
    assert price.seconds(2) / price.seconds(1) == pytest.approx(35 / 30)
    for rows, seconds in ((0, 1.0), (1, 0.0), (1, -1.0), (1, float("inf")), (1, float("nan"))):
        before = price.seconds(1)
        price.observe(rows, seconds)
        assert price.seconds(1) == before


def test_what_was_measured_long_ago_gives_way_to_two_new_steps():
    price = StepPrice(0.25)
    for rows in (1, 5) * 31:
        price.observe(rows, measured_seconds(rows))
    for _ in range(600):
        price.observe(1, 0.09)
    for _ in range(2):
        price.observe(5, 0.135)
    assert price.seconds(1) == pytest.approx(0.09)
    assert price.seconds(5) == pytest.approx(0.135)


@given(st.lists(st.tuples(st.integers(1, 2000), st.floats(1e-4, 10.0)), max_size=60))
def test_more_rows_never_cost_less(observed):
    price = StepPrice(1 / 16)
    for rows, seconds in observed:
        price.observe(rows, seconds)
    prices = [price.seconds(rows) for rows in (*POINTS, 20_000)]
    assert prices[0] > 0
    assert all(low < high for low, high in itertools.pairwise(prices))


# ----------------------------------------------------------------------------------- acceptance


def test_a_request_begins_with_the_estimate_of_the_engine_and_gets_its_own():
    acceptance = Acceptance()
    assert acceptance.probability("a") == acceptance.probability() == 0.25
    for _ in range(30):
        acceptance.observe("a", 4, 4)
        acceptance.observe("b", 4, 0)
    assert acceptance.probability("a") > 0.9
    assert acceptance.probability("b") < 0.3
    # Of b's drafts one each step was judged, the first; of a's all four.
    assert 0.75 < acceptance.probability() < 0.85
    assert acceptance.probability("new") == acceptance.probability()
    acceptance.drop("b")
    assert acceptance.probability("b") == acceptance.probability()


def test_waits_between_probes_in_vain_double_and_end_with_a_success():
    acceptance, probed_at = Acceptance(), []
    for place in range(6000):
        is_probe = acceptance.overdue("a") >= 0
        if is_probe:
            probed_at.append(place)
        acceptance.observe("a", 1 if is_probe else 0, 0, is_probe=is_probe)
    # The token of the probe itself comes before the wait.
    waits = [after - before - 1 for before, after in itertools.pairwise(probed_at)]
    assert waits[:7] == [16, 32, 64, 128, 256, 512, LAST_WAIT]
    assert set(waits[7:]) == {LAST_WAIT}
    assert acceptance.overdue("a") < 0
    acceptance.observe("a", 4, 2, is_probe=True)
    assert acceptance.overdue("a") > 6000
    assert acceptance.overdue("new") == 0


# --------------------------------------------------------------------------------- the choice


@given(
    st.lists(st.tuples(st.floats(0.01, 1.0), st.integers(0, 4)), max_size=4),
    st.integers(0, 3),
    st.lists(st.floats(0.01, 1.0), max_size=12),
    st.floats(0.5, 4.0),
)
def test_no_other_choice_gives_more_tokens_per_second(found, num_others, rises, plain_seconds):
    extra = list(itertools.accumulate(rises))
    sequences = len(found) + num_others
    if not sequences:
        return

    def rate(counts: Sequence[int]) -> float:
        tokens = sequences + sum(p**j for (p, _), count in zip(found, counts, strict=True) for j in range(1, count + 1))
        return tokens / (plain_seconds + (extra[sum(counts) - 1] if sum(counts) else 0.0))

    chosen = choose_counts(found, sequences, plain_seconds, extra)
    assert all(count <= most for count, (_, most) in zip(chosen, found, strict=True))
    assert sum(chosen) <= len(extra)
    every = itertools.product(*(range(most + 1) for _, most in found))
    best = max(rate(counts) for counts in every if sum(counts) <= len(extra))
    plain = rate([0] * len(found))
    if any(chosen):
        assert rate(chosen) == pytest.approx(best)
        assert rate(chosen) > 1.02 * plain
    else:
        assert best <= 1.02 * plain * (1 + 1e-9)


def test_a_first_row_that_does_not_pay_hides_no_later_rows_that_do():
    # The first further row reads other experts, those behind it hardly any.
    assert choose_counts([(0.7, 4)], 1, 1.0, [0.75, 0.8, 0.85, 0.9]) == [4]
    assert choose_counts([(0.7, 1)], 1, 1.0, [0.75]) == [0]


# ------------------------------------------------------------------------------ simulated engine


@dataclass
class Simulation:
    """Sequences whose tokens are known, stepped together with drafts by a Speculator."""

    speculator: Speculator
    streams: dict[Hashable, list[int]]
    seconds_of: Callable[[int], float]
    num_prompt: int = 1
    prefill_rows: int = 0
    seconds: float = 0.0
    token_ids: dict[Hashable, list[int]] = field(default_factory=dict)
    planned: list[dict[Hashable, list[int]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.token_ids = {key: stream[: self.num_prompt] for key, stream in self.streams.items()}

    def step(self) -> None:
        requests = [
            (key, found, len(self.streams[key]) - len(found))
            for key, found in self.token_ids.items()
            if len(found) < len(self.streams[key])
        ]
        base_rows = len(requests) + self.prefill_rows
        plan = self.speculator.plan(requests, base_rows, 64)
        assert plan == self.speculator.plan(requests, base_rows, 64)
        outcomes = {}
        for key, found, tokens_left in requests:
            drafts, expected = plan.get(key, []), self.streams[key][len(found) :]
            assert len(drafts) < tokens_left
            accepted = next((n for n, (a, b) in enumerate(zip(drafts, expected, strict=False)) if a != b), len(drafts))
            found += expected[: accepted + 1]
            outcomes[key] = (len(drafts), accepted)
        num_rows = base_rows + sum(map(len, plan.values()))
        self.seconds += self.seconds_of(num_rows)
        self.speculator.observe(outcomes, num_rows, self.seconds_of(num_rows))
        self.planned.append(plan)

    def run(self) -> Simulation:
        while any(len(found) < len(self.streams[key]) for key, found in self.token_ids.items()):
            self.step()
        assert self.token_ids == self.streams
        return self

    @property
    def plain_seconds(self) -> float:
        """What the same tokens take without drafts, where all streams are equally long."""
        num_steps = max(map(len, self.streams.values())) - self.num_prompt
        return num_steps * self.seconds_of(len(self.streams) + self.prefill_rows)


def random_text(seed: int, length: int, vocab_size: int = 8) -> list[int]:
    """Text in which pairs often stood before, and what followed them says nothing."""
    return random.Random(seed).choices(range(vocab_size), k=length)


def repetitive_text(seed: int, length: int, period: int = 40) -> list[int]:
    phrase = random.Random(seed).choices(range(100, 10_000), k=period)
    return [phrase[place % period] for place in range(length)]


def test_repetitive_text_gets_long_drafts_that_are_accepted():
    ran = Simulation(Speculator("auto", expert_share=0.25), {"a": repetitive_text(1, 2000)}, measured_seconds).run()
    stats = ran.speculator.stats()
    assert ran.seconds < 0.35 * ran.plain_seconds
    assert sum(len(plan.get("a", ())) == MAX_DRAFTS for plan in ran.planned) > 0.7 * (len(ran.planned) - 60)
    assert stats.accepted > 0.97 * stats.drafted > 0
    assert stats.accepted + stats.tokens_sampled == 1999
    assert stats.probability > 0.9


def test_random_text_turns_itself_off_and_probing_is_bounded():
    ran = Simulation(Speculator("auto", expert_share=0.25), {"a": random_text(2, 10_000)}, measured_seconds).run()
    stats = ran.speculator.stats()
    assert stats.probed <= PROBE_CREDIT + PROBE_SHARE * 10_000
    assert ran.seconds < 1.01 * ran.plain_seconds
    late = [len(plan.get("a", ())) for plan in ran.planned[2000:]]
    assert max(late) <= PROBE_DRAFTS
    assert 0 < sum(count > 0 for count in late) < 0.01 * len(late)


def test_many_short_requests_share_one_bound_of_probing():
    speculator, seconds, plain_seconds = Speculator("auto", expert_share=0.25), 0.0, 0.0
    for number in range(150):
        ran = Simulation(speculator, {number: random_text(number, 61)}, measured_seconds, num_prompt=30).run()
        speculator.forget(number)
        seconds += ran.seconds
        plain_seconds += ran.plain_seconds
    assert 0 < speculator.stats().probed <= PROBE_CREDIT + PROBE_SHARE * 150 * 31
    assert seconds < 1.02 * plain_seconds


def test_text_that_turns_repetitive_is_found_and_left_again():
    text = random_text(3, 3000) + repetitive_text(4, 3000) + random_text(5, 3000)
    ran = Simulation(Speculator("auto", expert_share=0.25), {"a": text}, measured_seconds).run()
    stats = ran.speculator.stats()
    assert stats.accepted > 1500
    assert stats.switched_off >= 1
    assert sum(len(plan.get("a", ())) for plan in ran.planned[-1000:]) < 100
    assert ran.seconds < 0.85 * ran.plain_seconds


@pytest.mark.parametrize("seed", range(4))
def test_steps_that_scatter_and_pauses_of_the_machine_mislead_for_a_while_only(seed):
    text = random_text(seed, 1500) + repetitive_text(seed, 3000) + random_text(seed + 1, 1500)
    chance, speculator = random.Random(seed), Speculator("auto", expert_share=0.25)
    observe = speculator.observe

    def observe_disturbed(outcomes, num_rows, seconds):
        pause = 4 if chance.random() < 0.02 else 1
        observe(outcomes, num_rows, seconds * pause * max(0.5, chance.gauss(1, 0.08)))

    speculator.observe = observe_disturbed
    ran = Simulation(speculator, {"a": text}, measured_seconds).run()
    assert ran.seconds < 0.8 * ran.plain_seconds


@pytest.mark.parametrize("price", [1.0, 0.98])
def test_where_a_row_costs_a_whole_step_nothing_pays(price):
    def seconds_of(num_rows: int) -> float:
        return 0.01 * (1 + price * (num_rows - 1))

    ran = Simulation(Speculator("auto", expert_share=0.25), {"a": repetitive_text(6, 6000)}, seconds_of).run()
    stats = ran.speculator.stats()
    assert stats.accepted > 0
    # Beside the probes each number of drafts is tried until its price is known.
    assert 0 < stats.probed <= PROBE_CREDIT + PROBE_SHARE * 6000
    assert stats.drafted - stats.probed <= 3 * sum(range(1, MAX_DRAFTS + 1))
    assert ran.seconds < 1.001 * ran.plain_seconds


def test_among_many_sequences_only_those_that_repeat_themselves_get_drafts():
    streams = {key: random_text(key, 3000) for key in range(12)} | {"again": repetitive_text(9, 6000)}
    simulation = Simulation(Speculator("auto", expert_share=0.25), streams, measured_seconds)
    for _ in range(600):
        simulation.step()
    late = simulation.planned[300:]
    assert sum(len(plan.get("again", ())) for plan in late) > 4 * len(late)
    assert sum(len(drafts) for plan in late for key, drafts in plan.items() if key != "again") < 0.05 * 12 * len(late)


def test_rows_of_a_prefill_do_not_make_drafts_dear():
    speculator = Speculator("auto", expert_share=0.25)
    for rows in (1, 9, 257, 293) * 4:
        speculator.price.observe(rows, measured_seconds(rows))
    for _ in range(10):
        speculator.acceptance.observe("a", 4, 3)
    token_ids = repetitive_text(1, 100)
    alone = speculator.plan([("a", token_ids, 50)], 1, 64)
    beside = speculator.plan([("a", token_ids, 50)], 257, 64)
    assert len(alone["a"]) >= 3
    assert len(beside["a"]) >= 3


def test_a_step_without_drafts_comes_at_least_every_65th():
    ran = Simulation(Speculator("auto", expert_share=0.25), {"a": [7] * 20_000}, measured_seconds).run()
    with_drafts = [bool(plan) for plan in ran.planned]
    runs = [len(list(group)) for has_drafts, group in itertools.groupby(with_drafts) if has_drafts]
    assert max(runs) == 64


def test_probes_keep_to_the_rows_that_are_left_and_to_their_credit():
    speculator, phrase = Speculator("auto"), [1, 2, 3, 4, 5, 6, 7, 8] * 2
    requests = [(key, phrase, 50) for key in range(20)]
    # At first nothing pays by what a row is assumed to cost, so that all drafts are probes.
    assert speculator.plan(requests[:1], 1, 2) == {0: [1, 2]}
    assert speculator.plan(requests, 20, 6) == {0: [1, 2, 3, 4], 1: [1, 2]}
    planned = speculator.plan(requests, 20, 64)
    assert planned == {key: [1, 2, 3, 4] for key in range(8)}
    speculator.observe({key: (len(planned.get(key, ())), 0) for key in range(20)}, 52, 1.0)
    assert speculator.stats().probed == PROBE_CREDIT
    assert speculator.plan(requests, 20, 64) == {}


def test_prompt_mode_drafts_whatever_is_found_within_the_limits():
    speculator = Speculator("prompt", max_drafts=4)
    for _ in range(20):
        speculator.observe({"a": (4, 0)}, 5, 1.0)
    phrase = [1, 2, 3, 4, 5, 6, 7, 8] * 2
    assert speculator.plan([("a", phrase, 50)], 1, 64) == {"a": [1, 2, 3, 4]}
    assert speculator.plan([("a", phrase, 3)], 1, 64) == {"a": [1, 2]}
    assert speculator.plan([("a", phrase, 1)], 1, 64) == {}
    assert speculator.plan([("a", phrase, 50), ("b", phrase, 50), ("c", phrase, 50)], 3, 6) == {
        "a": [1, 2, 3, 4],
        "b": [1, 2],
    }
    assert speculator.plan([("a", phrase, 50)], 1, 0) == {}
    assert speculator.plan([], 0, 64) == {}


def test_the_mode_off_looks_for_nothing():
    speculator = Speculator("off")
    assert speculator.plan([("a", [1] * 50, 50)], 1, 64) == {}
    speculator.observe({"a": (0, 0)}, 1, 1.0)
    assert speculator.stats().tokens_sampled == 0
    for arguments, expected in (
        ({"mode": "on"}, "speculate='on' is not allowed; allowed: off, prompt, auto"),
        ({"max_drafts": 0}, "max_drafts=0 is not allowed; allowed: at least 1"),
    ):
        with pytest.raises(ConfigError, match=expected):
            Speculator(**arguments)


class OneAhead:
    """A drafter with state: it says that the next tokens count upwards, and how often it spoke."""

    def __init__(self) -> None:
        self.calls: dict[Hashable, int] = {}

    def draft(self, key: Hashable, token_ids: Sequence[int], most: int) -> Sequence[int]:
        self.calls[key] = self.calls.get(key, 0) + 1
        return tuple(range(token_ids[-1] + 1, token_ids[-1] + 1 + most))

    def drop(self, key: Hashable) -> None:
        self.calls.pop(key, None)


def test_another_drafter_takes_the_place_of_prompt_lookup_and_is_told_of_the_end():
    drafter: Drafter = OneAhead()
    speculator = Speculator("auto", drafter, expert_share=0.25)
    ran = Simulation(speculator, {"a": list(range(1000)), "b": random_text(1, 1000)}, measured_seconds).run()
    assert ran.speculator.stats().accepted > 700
    assert set(drafter.calls) == {"a", "b"}
    assert sum(len(plan.get("b", ())) for plan in ran.planned) < 200
    speculator.forget("a")
    speculator.forget("b")
    assert drafter.calls == {}
    assert speculator.acceptance.probability("a") == speculator.acceptance.probability()


def test_the_same_observations_give_the_same_plans():
    text = random_text(1, 500) + repetitive_text(2, 500)
    plans = [Simulation(Speculator("auto"), {"a": text, "b": text[::-1]}, measured_seconds).run().planned for _ in range(2)]
    assert plans[0] == plans[1]


def test_a_plan_that_was_never_run_changes_nothing():
    text = repetitive_text(1, 200)
    speculator = Speculator("auto", expert_share=0.25)
    before = speculator.stats()
    first = speculator.plan([("a", text, 50)], 1, 64)
    assert first
    for _ in range(100):
        assert speculator.plan([("a", text, 50)], 1, 64) == first
    assert speculator.stats() == before
