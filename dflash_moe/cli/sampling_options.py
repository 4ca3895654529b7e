"""The options that say how tokens are chosen, which commands that write text share.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import re
from typing import Any

import typer

from dflash_moe.cli.options import MAX_SEED
from dflash_moe.engine.sampling_params import MAX_TEMPERATURE, SamplingParams
from dflash_moe.errors import ConfigError

# Those whose flag is not their name.
_FLAGS = {"max_tokens": "--max-new-tokens"}


def max_new_tokens(of: str) -> Any:
    """Returns the option of a bound on new tokens. `of` says of what."""
    return typer.Option(min=1, help=f"Tokens to generate at most, per {of}.")


def temperature(default: str = "") -> Any:
    """Returns the option. `default` says what holds without it where that is no fixed number; so do
    those of the next ones.
    """
    return _number("0 takes the most likely token; higher is more random", default, min=0.0, max=MAX_TEMPERATURE)


def top_p(default: str = "") -> Any:
    """Returns the option."""
    return _number("Only the most likely tokens that have this fraction of the probability, above 0 to 1", default)


def top_k(default: str = "") -> Any:
    """Returns the option."""
    return _number("Only so many of the most likely tokens; 0: all", default)


def min_p(default: str = "") -> Any:
    """Returns the option."""
    return _number("Only tokens with at least this fraction of the most likely one's probability, 0 to below 1", default)


STOP = typer.Option(metavar="TEXT", help="Ends before this text; may be repeated [default: none].", show_default=False)
SEED = typer.Option(min=0, max=MAX_SEED, help="Seed of the sampling; without effect at temperature 0.")


def sampling_params(**fields: Any) -> SamplingParams:
    """Returns the parameters that the flags give. A refusal names the flag."""
    try:
        return SamplingParams(**fields)
    except ConfigError as error:
        flagged = re.sub(r"^\w+", lambda name: _FLAGS.get(name[0], f"--{name[0].replace('_', '-')}"), str(error))
        raise ConfigError(flagged) from None


def _number(text: str, default: str, **bounds: Any) -> Any:
    if default:
        return typer.Option(help=f"{text} [default: {default}].", show_default=False, **bounds)
    return typer.Option(help=f"{text}.", **bounds)
