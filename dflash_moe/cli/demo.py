"""`dflash-moe demo`: two CPU workers, a completed sentence, the prefill table, and the proof that
no mode changes a bit.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import dataclasses
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from dflash_moe.cli import options
from dflash_moe.cli.bench_tables import print_prefill, print_processes
from dflash_moe.errors import ConfigError, DflashError
from dflash_moe.topology import HostSpec, Topology

if TYPE_CHECKING:
    from dflash_moe.bench.prefill import Series
    from dflash_moe.engine.host_model import HostModel
    from dflash_moe.runtime.expert_runtime import ExpertRuntime

# This package of bench/demo_model holds the model and the prompt.
ASSETS = "dflash_moe_demo"
PROMPT = "Return a list of"
# The prompt of the prefill table has at least so many tokens.
MIN_PROMPT_TOKENS = 2000
MODES = ("stream", "batched", "auto")
DTYPES = ("f32", "bf16")
NEW_TOKENS = 48
DECODE_TOKENS = 8


def register(app: typer.Typer) -> None:
    app.command(name="demo")(demo)


def demo_topology() -> Topology:
    """Returns two local workers and a host whose torch has one thread: with a model so small,
    several threads of torch wait for each other longer than they compute (docs/benchmarks.md).
    bench/settings/demo/topology.yaml is the same as a file.
    """
    return dataclasses.replace(Topology.local(num_workers=2), host=HostSpec(threads=1))


def demo() -> None:
    """Start two workers, complete a sentence, show the modes, and check that every mode gave the
    same bits.
    """
    assets = find_assets()
    topology = demo_topology()
    options.prepare_host(topology)
    from dflash_moe.bench.prefill import resident_memory
    from dflash_moe.engine.host_model import open_host
    from dflash_moe.runtime.expert_runtime import ExpertRuntime

    options.say("starting two CPU workers over shared memory")
    with ExpertRuntime.start(topology, model=assets / "model", transport="shared") as runtime:
        host = open_host(assets / "model", runtime)
        print_processes(resident_memory(runtime))
        _complete(host, assets / "model")
        series = _measure(host, runtime, assets)
    print_prefill([one.row() for one in series])
    _check_bits(series)
    typer.echo(f"Every mode gave the same bits in every layer, for each wire dtype ({', '.join(DTYPES)}).")


def find_assets() -> Path:
    """Returns the folder with `model/` and `prompt.txt`. Raises ConfigError that says what to
    install, because the package of a worker goes without.
    """
    try:
        return Path(str(resources.files(ASSETS)))
    except ModuleNotFoundError:
        raise ConfigError(
            "the demo's model is not installed: it is a package of its own, dflash-moe-demo; in the source tree run `make`, or "
            "`pip install ./bench/demo_model`"
        ) from None


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
    options.say(f"prefill of {input_ids.shape[1]:,} tokens from prompt.txt in every mode")
    series = [Series(mode, dtype) for dtype in DTYPES for mode in MODES]
    measure_round(host, runtime, input_ids, series, DECODE_TOKENS, keep=False)
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
