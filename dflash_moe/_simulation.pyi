"""The real client and the real worker loop in virtual time (csrc/simulation). Only `dflash-moe
simulate` imports it.

`make stubs` writes this file.
"""

from __future__ import annotations

from collections.abc import Callable

class Report:
    """What one seed did."""

    @property
    def event_hash(self) -> int:
        """Equal for every run of the seed with the same code."""

    @property
    def failed(self) -> dict[int, int]:
        """How many calls ended with each code of csrc/base/error_code.h, without zeros."""

    @property
    def faults(self) -> dict[str, int]:
        """How often each kind of fault was injected, without zeros."""

    @property
    def last_events(self) -> list[str]:
        """At most 200, oldest first: those before the first violation, or before the end."""

    @property
    def num_abandoned(self) -> int: ...
    @property
    def num_batches(self) -> int:
        """How many batches the workers have computed."""

    @property
    def num_calls(self) -> int: ...
    @property
    def num_events(self) -> int: ...
    @property
    def num_hosts(self) -> int:
        """One, or two that share all workers."""

    @property
    def num_shared_batches(self) -> int:
        """How many of them had rows of both hosts."""

    @property
    def num_succeeded(self) -> int: ...
    @property
    def options(self) -> list[str]:
        """What the seed drew."""

    @property
    def violations(self) -> list[str]:
        """The rules that were broken, each with its time; empty where all were kept."""

    @property
    def virtual_s(self) -> float: ...

def simulate(
    seed: int,
    seconds: float,
    make_members: Callable[
        [int, list[bool], tuple[float, float]],
        Callable[[int, str, int, str, bool, float], tuple[list[tuple[str, int, float]], str, bool, int]],
    ],
) -> Report:
    """Things break for `seconds` of virtual time. `make_members` takes the seed, whether the host
    starts each worker's process, and the first and the longest pause between two tries in seconds;
    it is called for each process of a host. Releases the GIL but for the calls of what it makes;
    RuntimeError where these raise.
    """
