"""The calls of host layers over fixed buffers: one program of the core, which a whole step runs
without Python. Where somebody has to be told between two calls it pauses there: two halves of a
step about stored keys and awaited experts, whoever stands in for routed experts, and whoever is
shown what leaves a layer.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from dflash_moe import _core
from dflash_moe.errors import DflashError, WorkerError
from dflash_moe.operators.layer_buffers import LayerBuffers
from dflash_moe.operators.step_context import StepContext


class ClientCall(Protocol):
    """A call of a client that the core makes by itself: what `Client.run` takes, and what completes
    an error of it (`BoundExperts` of experts/expert_call.py).
    """

    client: _core.Client
    layer: int
    batch: _core.TokenBatch
    explained: Callable[[WorkerError], DflashError]


class Detours(Protocol):
    """How many blocks are `open` in which something stands in for the routed experts of a model."""

    open: int


class BoundCall(Protocol):
    """A call of the routed experts whose tensors are fixed."""

    def bound(self) -> tuple[ClientCall, _core.CallCount, Detours] | None:
        """Returns the call for the core and what counts it, None where `run` or `submit` has to
        make it. The same holds until a detour of the model is opened, or the open ones end.
        """
        ...

    def run(self, step: StepContext) -> None:
        """Computes the experts into the result that was bound."""
        ...

    def submit(self, step: StepContext) -> Callable[[], None]:
        """Starts the call and returns what waits for its end."""
        ...


# What waits for experts that were submitted.
_Waits = list[Callable[[], None]]


@dataclass(frozen=True, slots=True)
class _Pause:
    """Something to do at `place`, instead of `num_calls` calls that are there."""

    place: int
    num_calls: int
    act: Callable[[StepContext, _Waits], Any]


@dataclass(slots=True)
class _Experts:
    """A call of routed experts: `slot` is its place among these, and the core makes it by the calls
    of the program at `places`.
    """

    slot: int
    places: tuple[int, ...]
    call: BoundCall
    bound: ClientCall | None = None


class StepProgram:
    """Calls for the rows of `buffers`. Operators are appended to `core`; one thread at a time runs
    them.
    """

    def __init__(self, buffers: LayerBuffers) -> None:
        self.core = _core.Program(buffers.num_rows)
        self.core.keep(buffers.tensors())
        # No function here may hold the program, so that large buffers go as soon as their step has
        # ended.
        self._pauses: list[_Pause] = []
        self._experts: list[_Experts] = []
        # Those of the model whose experts the core has all been told, None before.
        self._detours: Detours | None = None

    def __len__(self) -> int:
        return self.core.num_calls

    # -- what is appended ------------------------------------------------------------------------
    def tell(self, act: Callable[[StepContext], None]) -> None:
        """Has a half of a step call `act` here."""
        self._pauses.append(_Pause(len(self), 0, lambda step, _waits: act(step)))

    def experts(self, call: BoundCall) -> None:
        """Calls routed experts and waits for them."""
        place = len(self)
        self._experts.append(_Experts(self.core.experts(), (place,), call))
        self._pauses.append(_Pause(place, 1, lambda step, _waits: call.run(step)))

    def submit(self, call: BoundCall) -> Callable[[], None]:
        """Calls routed experts. Calls that are appended before the function that is returned is
        called are made while they are awaited.
        """
        place = len(self)
        slot = self.core.submit_experts()
        self._pauses.append(_Pause(place, 1, lambda step, waits: waits.append(call.submit(step))))

        def wait() -> None:
            end = len(self)
            self.core.wait_for_experts()
            self._experts.append(_Experts(slot, (place, end), call))
            self._pauses.append(_Pause(end, 1, lambda _step, waits: waits.pop()()))

        return wait

    # -- running ---------------------------------------------------------------------------------
    def run(
        self,
        step: StepContext,
        begin: int = 0,
        end: int | None = None,
        inputs: _core.StepInputs | None = None,
    ) -> None:
        """Makes the calls begin..end - 1, by default all, for the rows of a step. `inputs` are what
        the core reads of it, by default what layers read.
        """
        inputs = step.inputs if inputs is None else inputs
        end = len(self) if end is None else end
        if step.clock.has_turns or not self.is_bound():
            self._run_paused(step, inputs, begin, end)
            return
        step.clock.add(*self.run_bound(inputs, begin, end))

    def run_bound(self, inputs: _core.StepInputs, begin: int, end: int) -> tuple[float, float]:
        """Makes the calls begin..end - 1 of a program that `is_bound`, as one call of the core.
        Returns the seconds in which experts were awaited, and those in which they were under way.
        """
        try:
            return self.core.run(inputs, begin, end)
        except WorkerError as error:
            for experts in self._experts:
                if self.core.failed in experts.places and experts.bound is not None:
                    raise experts.bound.explained(error) from None
            raise

    def is_bound(self) -> bool:
        """Says whether the core can make all calls of experts, which it is told here. One number
        says that nothing has changed since, whatever the number of layers.
        """
        if self._detours is not None and not self._detours.open:
            return True
        self._detours = None
        detours = None
        for experts in self._experts:
            found = experts.call.bound()
            if found is None:
                return False
            experts.bound, count, detours = found
            self.core.bind_experts(experts.slot, experts.bound.client, experts.bound.layer, experts.bound.batch, count)
        self._detours = detours
        return True

    def _run_paused(self, step: StepContext, inputs: _core.StepInputs, begin: int, end: int) -> None:
        waits: _Waits = []
        try:
            for pause in self._pauses:
                if begin <= pause.place < end:
                    self.core.run(inputs, begin, pause.place)
                    pause.act(step, waits)
                    begin = pause.place + pause.num_calls
            self.core.run(inputs, begin, end)
        finally:
            for wait in waits:
                wait()
