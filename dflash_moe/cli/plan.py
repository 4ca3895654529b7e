"""`dflash-moe plan`: where a model's experts go on this machine without a topology, and the same
written as a topology to edit. No weight is loaded.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from dflash_moe.cli import options
from dflash_moe.errors import ConfigError


def register(app: typer.Typer) -> None:
    """Adds `plan`."""
    app.command(name="plan")(plan)


@options.with_settings(reads_config=True)
def plan(
    model: options.ModelOption,
    write: Annotated[
        Path | None,
        typer.Option("--write", metavar="FILE", help="Write it as a topology here [default: nowhere].", show_default=False),
    ] = None,
    **overrides: Any,
) -> None:
    """Show how a model is fitted to this machine where no topology is given: attention on the
    fastest device, whole layers of experts on cards, the others in memory.
    """
    directory = options.model_directory(model)
    options.prepare_outputs(write)
    from dflash_moe.config import resolve_settings
    from dflash_moe.engine.fitted import fit_here
    from dflash_moe.model.spec import model_spec
    from dflash_moe.placement import plan_placement
    from dflash_moe.placement.remedies import shard_remedies
    from dflash_moe.topology.write import to_yaml

    topology = fit_here(directory, overrides).topology
    layers = model_spec(directory).layers
    typer.echo("where a worker is lost:")
    for line in shard_remedies(layers, plan_placement(layers, topology), topology, resolve_settings(None, **overrides)):
        typer.echo(f"  {line}")
    if write is not None:
        try:
            write.write_text(to_yaml(topology), encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"{write}: cannot be written ({error.strerror})") from None
        typer.echo(f"wrote {write}; use it with --topology {write}")
