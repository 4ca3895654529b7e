"""`dflash-moe bench streaming`: options and tables; the measuring is dflash_moe/bench/streaming/.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dflash_moe.cli import help_page, options
from dflash_moe.cli.bench.run import JsonOption, PlotOption, measuring
from dflash_moe.config import MAX_REQUESTS
from dflash_moe.errors import ConfigError

if TYPE_CHECKING:
    from dflash_moe.bench.results import BenchResult

MAX_TOKENS = 1 << 20
MAX_KEY_FILE_BYTES = 1 << 16
LONGEST_S = 86_400.0


class Api(str, Enum):
    """The two APIs of OpenAI that stream tokens."""

    completions = "completions"
    chat = "chat"


class Arrivals(str, Enum):
    """What an interval is counted from."""

    absolute = "absolute"
    relative = "relative"


def streaming(
    model: Annotated[
        str | None,
        typer.Option(
            "-m",
            "--model",
            metavar="PATH",
            show_default=False,
            rich_help_panel=help_page.MODEL,
            help="A model that is served for the bench, as `dflash-moe serve` takes it [default: none].",
        ),
    ] = None,
    topology: Annotated[
        Path | None,
        typer.Option(
            "--topology",
            metavar="FILE",
            show_default=False,
            rich_help_panel=help_page.PLACEMENT,
            help="YAML file of host and workers for --model [default: fitted to this machine].",
        ),
    ] = None,
    url: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            show_default=False,
            rich_help_panel=help_page.NETWORK,
            help="An OpenAI-compatible server that runs: http://HOST:PORT, with or without /v1 [default: none].",
        ),
    ] = None,
    api_key_file: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            show_default=False,
            rich_help_panel=help_page.NETWORK,
            help="File whose first line is the key for --url [default: none].",
        ),
    ] = None,
    served_model: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            show_default=False,
            rich_help_panel=help_page.NETWORK,
            help="Name of the model in requests [default: the first of /v1/models].",
        ),
    ] = None,
    endpoint: Annotated[
        Api, typer.Option(metavar="completions|chat", help="API that is asked: completions of a text, or chat.")
    ] = Api.completions,
    requests: Annotated[
        int, typer.Option(min=1, max=100_000, metavar="N", help="Number of requests in each round of a row.")
    ] = 16,
    interval: Annotated[
        float,
        typer.Option(
            min=0.0,
            max=LONGEST_S,
            metavar="S",
            help="Seconds between requests: 0 sends the next one as soon as fewer than --concurrency are open.",
        ),
    ] = 0.0,
    schedule: Annotated[
        Arrivals,
        typer.Option(
            metavar="absolute|relative",
            help="What an interval counts from: absolute, request i is due i intervals after the first whatever happens; "
            "relative, one interval after the one before it was sent.",
        ),
    ] = Arrivals.absolute,
    concurrency: Annotated[
        str | None,
        typer.Option(
            metavar="N[,N...]",
            show_default=False,
            help="Number of requests that may be open: of several, a row for each [default: 1,4,16; with --interval no limit].",
        ),
    ] = None,
    prompt_tokens: Annotated[
        int,
        typer.Option(
            min=1,
            max=MAX_TOKENS,
            metavar="N",
            help="Length of each random prompt, in tokens: of words that come near it, exact with --pretok.",
        ),
    ] = 64,
    new_tokens: Annotated[int, typer.Option(min=2, max=MAX_TOKENS, metavar="N", help="Tokens of each answer.")] = 64,
    pretok: Annotated[bool, typer.Option("--pretok", help="Send prompts as token ids, which no server tokenises.")] = False,
    stream_interval: Annotated[
        int, typer.Option(min=1, max=MAX_TOKENS, metavar="N", help="Tokens an event, asked of a server that can do it.")
    ] = 1,
    temperature: Annotated[float, typer.Option(min=0.0, max=2.0, metavar="X", help="Temperature of sampling.")] = 0.0,
    seed: Annotated[
        int, typer.Option(min=0, max=options.MAX_SEED, metavar="N", help="Number from which the prompts are drawn.")
    ] = 0,
    timeout: Annotated[
        float, typer.Option(min=0.1, max=LONGEST_S, metavar="S", help="Seconds that one answer may take: then it has failed.")
    ] = 600.0,
    warmup: Annotated[int, typer.Option(min=0, metavar="N", help="Rounds before the measured ones.")] = 1,
    repeat: Annotated[int, typer.Option(min=1, metavar="N", help="Measured rounds, the rows interleaved in each.")] = 3,
    json_out: JsonOption = None,
    plot: PlotOption = None,
) -> None:
    """A server as its clients see it: first tokens, later ones, queues and lags under a schedule of
    requests; ours with --model, any OpenAI-compatible one with --url.

    Every prompt is new, so that no prefix cache helps. Exits with 1 where a request failed; being
    refused with 429 is counted apart.
    """
    for name, value in (("--interval", interval), ("--timeout", timeout), ("--temperature", temperature)):
        if not math.isfinite(value):
            raise ConfigError(f"{name} {value}: give a number")
    if importlib.util.find_spec("httptools") is None:
        raise ConfigError("httptools is not installed, and this bench needs it: pip install 'dflash-moe[bench]'")

    from dflash_moe.bench.streaming.streaming import CONCURRENCY, StreamingParams, run_streaming

    usual = () if interval else CONCURRENCY
    most = usual if concurrency is None else options.numbers(concurrency, "--concurrency", MAX_REQUESTS)
    params = StreamingParams(
        model=_served_path(model),
        topology=None if topology is None else topology.absolute(),
        url=url,
        api_key=None if api_key_file is None else _key(api_key_file),
        served_model=served_model,
        endpoint=endpoint.value,
        requests=requests,
        interval_s=interval,
        schedule=schedule.value,
        concurrency=most,
        prompt_tokens=prompt_tokens,
        new_tokens=new_tokens,
        is_pretok=pretok,
        stream_interval=stream_interval,
        temperature=temperature,
        seed=seed,
        timeout_s=timeout,
        warmup=warmup,
        repeat=repeat,
    )
    with measuring(json_out, _show, plot) as recorder:
        result = run_streaming(params, recorder=recorder)
    if any(row["failed"] for row in result.rows):
        raise typer.Exit(1)


def _served_path(model: str | None) -> str | None:
    """Checks the path before a server is started for it; the server is given it as it was."""
    if model is not None:
        options.model_directory(model)
    return model


def _key(path: Path) -> str:
    """Returns the first line of a file that is neither empty nor a comment. Raises ConfigError that
    never shows what stands there.
    """
    try:
        with path.open("rb") as file:
            lines = file.read(MAX_KEY_FILE_BYTES).decode("ascii").splitlines()
    except OSError as error:
        raise ConfigError(f"--api-key-file {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        lines = []
    found = next((line.strip() for line in lines if line.strip() and not line.startswith("#")), "")
    if not found or not found.isprintable() or " " in found:
        raise ConfigError(f"--api-key-file {path}: its first line is no key of letters, digits and signs of ASCII")
    return found


def _show(result: BenchResult) -> None:
    print_streaming(result.rows)
    print_costs(result.rows)
    for row in result.rows:
        if row["first_error"]:
            options.say(f"{row['name']}: first error: {row['first_error']}")


def print_streaming(rows: Sequence[Mapping[str, Any]]) -> None:
    """Prints what clients got: p50, p95 and p99 over all requests of all rounds."""
    options.show_rows(
        rows,
        ("row", "{name}"),
        ("tokens/s", "{tokens_per_s:.1f}"),
        ("TTFT ms p50 / p95 / p99", lambda row: _spread(row["ttft_s"])),
        ("TPOT ms", lambda row: _spread(row["tpot_s"])),
        ("ITL ms", lambda row: _spread(row["itl_s"])),
        ("latency ms", lambda row: _spread(row["latency_s"], 0)),
    )


def print_costs(rows: Sequence[Mapping[str, Any]]) -> None:
    """Prints what requests waited for before they were read, what became of them, and the CPU time
    of a token.
    """
    options.show_rows(
        rows,
        ("row", "{name}"),
        ("queue ms p50 / p95 / p99", lambda row: _spread(row["queue_s"])),
        ("submit lag ms", lambda row: _spread(row["submit_lag_s"])),
        ("completed", "{completed}"),
        ("refused", "{refused}"),
        ("failed", "{failed}"),
        ("prompt tokens", "{counted_prompt_tokens:.0f}"),
        ("tokens an event", "{tokens_per_event:.2f}"),
        ("client us/token", "{client_cpu_us_per_token:.0f}"),
        ("server us/token", lambda row: _parts(row["server_cpu_us_per_token"])),
    )


def _spread(seconds: Mapping[str, float] | None, digits: int = 2) -> str:
    return " / ".join(f"{1e3 * seconds[key]:.{digits}f}" for key in ("p50", "p95", "p99")) if seconds else "-"


def _parts(taken: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {value:,.0f}" for name, value in taken.items()) or "-"
