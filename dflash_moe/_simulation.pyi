"""The real client and the real worker loop in virtual time (csrc/simulation). Only `dflash-moe
simulate` imports it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

class Report:
    """What one seed did."""

    # Equal for every run of the seed with the same code.
    event_hash: int
    num_events: int
    virtual_s: float
    num_calls: int
    num_succeeded: int
    num_abandoned: int
    # How many calls ended with each code of csrc/base/error_code.h, without zeros.
    failed: dict[int, int]
    # How often each kind of fault was injected, without zeros.
    faults: dict[str, int]
    # The rules that were broken, each with its time; empty where all were kept.
    violations: list[str]
    # What the seed drew.
    options: list[str]
    # At most 200, oldest first: those before the first violation, or before the end.
    last_events: list[str]

# What is told of an event of a worker (cli/simulated_members.py), and its answer.
Members = Callable[[int, str, int, str, bool, float], tuple[list[tuple[str, int, float]], str, bool, int]]

# Things break for `seconds` of virtual time. `make_members` takes the seed, whether the host starts
# each worker's process, and the first and the longest pause between two tries in seconds. Releases
# the GIL but for the calls of what it makes; RuntimeError where these raise.
def simulate(
    seed: int, seconds: float, make_members: Callable[[int, Sequence[bool], tuple[float, float]], Members]
) -> Report: ...
