"""`dflash-moe verify`: parity of the workers' experts with the model's own, layer by layer and as a
whole.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dflash_moe.cli import options
from dflash_moe.cli.loading import Lines, comparing_shown

if TYPE_CHECKING:
    from dflash_moe.proofs.verify_report import VerifyReport


@options.with_settings(reads_config=True)
def verify(
    model: options.ModelOption,
    topology: options.TopologyOption = None,
    seed: Annotated[int, typer.Option(min=0, max=options.MAX_SEED, help="Seed of the random token ids.")] = 0,
    weights: Annotated[
        bool,
        typer.Option("--weights", help="First compare every holder's weights with the checkpoint here, by content checksums."),
    ] = False,
    json_out: Annotated[Path | None, options.json_option("The report")] = None,
    **overrides: Any,
) -> None:
    """Compare with the model's own eager experts. `--dtype` is what model and wire run in (default:
    the checkpoint's).

    Exit code 1 when a bound is exceeded, 2 when the model is not supported or a holder's weights
    differ.
    """
    directory = options.model_directory(model)
    where = options.topology_for(topology, directory, overrides)
    from dflash_moe.proofs.verify import verify as run

    with comparing_shown() as compare:
        report = run(
            directory, where, dtype=overrides.get("dtype"), seed=seed, progress=options.say, on_loading=Lines().report,
            on_comparing=compare if weights else None, overrides=overrides,
        )  # fmt: skip
    options.write_json(json_out, report.to_json())
    _show(report)
    options.refuse_faults(f"verify: {len(report.excesses)} bounds exceeded; ", report.excesses)
    typer.echo("parity: every bound held")


def _show(report: VerifyReport) -> None:
    typer.echo(
        f"{report.class_name} in {report.dtype}, wire {report.request_dtype} out and {report.reply_dtype} back, "
        f"numerics {', '.join(sorted(set(report.numerics['classes'].values())))}; errors and differences over the output's "
        "standard deviation\n"
    )
    options.show_rows(
        report.layers,
        ("layer", lambda layer: str(layer.index)),
        ("tokens", lambda layer: str(layer.tokens)),
        ("calls", lambda layer: str(layer.calls)),
        ("eager error", lambda layer: f"{layer.eager_error:.2e}"),
        ("remote error", lambda layer: f"{layer.remote_error:.2e}"),
        ("ratio", lambda layer: f"{layer.remote_error / layer.eager_error if layer.eager_error else 0.0:.2f}"),
        ("rms difference", lambda layer: f"{layer.difference_rms:.2e}"),
        ("max", lambda layer: f"{layer.difference_max:.2e}"),
        ("stream", lambda layer: "equal" if layer.equal_in_stream else "DIFFERENT"),
    )
    for holder, formats in report.formats.items():
        typer.echo(f"{holder} holds {', '.join(formats)} and computes in {report.numerics['classes'][holder]}")
    if report.compared_shards is not None:
        typer.echo(f"weights: all {report.compared_shards} shards hold the bytes of this host's copy")
    if mixed := report.numerics["mixed_layers"]:
        typer.echo(f"numerics close: {len(mixed)} layers are computed in several classes")
    requantised = [layer for layer in report.layers if layer.is_requantised]
    if requantised:
        worst = max(layer.requantisation_error for layer in requantised)
        mean = sum(layer.requantisation_error for layer in requantised) / len(requantised)
        typer.echo(
            f"weights were requantised in {len(requantised)} layers: that moves the output by {mean:.2e} (rms; worst layer "
            f"{worst:.2e}). Remote error is against float64 with the weights held; differences from eager are not judged"
        )
    rounded = [layer for layer in report.layers if layer.is_rounded]
    if rounded:
        most = max(rounded, key=lambda layer: layer.activation_error)
        typer.echo(
            f"inputs are rounded in {len(rounded)} layers: that moves the output by up to {most.activation_error:.2e} (rms, "
            f"layer {most.index}; eager's own error there {most.eager_error:.2e}). Remote error is against float64 with inputs "
            "so rounded; differences from eager are judged where the model itself rounds as much"
        )
    _show_model(report)
    typer.echo(f"calls to workers in the whole-model runs: {report.remote_calls}")


def _show_model(report: VerifyReport) -> None:
    """Prints what became of the host's own model, and how the whole compares with eager."""
    if report.host is not None:
        typer.echo("\nthe host's own model:\n" + "\n".join(f"  {line}" for line in report.host.lines()))
    if report.is_paged:
        proven = "proven" if report.is_independent else "NOT proven"
        typer.echo(
            f"  linear layers compute in {', '.join(report.host_numerics) or 'torch'}; keys and values are kept in "
            f"{report.kv_dtype}; rows are {proven} independent of their batch"
        )
    judged = f" (reported, not judged: {report.not_judged})" if report.not_judged else ""
    typer.echo(f"logits: rms {report.logits_rms:.2e}, max {report.logits_max:.2e}{judged}")
    if report.positions is not None:
        far = report.positions
        typer.echo(
            f"logits of {far.count} rows at positions up to {far.last}: rms {far.logits_rms:.2e}, max {far.logits_max:.2e}"
        )
    greedy = report.greedy
    if greedy is not None:
        gap = "" if greedy.flip_gap is None else f", where eager's top two are up to {greedy.flip_gap:.2e} apart"
        clear = f"eager has no tie at {greedy.compared} of them"
        typer.echo(f"greedy tokens: {greedy.equal} of {greedy.tokens} are eager's best{gap}; {clear}")
