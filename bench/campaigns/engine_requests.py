"""Requests of random lengths through one engine, with cancels, preemptions, forks and shared
beginnings, over a tenth of the blocks that they want: all end, with the tokens that each gets
alone, no block is lost, and memory does not grow.

    python -m bench.campaigns.engine_requests [--requests 10000] [--full] [--outstanding 64]
        [--seed 0] [--json bench/results/engine_requests.json]

The model is a tiny random Qwen3-MoE, whose experts the host keeps. A thread for each outstanding
request submits it, takes its tokens and may cancel it. Afterwards every 20th request, with --full
each, is computed again with nothing beside it over another copy of the model: by the plain loop
where the most likely tokens are asked for, else by an engine alone. What a cancelled one got must
be the beginning of that. Exit status 1 where something is not as it must be.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from bench.campaigns.harness import command_line
from bench.requests.clients import Load, Outcome, run_request
from bench.requests.drawn import CHOICES, Drawn, draw, wanted_blocks
from bench.requests.equality import Equality, keep_in, kept_in
from bench.requests.verdict import memory_row, requests_row, shown_line, summarise
from dflash_moe.bench.harness import Recorder
from dflash_moe.cli import options
from dflash_moe.config import BLOCK_TOKENS
from dflash_moe.telemetry.machine import usable_cores
from dflash_moe.topology import Topology

NUM_LAYERS = 2
SIZES = {"hidden_size": 64, "num_experts": 8, "top_k": 2, "moe_intermediate_size": 32}
# The pool has this share of the blocks that outstanding requests want.
POOL_SHARE = 0.1
# A prompt takes up to three steps beside the tokens of those that decode.
MAX_BATCH_TOKENS = 64
CHECKED_EVERY = 20
OUTCOMES = "outcomes"
# Counts of Engine.stats() that a run must have made.
STATS = ("preemptions", "recomputed_tokens", "cached_tokens")


def main() -> int:
    """Does what the module text says, and returns the exit status."""
    given = _arguments()
    options.prepare_host(Topology.parse(_topology()))  # before torch is imported
    wanted = wanted_blocks((draw(number, given.seed) for number in range(given.requests)), given.outstanding, BLOCK_TOKENS)
    largest = max(draw(number, given.seed).num_blocks(BLOCK_TOKENS) for number in range(given.requests))
    num_blocks = round(POOL_SHARE * wanted)
    if num_blocks < largest:
        raise SystemExit(f"a tenth of {wanted} blocks is less than one request takes, {largest}; raise --outstanding")
    recorder = Recorder(given.json)
    params = {"requests": given.requests, "outstanding": given.outstanding, "seed": given.seed, "full": given.full}
    shape = {"layers": NUM_LAYERS, **SIZES, "max_batch_tokens": MAX_BATCH_TOKENS}
    result = recorder.begin("engine_requests", params | shape, interleaved=False)
    with tempfile.TemporaryDirectory() as scratch, recorder.recording():
        folder = Path(scratch)
        _make_model(folder / "model")
        load, blocks, stats = _run(given, folder, num_blocks)
        result.rows += [requests_row(load, wanted, num_blocks, stats), memory_row(load), {"name": "blocks", **blocks}]
        recorder.save()
        loop, engine = _checked(given, folder)
        result.rows += [loop.row("alone in the plain loop"), engine.row("alone in an engine")]
        result.summary = summarise(load, (loop, engine), blocks, stats)
    for line in result.summary:
        print(shown_line(line))
    return 0 if all(line["met"] for line in result.summary) else 1


def _run(given: argparse.Namespace, folder: Path, num_blocks: int) -> tuple[Load, dict[str, Any], dict[str, int]]:
    """Runs all requests and writes the outcomes to compare into the folder. Returns the load, what
    became of the blocks, and the counts that must have happened.
    """
    with _host(folder / "model", _kv_bytes(folder / "model", num_blocks)) as host:
        pool = host.packed.blocks
        if pool.num_blocks != num_blocks:
            raise SystemExit(f"the pool has {pool.num_blocks} blocks, and was to have {num_blocks}")
        with (
            (folder / OUTCOMES).open("w", encoding="utf-8") as file,
            closing(_engine(host.packed, given.outstanding, prefix_cache=True)) as engine,
        ):
            # A name that is not there is found now, and not after all requests.
            _counts(engine)
            load = Load(
                engine, lambda number: draw(number, given.seed), _params, given.requests,
                lambda number: given.full or number % CHECKED_EVERY == 0, keep_in(file), options.say,
            )  # fmt: skip
            load.run(given.outstanding)
            stats, error = _counts(engine), _error_of(engine.check_integrity)
        # Nobody has a table any more.
        error = error or _error_of(lambda: pool.check_integrity(()))
        return load, {"num_blocks": pool.num_blocks, "num_free": pool.num_free, "error": error}, stats


def _checked(given: argparse.Namespace, folder: Path) -> tuple[Equality, Equality]:
    """Computes the kept requests alone and returns what the plain loop and an engine say."""
    from dflash_moe.engine.generation import generate_tokens

    def kept(*, is_plain: bool) -> Iterator[Outcome]:
        return (one for one in kept_in(folder / OUTCOMES) if draw(one.number, given.seed).is_plain == is_plain)

    def in_loop(drawn: Drawn) -> Outcome:
        steps = generate_tokens(host, drawn.prompt_ids, max_new_tokens=drawn.max_tokens)
        return Outcome(drawn.number, (tuple(step.token_id for step in steps),), ("length",))

    def in_engine(drawn: Drawn) -> Outcome:
        return run_request(engine, _params(drawn), Drawn(drawn.number, drawn.prompt_ids, drawn.sampling))

    by_loop, by_engine = Equality(), Equality()
    with _host(folder / "model") as host:
        options.say("computing requests alone")
        by_loop.compare(kept(is_plain=True), lambda number: draw(number, given.seed), in_loop)
        # The engine has the model to itself from here on.
        with closing(_engine(host.packed, 1, prefix_cache=False)) as engine:
            by_engine.compare(kept(is_plain=False), lambda number: draw(number, given.seed), in_engine)
    return by_loop, by_engine


def _engine(forward: Any, max_requests: int, *, prefix_cache: bool) -> Any:
    from dflash_moe.engine.engine import Engine
    from dflash_moe.engine.engine_settings import EngineSettings

    # Each choice of a request waits for itself.
    settings = EngineSettings(
        max_batch_tokens=MAX_BATCH_TOKENS, max_requests=max_requests, max_queue=max_requests * max(CHOICES),
        prefix_cache=prefix_cache, speculate="off",
    )  # fmt: skip
    return Engine(forward, settings)


def _params(drawn: Drawn) -> Any:
    from dflash_moe.engine.sampling.sampling_params import SamplingParams

    return SamplingParams(**drawn.sampling)


def _counts(engine: Any) -> dict[str, int]:
    found = engine.stats()
    return {name: int(found[name]) for name in STATS}


def _error_of(check: Callable[[], None]) -> str:
    from dflash_moe.errors import DflashError

    try:
        check()
    except DflashError as error:
        return str(error)
    return ""


@contextmanager
def _host(model: Path, kv_bytes: int | None = None) -> Iterator[Any]:
    """Opens the model with its experts in this process. Without `kv_bytes` its pool is as large as
    by default.
    """
    from dflash_moe import ExpertRuntime
    from dflash_moe.forward.host_model import open_host

    with ExpertRuntime.start(Topology.parse(_topology(kv_bytes)), model=model) as runtime:
        host = open_host(model, runtime)
        if host.packed is None:
            raise SystemExit(f"the model is not paged: {host.report.not_paged}")
        yield host


def _topology(kv_bytes: int | None = None) -> str:
    threads = min(2, usable_cores())
    engine = "" if kv_bytes is None else f"engine: {{kv_memory: {kv_bytes}}}\n"
    # Where the host holds all experts, the worker that a topology must have is not started.
    host = f"host: {{threads: {threads}, experts: {{memory: 100%}}}}\n"
    return f"version: 1\n{host}{engine}workers:\n  - {{name: w0, backend: cpu, threads: 1}}\n"


def _make_model(directory: Path) -> None:
    from dflash_moe.model.make import MakeOptions, make_checkpoint

    make_checkpoint(MakeOptions("qwen3_moe", num_layers=NUM_LAYERS, dtype="bf16", seed=0, **SIZES), directory)


def _kv_bytes(model: Path, num_blocks: int) -> int:
    """Returns the bytes of keys and values of so many blocks in all layers."""
    from dflash_moe.forward.kv_budget import KvShape, block_bytes
    from dflash_moe.model.architecture import load_config
    from dflash_moe.model.checkpoint import Checkpoint

    config = load_config(Checkpoint.open(model))
    # Not every configuration of this family states it.
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    shape = KvShape(config.num_key_value_heads, head_dim, head_dim)
    return num_blocks * block_bytes([shape] * NUM_LAYERS, "bf16")


def _arguments() -> argparse.Namespace:
    parser = command_line(__doc__, "engine_requests")
    parser.add_argument("--requests", type=int, default=10_000, help="[%(default)s]")
    parser.add_argument("--full", action="store_true", help="compare every request, and not every 20th")
    parser.add_argument("--outstanding", type=int, default=64, help="requests at once [%(default)s]")
    parser.add_argument("--seed", type=int, default=0, help="of the requests that are drawn [%(default)s]")
    return parser.parse_args()


if __name__ == "__main__":
    raise SystemExit(main())
