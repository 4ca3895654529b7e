"""What a runtime says of itself: `stats()`, whether it is ready, and what its weights add up to.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dflash_moe.experts import observe
from dflash_moe.experts.auto import mode_reason, worker_forecasts
from dflash_moe.experts.readiness import unready_reason
from dflash_moe.holders.audit.contents import ContentsReport, compare_with_own_copy, held_checksums
from dflash_moe.placement.numerics import describe_numerics

if TYPE_CHECKING:
    from dflash_moe import _core
    from dflash_moe.experts.expert_calls import ExpertCalls
    from dflash_moe.holders.holder_lists import HolderLists
    from dflash_moe.holders.host_fallback import HostFallback
    from dflash_moe.holders.placed_experts import PlacedExperts
    from dflash_moe.holders.row_audit import Audit


class RuntimeReport:
    """Any thread may call. What `ExpertRuntime` says of its methods holds for those of the same
    names here.
    """

    def __init__(
        self, client: _core.Client, placed: PlacedExperts, calls: ExpertCalls, *, holders: HolderLists, fallback: HostFallback,
        audit: Audit, remedy_of: Callable[[str], str],
    ) -> None:  # fmt: skip
        """`remedy_of` says what is done about a worker that was lost."""
        self._client, self._placed, self._calls = client, placed, calls
        self._holders, self._fallback, self._audit, self._remedy_of = holders, fallback, audit, remedy_of
        self._last: dict[str, Any] = {}

    def stats(self) -> dict[str, Any]:
        """As `ExpertRuntime.stats` of one that is open."""
        placed = self._placed
        counted = observe.count_calls(self._client, placed.fleet, [layer.index for layer in placed.spec.layers])
        forecasts = worker_forecasts(self._client.forecasts())
        slices = placed.slices
        return {
            **counted["totals"],
            **counted,
            "fallback": self._fallback.describe(counted["workers"]),
            "mode": slices.mode,
            "mode_asked": placed.settings.mode,
            "mode_reason": mode_reason(forecasts) if slices.is_measured else "as asked",
            "auto": {forecast.name: asdict(forecast) for forecast in forecasts},
            "slice_tokens": slices.slice_tokens,
            "window": slices.window,
            "wire_dtypes": placed.wire_dtypes,
            "numerics": describe_numerics(placed.spec.layers, placed.placement, placed.settings.numerics),
            "audit": self._audit.stats(),
            "transports": {member.name: member.transport for member in placed.fleet.members.values()},
            **self._calls.step_counts(),
        }

    def keep_last(self) -> None:
        """Takes the last values before the end. Raises DflashError in a forked child."""
        self._last = self.stats()

    @property
    def last(self) -> dict[str, Any]:
        """The values that were taken last, for a runtime that is closed."""
        return self._last

    def unready_reason(self) -> str:
        """As `ExpertRuntime.unready_reason`."""
        return unready_reason(
            self._holders.everybody(), self._client.workers(),
            layer_names={layer.index: layer.name for layer in self._placed.spec.layers}, remedy_of=self._remedy_of,
        )  # fmt: skip

    def check_weights(self, report: ContentsReport) -> int:
        """As `ExpertRuntime.check_weights`."""
        placed = self._placed
        placed.fleet.owner.require_here()
        return compare_with_own_copy(
            placed.fleet.shards.ask_checksum,
            placed.held,
            Path(placed.spec.path),
            timeout_s=placed.settings.start_timeout_s,
            report=report,
        )

    def content_checksums(self) -> tuple[tuple[int, ...], ...]:
        """As `ExpertRuntime.content_checksums`."""
        placed = self._placed
        placed.fleet.owner.require_here()
        return held_checksums(
            placed.fleet.shards.ask_checksum, placed.held, placed.spec.layers, timeout_s=placed.settings.start_timeout_s
        )
