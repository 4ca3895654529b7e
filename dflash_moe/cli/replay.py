"""`dflash-moe replay`: proves a receipt of `generate --receipt` again on the machines at hand.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dflash_moe.cli import options
from dflash_moe.cli.loading import loading_shown

if TYPE_CHECKING:
    from dflash_moe.proofs.replay import Replay


@options.with_settings()
def replay(
    receipt: Annotated[Path, typer.Argument(metavar="FILE", help="Receipt that `generate --receipt` has written.")],
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            metavar="DIR",
            help="Checkpoint: a directory of safetensors and config.json, or a GGUF file [default: the path in the receipt].",
            show_default=False,
        ),
    ] = None,
    topology: options.TopologyOption = None,
    close: Annotated[
        bool,
        typer.Option("--close", help="Compare by tolerance where this machine or the receipt does not promise equal bits."),
    ] = False,
    **overrides: Any,
) -> None:
    """Prove a receipt again: same tokens and residual stream, bit by bit, on these workers.

    The shard map, wire dtypes and numerics classes are the receipt's; workers, transports, modes
    and threads are yours. Exit code 1 when something differs, naming the first layer and position;
    2 before any weight is loaded where bits are not promised here, unless --close is given.
    """
    from dflash_moe.proofs.receipt import read_receipt
    from dflash_moe.proofs.replay import replay as run

    found = read_receipt(receipt)
    directory = options.model_directory(model or found.model)
    # A fit would put attention on a card, where no bits are promised.
    where = options.topology_for(topology, directory, overrides) if close else options.load_topology(topology)
    with loading_shown(then="") as on_loading:
        result = run(found, directory, where, is_close=close, on_loading=on_loading, overrides=overrides)
    _show(result)
    options.refuse_faults("replay: ", result.differences)


def _show(result: Replay) -> None:
    where = f"{result.num_holders} holder{'s' * (result.num_holders != 1)} of experts in {', '.join(result.classes)}"
    if result.close is None:
        if not result.differences:
            typer.echo(f"proven: {result.num_tokens} tokens and {result.num_digests} digests are equal bit by bit, by {where}")
        return
    close = result.close
    most = f"{max(close.rms):.2e} of its deviation, allowed {close.tolerance:.2e}"
    judged = "" if close.is_greedy else " (drawn by chance or with penalties, so not judged)"
    typer.echo(
        f"compared by tolerance, because {result.reason.removeprefix('replay: ')}\n"
        f"{where}; the receipt's tokens were fed: {close.num_equal} of {result.num_tokens} are the best here too{judged}\n"
        f"the median row of the residual stream differs by up to {most}"
    )
