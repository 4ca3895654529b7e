"""The options that say how tokens are chosen, which commands that write text share.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import re
from typing import Any

import typer

from dflash_moe.cli.help_page import FORMER_NAMES, SAMPLING
from dflash_moe.cli.options import MAX_SEED
from dflash_moe.engine.sampling.sampling_params import MAX_TEMPERATURE, SamplingParams
from dflash_moe.errors import ConfigError


def max_tokens(of: str) -> Any:
    """Returns the option of a bound on new tokens. `of` says of what."""
    names = ("-n", "--max-tokens", *FORMER_NAMES)
    return typer.Option(*names, min=1, metavar="N", help=f"Tokens to generate at most: per {of}.", rich_help_panel=SAMPLING)


def temperature(default: str = "") -> Any:
    """Returns the option. `default` says what holds without it where that is no fixed number; so do
    those of the next ones.
    """
    return _number("0 takes the most likely token: higher is more random", default, "X", min=0.0, max=MAX_TEMPERATURE)


def top_p(default: str = "") -> Any:
    """Returns the option."""
    return _number("Only the likeliest tokens that have this probability: together, a fraction above 0 to 1", default, "X")


def top_k(default: str = "") -> Any:
    """Returns the option."""
    return _number("Only so many likeliest tokens: 0 for all", default, "N")


def min_p(default: str = "") -> Any:
    """Returns the option."""
    return _number("Only tokens at least so likely: a fraction of the likeliest one's probability, 0 to below 1", default, "X")


STOP = typer.Option(
    metavar="TEXT", help="Ends before this text: may be repeated [default: none].", show_default=False, rich_help_panel=SAMPLING
)
SEED = typer.Option(
    min=0, max=MAX_SEED, metavar="N", help="Seed of the sampling: without effect at temperature 0.", rich_help_panel=SAMPLING
)


def sampling_params(**fields: Any) -> SamplingParams:
    """Returns the parameters that the flags give. A refusal names the flag."""
    try:
        return SamplingParams(**fields)
    except ConfigError as error:
        flagged = re.sub(r"^\w+", lambda name: f"--{name[0].replace('_', '-')}", str(error))
        raise ConfigError(flagged) from None


def _number(text: str, default: str, metavar: str, **bounds: Any) -> Any:
    options = bounds | {"metavar": metavar, "rich_help_panel": SAMPLING}
    if default:
        return typer.Option(help=f"{text} [default: {default}].", show_default=False, **options)
    return typer.Option(help=f"{text}.", **options)
