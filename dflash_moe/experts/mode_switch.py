"""Switches mode, slices and wire dtypes between calls, and remembers what mode auto knew.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from dflash_moe.config import resolve_settings
from dflash_moe.errors import ConfigError
from dflash_moe.experts.auto import WorkerForecast, log_explanation, worker_forecasts
from dflash_moe.holders.placed_experts import slices_of

if TYPE_CHECKING:
    from dflash_moe import _core
    from dflash_moe.experts.expert_calls import ExpertCalls
    from dflash_moe.holders.path_keeper import PathKeeper
    from dflash_moe.holders.placed_experts import PlacedExperts


class ModeSwitch:
    """Any thread may call; the client lets one switch at a time."""

    def __init__(
        self, client: _core.Client, placed: PlacedExperts, paths: PathKeeper, calls: ExpertCalls, overrides: Mapping[str, Any]
    ) -> None:
        """`overrides` are the settings that win over environment and topology."""
        self._client, self._placed, self._paths, self._calls = client, placed, paths, calls
        self._overrides = overrides
        # These are the forecasts from when mode auto was last in force, for the log at the end.
        self._last_auto: tuple[WorkerForecast, ...] = ()

    def switch(self, wanted: Mapping[str, Any]) -> None:
        """As `ExpertRuntime.set_mode`; values that are None stay as they are."""
        overrides = {**self._overrides, **{key: value for key, value in wanted.items() if value is not None}}
        settings = resolve_settings(self._placed.topology.stated_settings, **overrides)
        slices_of(settings)  # refuses what does not fit before any call is held up
        if self._calls.is_in_step:
            raise ConfigError("set_mode: this thread is in a device step; leave it first")
        with self._between_calls():
            self._note_auto()
            self._paths.change(settings)
            self._overrides = overrides

    @contextmanager
    def _between_calls(self) -> Iterator[None]:
        """Opens a block in which no call is under way. New calls wait for its end, each under its
        own deadline. Raises WorkerTimeout where the calls under way do not end in time.
        """
        self._client.hold(self._calls.limit_s)
        try:
            yield
        finally:
            self._client.resume()

    def _note_auto(self) -> None:
        forecasts = worker_forecasts(self._client.forecasts())
        if any(chunk.is_auto for forecast in forecasts for chunk in forecast.chunks):
            self._last_auto = forecasts

    def explain(self) -> None:
        """Logs what mode auto knew when it was last in force."""
        self._note_auto()
        log_explanation(self._last_auto)
