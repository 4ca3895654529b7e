"""`dflash-moe demo`: two CPU workers, a completed sentence, what the modes cost near and far, and
the proof that no mode changes a bit.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from dflash_moe.cli import options
from dflash_moe.cli.bench.tables import MIB
from dflash_moe.cli.model_path import find_assets
from dflash_moe.errors import DflashError
from dflash_moe.topology import HostSpec, Topology
from dflash_moe.topology.spec import Emulate

if TYPE_CHECKING:
    from dflash_moe.bench.prefill import Series
    from dflash_moe.experts.expert_runtime import ExpertRuntime
    from dflash_moe.forward.host_model import HostModel

PROMPT = "Return a list of"
# The prompt of the prefill table has at least so many tokens.
MIN_PROMPT_TOKENS = 2000
MODES = ("stream", "batched", "auto")
DTYPES = ("f32", "bf16")
NEW_TOKENS = 48
DECODE_TOKENS = 8
ROUNDS = 5
NETWORK_DELAY_MS, NETWORK_MBIT_S = 0.5, 200.0
NEAR = "on this machine, over shared memory"
FAR = f"behind a network of {NETWORK_MBIT_S:g} Mbit/s, {NETWORK_DELAY_MS:g} ms each way (emulated)"


def demo_topology() -> Topology:
    """Returns two local workers and a host whose torch has one thread: with a model so small,
    several threads of torch wait for each other longer than they compute (docs/benchmarks.md).
    bench/settings/demo/topology.yaml is the same as a file.
    """
    return dataclasses.replace(Topology.local(num_workers=2), host=HostSpec(threads=1))


def network_topology() -> Topology:
    """Returns the same workers behind an emulated network, where it pays to send much at once and
    in few bytes.
    """
    slow = Emulate(delay_ms=NETWORK_DELAY_MS, mbit_s=NETWORK_MBIT_S)
    near = demo_topology()
    return dataclasses.replace(near, workers=tuple(dataclasses.replace(worker, emulate=slow) for worker in near.workers))


def demo() -> None:
    """Start two workers, complete a sentence, show what the modes cost near and far, and check that
    every mode gave the same bits.
    """
    assets = find_assets()
    options.prepare_host(demo_topology())
    places = {NEAR: demo_topology(), FAR: network_topology()}
    measured = {}
    for place, topology in places.items():
        with _started(topology, assets / "model", place) as (host, runtime):
            if place == NEAR:
                _complete(host, assets / "model")
            measured[place] = _measure(host, runtime, assets)
    rows = {place: [one.row() for one in series] for place, series in measured.items()}
    print_places(rows)
    _check_bits([one for series in measured.values() for one in series])
    typer.echo(f"Every mode gave the same bits in every layer, in both places, for each wire dtype ({', '.join(DTYPES)}).")


@contextmanager
def _started(topology: Topology, model: Path, place: str) -> Iterator[tuple[HostModel, ExpertRuntime]]:
    from dflash_moe.experts.expert_runtime import ExpertRuntime
    from dflash_moe.forward.host_model import open_host

    options.say(f"starting two CPU workers: {place}")
    with ExpertRuntime.start(topology, model=model, transport="shared") as runtime:
        yield open_host(model, runtime), runtime


def print_places(rows: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
    """Prints what every mode cost in each place, beside streaming float32 there, how `auto` did
    beside the better fixed mode, and what the columns mean.
    """
    from dflash_moe.bench.mode_summary import round_ratios, summarise

    tokens = next(iter(rows.values()))[0]["prompt_tokens"]
    typer.echo(
        f"Prefill of {tokens:,} tokens. Two workers compute the experts of every layer, the host the rest. stream sends slices "
        "of four\ntokens, batched all tokens of a layer at once, auto slices of the size that it measures to be quickest; bf16 "
        f"halves the\nbytes. Times are medians of {ROUNDS} rounds; how much quicker one is than another is the median of the "
        "rounds' ratios,\nbecause what disturbs a round disturbs all of it.\n"
    )
    for place, of_place in rows.items():
        typer.echo(place)
        heads = ("prefill s", "tokens/s", "calls", "MiB out", "MiB back", "against stream f32")
        table = options.Table("mode", "dtype", *heads)
        slowest = next(row["samples_s"] for row in of_place if (row["mode"], row["dtype"]) == ("stream", "f32"))
        for row in of_place:
            sizes = (f"{row[key] / MIB:.2f}" for key in ("request_bytes", "reply_bytes"))
            speeds = (f"{row['median_s']:.3f}", f"{row['tokens_per_s']:.0f}", f"{row['calls']:,}")
            quicker = statistics.median(round_ratios(slowest, row["samples_s"]))
            table.add_row(row["mode"], row["dtype"], *speeds, *sizes, f"{quicker:.2f}x")
        options.show(table)
        judged = (f"{one['median_ratio']:.2f}x {one['better_fixed']} ({one['dtype']})" for one in summarise(of_place))
        typer.echo(f"Beside the better fixed mode, auto is as quick as this: {', '.join(judged)}\n")


def _complete(host: HostModel, directory: Path) -> None:
    from dflash_moe.engine.generation import generate_tokens
    from dflash_moe.integrations.generation import TextStream, stop_token_ids
    from dflash_moe.integrations.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(directory)
    input_ids = tokenizer(PROMPT)["input_ids"]
    stream = TextStream(tokenizer)
    typer.echo(f"prompt: {PROMPT}\ncompletion: ", nl=False)
    stops = stop_token_ids(host.model, tokenizer)
    for step in generate_tokens(host, input_ids, max_new_tokens=NEW_TOKENS, stop_token_ids=stops):
        typer.echo(stream.push(step.token_id), nl=False)
    typer.echo(stream.finish() + "\n")


def _measure(host: HostModel, runtime: ExpertRuntime, assets: Path) -> list[Series]:
    from dflash_moe.bench.prefill import Series, measure_round
    from dflash_moe.integrations.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(assets / "model")
    input_ids = tokenizer((assets / "prompt.txt").read_text(encoding="utf-8"), return_tensors="pt")["input_ids"]
    if input_ids.shape[1] < MIN_PROMPT_TOKENS:
        raise DflashError(f"prompt.txt gives {input_ids.shape[1]} tokens; the demo needs at least {MIN_PROMPT_TOKENS}")
    options.say(f"prefill of {input_ids.shape[1]:,} tokens from prompt.txt in every mode, {ROUNDS} rounds after a warm-up")
    series = [Series(mode, dtype) for dtype in DTYPES for mode in MODES]
    # The engine learns from the steps of all modes whether halves pay, the client from all calls
    # what slices cost. `auto` then has to have used both, as it has after a few chunks of any run.
    measure_round(host, runtime, input_ids, series, DECODE_TOKENS, keep=False)
    learning = [one for one in series if one.mode == "auto"]
    measure_round(host, runtime, input_ids, learning, DECODE_TOKENS, keep=False)
    for _ in range(ROUNDS):
        measure_round(host, runtime, input_ids, series, DECODE_TOKENS)
    return series


def _check_bits(series: list[Series]) -> None:
    """Checks that all digests are equal. Equal digests mean equal bits in the KV cache of every
    layer and in the last logits.
    """
    for dtype in DTYPES:
        digests = {one.mode: {sample.digest for sample in one.samples} for one in series if one.dtype == dtype}
        if len(set().union(*digests.values())) != 1:
            raise DflashError(f"the modes do not agree for wire dtype {dtype}: {digests}; this is a bug, please report it")
