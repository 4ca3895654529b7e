"""`bench decode` measures what one more token costs: for each mode and dtype, and with all experts
local, the latency of every token, and the calls and bytes for each.

It also counts the bytes that a token reads at the host and at each worker, and says how much of its
time reading them would take with the speed that the same threads have alone.

Rounds interleave the cases. Each starts from the same short prompt, so that every round decodes the
same tokens.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dflash_moe.bench.forward import COUNTED, Sample, measure_once, random_prompt
from dflash_moe.bench.harness import Recorder, run_rounds
from dflash_moe.bench.model_host import LOCAL, MeasuredHost, describe_topology, open_hosts
from dflash_moe.bench.read_speed import ReadSpeed
from dflash_moe.bench.results import BenchResult, described, percentile, timing_fields
from dflash_moe.bench.token_reads import count_reads, read_fields
from dflash_moe.topology import Topology


@dataclass(frozen=True, slots=True)
class DecodeParams:
    """What is measured: `new_tokens` are decoded and timed in each of `repeat` rounds, after a
    prompt of `prompt_tokens` random ids.
    """

    model: Path
    prompt_tokens: int = 32
    new_tokens: int = 32
    modes: tuple[str, ...] = ("stream", "batched", "auto")
    dtypes: tuple[str, ...] = ()
    repeat: int = 5
    with_local: bool = True
    seed: int = 0


@dataclass(slots=True)
class DecodeCase:
    """One (mode, dtype) on one host: a `harness.Case`."""

    host: MeasuredHost
    mode: str
    dtype: str
    input_ids: Any
    new_tokens: int
    # The read speeds of this run by their number of threads.
    speeds: dict[int, ReadSpeed]
    rounds: int | None = None
    samples: list[Sample] = field(default_factory=list)
    # What each side reads for a token, counted in the warm-up.
    reads: dict[str, float] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """The name of the case in reports of progress."""
        return f"{self.mode} {self.dtype}"

    def measure(self, *, keep: bool) -> None:
        """Makes a prefill that is not timed, and then the tokens that are. The warm-up counts what
        they read.
        """
        runtime = self.host.runtime
        runtime.set_mode("batched" if self.mode == LOCAL else self.mode, dtype=self.dtype, reply_dtype=self.dtype)
        sample = measure_once(self.host.model, runtime, self.input_ids, self.new_tokens)
        if keep:
            self.samples.append(sample)
        else:
            self.reads = count_reads(self.host.model, runtime, self.input_ids, self.new_tokens, self.host.sides)

    def row(self) -> dict[str, Any] | None:
        """Returns the result row. Counts are those of one round, and times those of every token of
        all rounds.
        """
        if not self.samples:
            return None
        last = self.samples[-1]
        token_s = [seconds for sample in self.samples for seconds in sample.token_s]
        moved = last.decode["request_bytes"] + last.decode["reply_bytes"]
        return {
            "name": self.mode,
            "mode": self.mode,
            "dtype": self.dtype,
            "prompt_tokens": last.prompt_tokens,
            "new_tokens": self.new_tokens,
            **timing_fields(token_s, per_round=self.new_tokens),
            "p50_s": percentile(token_s, 0.50),
            "p99_s": percentile(token_s, 0.99),
            "tokens_per_s": len(token_s) / sum(token_s),
            **last.decode,
            **{f"{key}_per_token": last.decode[key] / self.new_tokens for key in COUNTED},
            "wire_efficiency": last.decode["floor_bytes"] / moved if moved else None,
            **read_fields(self.reads, self.host.sides, self.speeds, percentile(token_s, 0.50)),
            "tokens_digests": sorted({hashlib.sha256(repr(sample.token_ids).encode()).hexdigest() for sample in self.samples}),
        }


def run_decode(
    params: DecodeParams,
    topology: Topology,
    *,
    recorder: Recorder,
    overrides: Mapping[str, Any],
) -> BenchResult:
    """Measures a row for each dtype and mode, and `local` after the modes of its dtype. Errors are
    those of `run_prefill`.
    """
    result = recorder.begin("decode", described(params, "with_local"))
    result.params |= describe_topology(topology, overrides, recorder)
    with (
        recorder.recording(),
        open_hosts(params.model, topology, overrides, recorder, with_local=params.with_local) as (remote, local),
    ):
        input_ids = random_prompt(remote.model, params.prompt_tokens, params.seed)
        opened = [host for host in (remote, local) if host is not None]
        counts = sorted({threads for host in opened for threads in host.sides.threads.values() if threads is not None})
        speeds = {threads: ReadSpeed(threads) for threads in counts}
        cases = []
        for dtype in params.dtypes or (remote.runtime.spec.dtype,):
            cases += [DecodeCase(remote, mode, dtype, input_ids, params.new_tokens, speeds) for mode in params.modes]
            if local is not None:
                cases.append(DecodeCase(local, LOCAL, dtype, input_ids, params.new_tokens, speeds))
        run_rounds(recorder, [*speeds.values(), *cases], rounds=params.repeat)
    return result
