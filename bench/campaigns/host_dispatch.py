"""What the interpreter and the dispatch of operators take of a step, for each layer: models whose
layers are 8 numbers wide, so that operators have next to nothing to compute.

    python -m bench.campaigns.host_dispatch [--rounds 5] [--json bench/results/host_dispatch.json]

Each model has 24 layers with 4 experts, which this process computes with one thread. Steps have one
row, 64 rows of one sequence, or one row of each of 64 sequences. A step is measured whole, and once
more with nothing in the place of the program of its layers, where they are whole layers of ours:
what is left is the interpreter's part. flex_olmo keeps the code of its layers, and only their
modules are ours. About one minute.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import copy
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from bench.campaigns.harness import command_line
from dflash_moe import ExpertRuntime, Topology
from dflash_moe.bench.harness import Recorder, run_rounds
from dflash_moe.bench.results import timing_fields
from dflash_moe.forward.forward import StepRows
from dflash_moe.forward.host_model import open_host

WIDTH = 8
NUM_LAYERS = 24
NUM_EXPERTS = 4
MAX_TOKENS = 8000
# Each case makes so many steps in a round.
STEPS = 20
# Steps as (sequences, rows of each).
STEP_SHAPES = ((1, 1), (1, 64), (64, 1))
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"num_experts": NUM_EXPERTS, "head_dim": WIDTH, "norm_topk_prob": True},
    "deepseek_v3": {
        "n_routed_experts": NUM_EXPERTS, "n_shared_experts": 1, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 0,
        "q_lora_rank": WIDTH, "kv_lora_rank": WIDTH, "qk_rope_head_dim": WIDTH, "qk_nope_head_dim": WIDTH, "v_head_dim": WIDTH,
    },
    "phimoe": {"num_local_experts": NUM_EXPERTS},
    "flex_olmo": {"num_experts": NUM_EXPERTS, "pad_token_id": 0},
}  # fmt: skip


def main() -> int:
    """Does what the module text says, and returns the exit status."""
    parser = command_line(__doc__, "host_dispatch")
    parser.add_argument("--rounds", type=int, default=5, help="measured rounds [5]")
    parser.add_argument("--layers", type=int, default=NUM_LAYERS, help="layers of each model [24]")
    arguments = parser.parse_args()
    recorder = Recorder(arguments.json)
    recorder.begin(
        "host_dispatch", {"width": WIDTH, "layers": arguments.layers, "experts": NUM_EXPERTS, "threads": 1, "steps": STEPS}
    )
    with ExitStack() as opened, recorder.recording():
        folder = Path(opened.enter_context(tempfile.TemporaryDirectory()))
        hosts = {family: opened.enter_context(_open(folder / family, family, arguments.layers)) for family in FAMILIES}
        cases = [
            case
            for family, host in hosts.items()
            for shape in STEP_SHAPES
            for case in _cases(family, host, arguments.layers, *shape)
        ]
        run_rounds(recorder, cases, rounds=arguments.rounds)
    for case in cases:
        row = case.row()
        assert row is not None
        print(f"{row['name']:55} {row['us_per_layer']:7.1f} us a layer")
    return 0


@contextmanager
def _open(path: Path, family: str, num_layers: int) -> Iterator[Any]:
    """Makes a model and opens it as a host does."""
    config = AutoConfig.for_model(
        family, vocab_size=64, hidden_size=WIDTH, intermediate_size=WIDTH, moe_intermediate_size=WIDTH,
        num_hidden_layers=num_layers, num_attention_heads=1, num_key_value_heads=1, num_experts_per_tok=2,
        max_position_embeddings=MAX_TOKENS, tie_word_embeddings=False, **FAMILIES[family],
    )  # fmt: skip
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    for parameter in model.parameters():
        if parameter.ndim >= 2:
            # A layer adds as much as it is given, so that the proofs tell its forms apart.
            torch.nn.init.normal_(parameter, 0.0, WIDTH**-0.5)
    model.save_pretrained(path)
    with ExpertRuntime.start(Topology.local(1, threads=1), model=path) as runtime:
        yield open_host(path, runtime)


@dataclass(slots=True)
class _Case:
    """Steps of `rows` rows of each of `num_sequences` sequences, with the operators of layers or
    without.
    """

    label: str
    fields: dict[str, Any]
    packed: Any
    num_layers: int
    num_sequences: int
    rows: int
    has_operators: bool
    rounds: int | None = None
    samples_s: list[float] = field(default_factory=list)

    def measure(self, *, keep: bool) -> None:
        sequences = [self.packed.admit(MAX_TOKENS) for _ in range(self.num_sequences)]
        step = [StepRows(sequence, [3] * self.rows) for sequence in sequences]
        self.packed.forward(step)
        num_rows = self.num_sequences * self.rows
        with nullcontext() if self.has_operators else _emptied(self.packed, num_rows):
            for _ in range(STEPS):
                begin = time.perf_counter()
                self.packed.forward(step)
                if keep:
                    self.samples_s.append(time.perf_counter() - begin)
        for sequence in sequences:
            sequence.release()

    def row(self) -> dict[str, Any] | None:
        if not self.samples_s:
            return None
        us = statistics.median(self.samples_s) / self.num_layers * 1e6
        return {"name": self.label, **self.fields, "us_per_layer": us} | timing_fields(self.samples_s, per_round=STEPS)


def _cases(family: str, host: Any, num_layers: int, num_sequences: int, rows: int) -> list[_Case]:
    packed = host.packed
    assert packed is not None, host.report.lines()
    is_whole = packed.loop is not None
    fields = {
        "family": family, "layers_are": "whole" if is_whole else "by module", "sequences": num_sequences,
        "rows": num_sequences * rows,
    }  # fmt: skip
    return [
        _Case(
            f"{family}, {num_sequences} x {rows} rows{'' if has_operators else ', no operators'}",
            {**fields, "part": "all" if has_operators else "interpreter"},
            packed, num_layers, num_sequences, rows, has_operators,
        )
        for has_operators in ((True, False) if is_whole else (True,))
    ]  # fmt: skip


@contextmanager
def _emptied(packed: Any, num_rows: int) -> Iterator[None]:
    """Opens a block in which programs do nothing for so many rows, which are few enough that their
    buffers are kept.
    """
    programs = packed.buffers.of(num_rows).programs
    kept = dict(programs)
    try:
        for loop, program in kept.items():
            calls = copy.copy(program.calls)
            calls.core = _Nothing(calls.core)
            programs[loop] = copy.copy(program)
            programs[loop].calls = calls
        yield
    finally:
        programs.update(kept)


class _Nothing:
    """Stands for a program of the core, and computes nothing."""

    def __init__(self, core: Any) -> None:
        self.num_calls = core.num_calls

    def run(self, *_arguments: object) -> tuple[float, float]:
        """Returns that nothing was awaited."""
        return 0.0, 0.0


if __name__ == "__main__":
    raise SystemExit(main())
