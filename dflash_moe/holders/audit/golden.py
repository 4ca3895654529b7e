"""Rows that every worker computes when it joins, before a call may reach it: whoever computes them
otherwise than the host or another holder is kept out.

A content checksum proves that a worker has loaded the right bytes. A golden row proves that its
processor or card, its kernels and its driver make the right numbers of them.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dflash_moe.errors import WorkerUnfit
from dflash_moe.holders.audit.row_questions import RowQuestion, difference, drawn_rows

if TYPE_CHECKING:
    from dflash_moe.holders.audit.host_twin import HostTwin
    from dflash_moe.placement.held_shards import HeldShard

log = logging.getLogger(__name__)

# The host computes golden rows anew as long as the weights of their experts have so many bytes in
# all. It loads 0.5 to 1 GB/s for that, with one thread, so that this takes half a second at most,
# while workers compute theirs. What is left is computed by the audit, within its budget.
HOST_BYTES = 256 << 20
# A worker that was outvoted is asked for a row of every expert, up to so many bytes.
THOROUGH_BYTES = 4 << 30
HOST = "this host"

# Asks a holder by its name for a row; None where its version cannot be asked.
AskRow = Callable[[str, "HeldShard", RowQuestion], "bytes | None"]


@dataclass(frozen=True, slots=True)
class Answer:
    """What a row of a shard comes to, and who says so."""

    reply: bytes
    source: str


@dataclass(frozen=True, slots=True)
class Unproven:
    """A golden row that was taken from its first holder, and that nobody else has computed yet."""

    held: HeldShard
    question: RowQuestion
    reply: bytes
    holder: str


class GoldenRows:
    """The golden rows of one runtime and what they come to. Holders join in parallel, each from a
    thread of its own.
    """

    def __init__(self, twin: HostTwin, ask: AskRow) -> None:
        self._twin = twin
        self._ask = ask
        self._lock = threading.Lock()
        # Held while the host computes a row, so that holders of one shard wait for it together.
        self._computing_lock = threading.Lock()
        self._known: dict[tuple[int, RowQuestion], Answer] = {}
        self._left_bytes = HOST_BYTES
        # Those that the audit shall compute; any thread may take them.
        self.unproven: deque[Unproven] = deque()
        self.num_compared = 0
        self.num_mismatches = 0

    def check(self, holder: str, shards: Sequence[HeldShard], *, is_thorough: bool = False) -> None:
        """Asks a holder that has loaded its shards for their golden rows, and compares them with
        what the host computes, or where it cannot, with what the first holder has answered.

        Errors: WorkerUnfit naming layer, shard and what differs; those with which it refuses;
        WorkerLost, WorkerTimeout.
        """
        began, num_rows = time.monotonic(), 0
        if is_thorough:
            with self._computing_lock:
                self._left_bytes = THOROUGH_BYTES
        # The host computes a row while the holder computes those behind it.
        with ThreadPoolExecutor(max_workers=1, thread_name_prefix="dflash-golden") as host:
            compared: deque[Future[None]] = deque()
            try:
                for held, question, reply in self._answers(holder, shards, is_thorough=is_thorough):
                    try:
                        compared.append(host.submit(self._compare, holder, held, question, reply))
                    except RuntimeError:  # as many threads as the system allows
                        self._compare(holder, held, question, reply)
                    num_rows += 1
                    while compared and compared[0].done():  # a row that differs ends it
                        compared.popleft().result()
                for one in compared:
                    one.result()
            finally:
                host.shutdown(cancel_futures=True)
        log.info("worker %s: %d golden rows compared in %.0f ms", holder, num_rows, 1000 * (time.monotonic() - began))

    def _answers(
        self, holder: str, shards: Sequence[HeldShard], *, is_thorough: bool
    ) -> Iterator[tuple[HeldShard, RowQuestion, bytes]]:
        """Asks for the rows one after the other, up to one for which the holder's version cannot be
        asked.
        """
        for held in shards:
            for question in drawn_rows(held, is_thorough=is_thorough):
                reply = self._ask(holder, held, question)
                if reply is None:
                    log.info("worker %s: its version takes no golden rows; install the host's version there", holder)
                    return
                yield held, question, reply

    def close(self) -> None:
        """Lets go of the checkpoint's files; never raises."""
        self._twin.close()

    def _compare(self, holder: str, held: HeldShard, question: RowQuestion, reply: bytes) -> None:
        expected = self._expected(holder, held, question, reply)
        if reply != expected.reply and expected.source != HOST:
            expected = self._settled(held, question, expected)
        with self._lock:
            self.num_compared += 1
            self.num_mismatches += reply != expected.reply
        if reply != expected.reply:
            raise WorkerUnfit(
                f"worker {holder}: layer {held.layer.index} ({held.layer.name}), shard {held.shard_id}: "
                f"{difference(held, question, reply, expected.reply)}, as {expected.source} computes it; either a weight of "
                f"its copy of the checkpoint or of that of {expected.source} is damaged, which their sha256sum tells, or its "
                "processor or card, its memory, kernels or driver compute wrongly; none of its answers is used: copy the "
                "checkpoint to the damaged one again, or look at that machine",
                worker=holder,
                layer=held.layer.index,
            )

    def _expected(self, holder: str, held: HeldShard, question: RowQuestion, reply: bytes) -> Answer:
        # The fingerprint covers model, layer, experts, format and class.
        key = held.weights_fingerprint, question
        with self._computing_lock:
            known = self._known.get(key)
            if known is not None:
                return known
            computes = self._twin.computes(held)
            num_bytes = held.layer.expert_bytes * len(question.local_expert_ids)
            computed = None
            if computes and num_bytes <= self._left_bytes:
                self._left_bytes -= num_bytes
                computed = self._twin.compute(held, question)
            if computes and computed is None and not self._twin.failure:
                # It was not to be computed now, or could not be for a while.
                self.unproven.append(Unproven(held, question, reply, holder))
            found = Answer(computed, HOST) if computed is not None else Answer(reply, f"worker {holder}")
            self._known[key] = found
            return found

    def _settled(self, held: HeldShard, question: RowQuestion, known: Answer) -> Answer:
        """Returns which of two holders is right: what the host computes, where it can. The audit
        finds a first holder that was wrong by its unproven row.
        """
        computed = self._twin.compute(held, question) if self._twin.computes(held) else None
        if computed is None:
            return known
        with self._computing_lock:
            self._known[held.weights_fingerprint, question] = Answer(computed, HOST)
        return Answer(computed, HOST)
