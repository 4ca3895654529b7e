"""One run of a program under supervision: it is started, watched until its end, and judged.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING

from dflash_moe.cli import options
from dflash_moe.cli.llama.program import Program
from dflash_moe.cli.llama.proof import LocalityProof, OpenFiles, Sighting
from dflash_moe.errors import DflashError
from dflash_moe.handover.handover_socket import HandoverSocket
from dflash_moe.handover.supervisor import Supervisor

if TYPE_CHECKING:
    from dflash_moe.handover.handover_plan import HandoverModel
    from dflash_moe.holders.placed_experts import PlacedExperts
    from dflash_moe.protocol.handover import Counted


class SupervisedRun:
    """Runs one program, once. One thread uses it."""

    def __init__(self, known: HandoverModel, placed: PlacedExperts, proof: LocalityProof, files: OpenFiles) -> None:
        """The workers of `placed` are loaded. Raises ConfigError where it leaves experts to the
        host.
        """
        self._supervisor = Supervisor(
            known,
            placed,
            on_lost=_say_lost,
            on_back=lambda name: options.say(f"worker {name} is back"),
            on_unfit=_say_unfit,
            on_left_alone=_say_left_alone,
        )
        self._proof = proof
        self._files = files
        self._failure: DflashError | None = None
        self._is_end_said = False
        self._program: Program | None = None

    @property
    def counted(self) -> Counted | None:
        """The program's last counters, None where it has sent none."""
        return self._supervisor.counted

    @property
    def was_asked(self) -> bool:
        """Whether the program has taken the workers."""
        return self._supervisor.is_connected

    def to_end(self, command: Sequence[str], environ: Mapping[str, str], closing: ExitStack) -> int:
        """Starts the program, waits for its end and returns its exit code. `closing` then ends what
        was made for it.
        """
        socket = HandoverSocket()
        closing.callback(socket.close)
        self._program = Program(command, {**environ, **socket.environment()}, inherited=[socket.token_fd])
        closing.callback(self._program.close)
        with self._program.signals_passed_on():
            socket.expect(self._program.pid)
            self._supervisor.start(socket)
            closing.callback(self._supervisor.close)
            code = self._program.watch(self._look)
            self._supervisor.await_end()
        return code

    def raise_failure(self, code: int) -> None:
        """Raises what was wrong with a run that ended with `code`, if anything was."""
        supervisor = self._supervisor
        is_signalled = self._program is not None and self._program.is_signalled
        if self._failure is None and not supervisor.is_ready and not is_signalled:
            # The program may have ended by itself before the next look.
            self._failure = supervisor.failure
        if self._failure is None and code == 0 and (verdict := self._proof.judge_end(self._sight())):
            self._failure = DflashError(verdict)
        if self._failure is not None:
            raise self._failure

    def _sight(self) -> Sighting:
        is_mapped = is_open = False
        if not self._proof.is_settled and self._program is not None:
            is_mapped, is_open = self._files.look(self._program.pid)
        calls = self.counted.calls if self.counted is not None else 0
        return Sighting(is_mapped, is_open, self.was_asked, self._supervisor.reasons, calls)

    def _look(self) -> str:
        """Returns why the program must be ended, empty as long as it may go on."""
        failure = self._supervisor.failure
        if failure is not None and not self._supervisor.is_ready:
            self._failure = failure
        elif failure is not None and not self._is_end_said:
            self._is_end_said = True
            options.say(f"the hand-over has ended, and calls fail from now on: {failure}")
        seen = self._sight()
        if self._failure is None and (verdict := self._proof.judge(seen)):
            self._failure = DflashError(verdict)
        if warning := self._proof.warn(seen):
            options.say(warning)
        return str(self._failure) if self._failure is not None else ""


def not_asked(code: int, *, is_ours_loaded: bool) -> str:
    """Returns the line on a program that may have done something else than to load the model."""
    hint = (
        "is the plug-in built for this llama.cpp (make ggml LLAMA_CPP=DIR)?"
        if is_ours_loaded
        else "a program that calls the C interface takes them over with dflash_moe_open"
    )
    return (
        f"the program has ended with exit code {code} and has not asked for the workers; what it "
        f"computed, it computed by itself; {hint}"
    )


def _say_log(text: str) -> str:
    """Says what a worker's error quotes of its log, and returns the error's sentence."""
    sentence, *log = [line.rstrip() for line in text.splitlines() if line.strip()]
    for line in log:
        options.say(f"  {line}")
    return sentence.removesuffix("; last lines of its log:")


def _say_lost(name: str, text: str) -> None:
    options.say(f"{_say_log(text)}; calls that need worker {name} fail until it is back")


def _say_unfit(name: str, text: str) -> None:
    options.say(f"worker {name} is there again and cannot be taken: {_say_log(text)}")


def _say_left_alone(name: str, text: str) -> None:
    options.say(f"worker {name} is not started again: {_say_log(text)}; calls that need it fail from now on")
