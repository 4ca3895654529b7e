"""`dflash-moe plan`: where a model's experts go on this machine without a topology, and the same
written as a topology to edit. No weight is loaded.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dflash_moe.cli import options
from dflash_moe.cli.loading import doing_shown
from dflash_moe.errors import ConfigError

if TYPE_CHECKING:
    from dflash_moe.forward.fitted import Fitted


@options.with_settings(reads_config=True)
def plan(
    model: options.ModelOption,
    write: Annotated[
        Path | None,
        typer.Option("--write", metavar="FILE", help="Write it as a topology here [default: nowhere].", show_default=False),
    ] = None,
    verbose: options.VerboseOption = False,
    **overrides: Any,
) -> None:
    """Show how a model is fitted to this machine where no topology is given: attention on the
    fastest device, whole layers of experts on cards, the others in memory.

    The plan says what lies where, how much is left there, how fast that may be, what is kept
    packed on disk for the next start and what can be changed. Nothing is loaded; that workers can
    compute the model's experts is known from then on, and that its own code can be run, when it
    is loaded.
    """
    directory = options.model_directory(model)
    options.prepare_outputs(write)
    with doing_shown(f"reading {directory.name}"):
        from dflash_moe.forward.fitted import fit_checkpoint
        from dflash_moe.model.checkpoint import Checkpoint

        fitted = fit_checkpoint(Checkpoint.open(directory), directory, overrides)
        lines = [*fitted.lines()[:-1], fitted.speed(), fitted.kept(), fitted.lines()[-1]]
    typer.echo("\n".join(filter(None, lines)))
    if verbose or any(worker.address != "loopback" for worker in fitted.found.topology.workers):
        _show_remedies(fitted, overrides)
    if write is not None:
        from dflash_moe.topology.write import to_yaml

        try:
            write.write_text(to_yaml(fitted.found.topology), encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"{write}: cannot be written ({error.strerror})") from None
        typer.echo(f"wrote {write}; use it with --topology {write}")


def _show_remedies(fitted: Fitted, overrides: dict[str, Any]) -> None:
    """Says who answers for a worker that is lost."""
    from dflash_moe.config import resolve_settings
    from dflash_moe.placement import plan_placement
    from dflash_moe.placement.remedies import shard_remedies

    topology = fitted.found.topology
    typer.echo("  where a worker is lost:")
    settings = resolve_settings(None, **overrides)
    for line in shard_remedies(fitted.layers, plan_placement(fitted.layers, topology), topology, settings):
        typer.echo(f"    {line}")
