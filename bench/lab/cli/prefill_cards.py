"""`python -m bench.lab prefill-cards`: options and table; bench/lab/prefill_cards.py measures.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from dflash_moe.cli import options
from dflash_moe.cli.bench.run import JsonOption, measuring
from dflash_moe.errors import ConfigError, DflashError

if TYPE_CHECKING:
    from dflash_moe.bench.results import BenchResult

BACKENDS = ("auto", "cuda", "hip", "sim")
MODES = ("stream", "batched", "auto")
# The prompt and the answer of the table that this project began with, in tokens.
PROMPT_TOKENS, NEW_TOKENS = 4248, 128
MAX_PROMPT_TOKENS = 1 << 20
MIB = 1 << 20


@options.with_settings()
def prefill_cards(
    model: options.ModelOption,
    backend: Annotated[
        str, typer.Option(help=f"Whose cards: {', '.join(BACKENDS)}; auto takes all real ones, sim simulated ones.")
    ] = "auto",
    prompt_tokens: Annotated[
        int, typer.Option(min=1, max=MAX_PROMPT_TOKENS, help="Length of the random prompt, in tokens.")
    ] = PROMPT_TOKENS,
    new_tokens: Annotated[int, typer.Option(min=0, help="Tokens decoded after the prefill.")] = NEW_TOKENS,
    repeat: Annotated[int, typer.Option(min=1, help="Measured rounds; the modes are interleaved in each.")] = 3,
    json_out: JsonOption = None,
    **overrides: Any,
) -> None:
    """Prefill over every pair of this machine's cards in every mode: the model runs on one, the
    other holds experts beside it.

    With three cards or more there is one topology of all. Exit code 1 where a mode gave other bits.
    """
    from bench.lab.prefill_cards import run_prefill_cards
    from dflash_moe.bench.prefill import PrefillParams

    if backend not in BACKENDS:
        raise ConfigError(f"--backend {backend!r} is not allowed; allowed: {', '.join(BACKENDS)}")
    for taken in ("mode", "dtype", "reply_dtype"):
        if overrides.get(taken) is not None:
            raise ConfigError(f"--{taken.replace('_', '-')}: prefill-cards measures every mode in the model's own dtype")
    params = PrefillParams(options.model_directory(model), (prompt_tokens,), new_tokens, MODES, repeat=repeat, with_local=False)
    with measuring(json_out, show) as recorder:
        result = run_prefill_cards(params, backend, recorder=recorder, overrides=overrides)
    if any(differing := differing_pairs(result)):
        raise DflashError(f"prefill-cards: the modes gave other bits over {', '.join(differing)}; see the digests")


def differing_pairs(result: BenchResult) -> list[str]:
    """Returns the pairs of cards whose modes did not all compute the same bits."""
    digests: dict[str, set[str]] = {}
    for row in result.rows:
        digests.setdefault(row["cards"], set()).update(row["digests"])
    return [cards for cards, found in digests.items() if len(found) > 1]


def show(result: BenchResult) -> None:
    """Prints a line for each pair of cards and mode."""
    heads = ("prefill s", "tokens/s", "calls", "payload MiB", "decode tokens/s")
    table = options.Table("model on > experts on", "mode", *heads)
    for row in result.rows:
        table.add_row(
            row["cards"],
            row["mode"],
            f"{row['median_s']:.3f}",
            f"{row['tokens_per_s']:.0f}",
            f"{row['calls']:,}",
            f"{(row['request_bytes'] + row['reply_bytes']) / MIB:.3f}",
            f"{row['decode_tokens_per_s']:.1f}" if "decode_tokens_per_s" in row else "-",
        )
    options.show(table)
