"""`prefill-cards`: the prefill table on every pair of cards that a machine has.

The model runs on one card, which keeps a part of the experts, and another card, or all others
together, hold the rest. Each such topology gets the rows of the modes: whole chunks against
streaming slices of four rows.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dflash_moe import _core
from dflash_moe.bench.harness import Recorder, run_rounds
from dflash_moe.bench.model_host import describe_topology, open_hosts
from dflash_moe.bench.prefill import PrefillCase, PrefillParams, prefill_cases
from dflash_moe.bench.results import BenchResult
from dflash_moe.config import MemoryBudget
from dflash_moe.errors import ConfigError, UnsupportedError
from dflash_moe.model.inspect import GIB, inspect_model
from dflash_moe.topology import HostSpec, PlacementSpec, Topology, WorkerSpec

# The backends whose cards count. Simulated cards are taken only where they are asked for.
CARD_BACKENDS = ("cuda", "hip")
SIMULATED = "sim"
# On each card so much stays free for scratch memory, and on the host's also for the KV cache.
RESERVED_BYTES = 1 * GIB


@dataclass(frozen=True, slots=True)
class Card:
    """A card that can be used: `device` counts within its backend. `simulate` is the vendor of a
    simulated one.
    """

    backend: str
    device: int
    name: str
    memory_bytes: int
    simulate: str | None = None

    @property
    def label(self) -> str:
        """What tables call it, such as cuda:0 or sim-hip."""
        return f"{self.backend}-{self.simulate}" if self.simulate else f"{self.backend}:{self.device}"


@dataclass(frozen=True, slots=True)
class CardPair:
    """The model's card, those that hold experts beside it, and the topology that says so."""

    host: Card
    workers: tuple[Card, ...]
    topology: Topology

    @property
    def label(self) -> str:
        """The pair as rows have it: `cuda:0 > hip:0`, the model's card first."""
        return f"{self.host.label} > {' + '.join(card.label for card in self.workers)}"


def find_cards(backend: str) -> list[Card]:
    """Returns the usable cards of a backend, or of all real ones where `backend` is auto, the one
    with the most memory first. Raises UnsupportedError with every reason where there are fewer than
    two.
    """
    found, reasons = [], []
    for name in CARD_BACKENDS if backend == "auto" else (backend,):
        probed = _core.probe_backend(name)
        if not probed["devices"]:
            reasons.append(probed["reason"])
        for number, device in enumerate(probed["devices"]):
            if device["reason"]:
                reasons.append(f"{name}:{number} {device['name']}: {device['reason']}")
                continue
            # The simulator has one card of each vendor, which the vendor tells apart.
            vendor, number = (device["vendor"], 0) if name == SIMULATED else (None, number)
            found.append(Card(name, number, device["name"], device["memory_bytes"], vendor))
    if len(found) < 2:
        have = ", ".join(f"{card.label} {card.name}" for card in found) or "none"
        why = f" ({'; '.join(reasons)})" if reasons else ""
        raise UnsupportedError(
            f"prefill-cards measures pairs of cards, and this machine has {have}{why}; `dflash-moe doctor` says what a "
            "card needs, `dflash-moe bench prefill --topology FILE` measures one card with processors, --backend sim counts "
            "calls and bytes without cards"
        )
    return sorted(found, key=lambda card: -card.memory_bytes)


def card_pairs(cards: Sequence[Card], host_bytes: int) -> list[CardPair]:
    """Returns every ordered pair of cards, and with three or more also the first with all others.

    `host_bytes` are those of the model without its routed experts. Raises ConfigError where no card
    has room for them.
    """
    pairs: list[tuple[Card, tuple[Card, ...]]] = [(host, (other,)) for host in cards for other in cards if other is not host]
    if len(cards) > 2:
        pairs.append((cards[0], tuple(cards[1:])))
    fitting = [
        CardPair(host, workers, _topology(host, workers, host_bytes))
        for host, workers in pairs
        if host.memory_bytes - host_bytes > RESERVED_BYTES
    ]
    if not fitting:
        most = cards[0]
        raise ConfigError(
            f"the model takes {host_bytes / GIB:.1f} GiB without its experts and 1 GiB for the KV cache, and the largest card, "
            f"{most.label} {most.name}, has {most.memory_bytes / GIB:.1f} GiB; take a smaller model"
        )
    return fitting


def _topology(host: Card, workers: tuple[Card, ...], host_bytes: int) -> Topology:
    """Shares the experts in proportion to the memory that the cards have for them, so that the
    table needs no figure of the user's.
    """
    at_host = host.memory_bytes - host_bytes - RESERVED_BYTES
    others = [max(1, card.memory_bytes - RESERVED_BYTES) for card in workers]
    specs = tuple(
        WorkerSpec(
            f"w{at}", backend=card.backend, device=None if card.simulate else card.device, memory=memory, simulate=card.simulate
        )
        for at, (card, memory) in enumerate(zip(workers, others, strict=True))
    )
    share = MemoryBudget(fraction=at_host / (at_host + sum(others)))
    return Topology(
        specs,
        HostSpec(device=f"{host.backend}:{host.device}", experts_memory=share, simulate=host.simulate),
        placement=PlacementSpec("memory"),
        source="<cards>",
    )


@dataclass(slots=True)
class CardCase:
    """A case of `bench prefill` over one pair of cards: a `harness.Case`."""

    pair: CardPair
    case: PrefillCase

    @property
    def rounds(self) -> int | None:
        """See `PrefillCase.rounds`."""
        return self.case.rounds

    @property
    def label(self) -> str:
        """The name of the case in reports of progress."""
        return f"{self.pair.label}, {self.case.label}"

    def measure(self, *, keep: bool) -> None:
        """Takes one sample."""
        self.case.measure(keep=keep)

    def row(self) -> dict[str, Any] | None:
        """Returns the row of `bench prefill` with the cards, once it has a sample."""
        row = self.case.row()
        if row is None:
            return None
        return row | {
            "name": f"{self.pair.label} {row['mode']}",
            "cards": self.pair.label,
            "host_card": self.pair.host.name,
            "worker_cards": [card.name for card in self.pair.workers],
        }


def run_prefill_cards(
    params: PrefillParams, backend: str, *, recorder: Recorder | None = None, overrides: Mapping[str, Any] | None = None
) -> BenchResult:
    """Measures every pair of cards in every mode. One pair is open at a time; the modes
    alternate within it.

    Errors: those of `find_cards` and `card_pairs` before anything starts, and of
    `ExpertRuntime.start`. The recorder keeps the pairs that were measured before one.
    """
    recorder, overrides = recorder or Recorder(), dict(overrides or {})
    pairs = card_pairs(find_cards(backend), inspect_model(params.model).host_bytes_on_card)
    described = {key: value for key, value in dataclasses.asdict(params).items() if key not in ("model", "with_timeline")}
    result = recorder.begin("prefill-cards", {"model": params.model.name, **described, "pairs": []})
    with recorder.recording():
        for pair in pairs:
            facts = {"cards": pair.label, **describe_topology(pair.topology, overrides, recorder)}
            result.params["pairs"].append(facts)
            recorder.reporter.say(pair.label)
            with open_hosts(params.model, pair.topology, overrides, recorder, with_local=False) as (remote, _none):
                cases = [CardCase(pair, case) for case in prefill_cases(params, remote, None)]
                run_rounds(recorder, cases, rounds=params.repeat)
    return result
