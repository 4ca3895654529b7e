"""Measures parts of the runtime for those who change them, from a checkout of the sources.

    python -m bench.lab COMMAND ...

The commands take options and write results as those of `dflash-moe bench`, and `dflash-moe bench
compare` and `plot` read these. What a user measures on a machine of their own is there, and what
is recorded for the documents is bench/record.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import sys

import typer

from bench.lab.cli.attention import attention
from bench.lab.cli.device import doorbell, step
from bench.lab.cli.prefill_cards import prefill_cards
from dflash_moe.cli.command_line import Commands
from dflash_moe.cli.main import run
from dflash_moe.cli.root import show_help

PROGRAM = "python -m bench.lab"


def build_app() -> typer.Typer:
    """Builds the application."""
    app = Commands(name=PROGRAM, help="Measure parts of the runtime, for those who change them.", no_args_is_help=True)
    app.command(name="attention")(attention)
    app.command(name="doorbell")(doorbell)
    app.command(name="step")(step)
    app.command(name="prefill-cards")(prefill_cards)
    app.command(name="help", hidden=True)(show_help)
    return app


if __name__ == "__main__":
    sys.exit(run(build=build_app, program=PROGRAM))
