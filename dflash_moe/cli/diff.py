"""`dflash-moe diff`: where two runs of the same tokens part, by layer, token and expert.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dflash_moe.cli import options
from dflash_moe.cli.loading import Lines
from dflash_moe.config.settings import PRESETS, SETTINGS_BY_NAME
from dflash_moe.errors import ConfigError

if TYPE_CHECKING:
    from dflash_moe.proofs.diff_report import DiffReport


_Preset = f"[default: that of --preset]. Allowed: {', '.join(PRESETS)}."


@options.with_settings(reads_config=True)
def diff(
    a: Annotated[str, typer.Argument(metavar="A", help="A checkpoint: a directory, a GGUF file, or demo.")],
    b: Annotated[str, typer.Argument(metavar="B", help="The checkpoint to compare with it; it may be the same.")],
    topology: options.TopologyOption = None,
    topology_b: Annotated[
        Path | None,
        typer.Option(
            "--topology-b", metavar="FILE", help="YAML file of host and workers of B [default: that of A].", show_default=False
        ),
    ] = None,
    preset_a: Annotated[str | None, typer.Option(help=f"Preset of A {_Preset}", show_default=False)] = None,
    preset_b: Annotated[str | None, typer.Option(help=f"Preset of B {_Preset}", show_default=False)] = None,
    tolerance: Annotated[
        float | None,
        typer.Option(
            min=0.0,
            help="Two layers part where the rms of their difference exceeds this fraction of A's deviation; bits are then not "
            "compared [default: the bound of verify for the model's dtype].",
            show_default=False,
        ),
    ] = None,
    prompt: Annotated[
        str | None, typer.Option(help="Text whose tokens both compute [default: 96 random tokens].", show_default=False)
    ] = None,
    seed: Annotated[int, typer.Option(min=0, max=options.MAX_SEED, help="Seed of the random tokens.")] = 0,
    json_out: Annotated[Path | None, options.json_option("The report")] = None,
    **overrides: Any,
) -> None:
    """Show where two runs part: first layer, token and expert, and by how much.

    Where checkpoint, shard map and numerics classes are the same, bits are compared. Each layer is
    compared as the models ran, and once more with A's inputs and routing. Only one model is in
    memory at a time. Exit code 0 where nothing differs, 1 where they part, 2 where they cannot be
    compared.
    """
    from dflash_moe.proofs.diff import diff as run

    if tolerance is not None and not tolerance >= 0:
        raise ConfigError(f"--tolerance {tolerance}: give a fraction of at least 0")
    sides = (
        _side(a, topology, ("--preset-a", preset_a), overrides),
        _side(b, topology_b or topology, ("--preset-b", preset_b), overrides),
    )
    report = run(*sides, prompt=prompt, tolerance=tolerance, seed=seed, progress=options.say, on_loading=Lines().report)
    options.write_json(json_out, report.to_json())
    _show(report)
    options.refuse_faults("diff: ", [report.fault()] if report.parts else [])


def _side(model: str, topology: Path | None, preset: tuple[str, str | None], overrides: dict[str, Any]) -> Any:
    from dflash_moe.proofs.diff import Side

    flag, value = preset
    settings = dict(overrides)
    if value is not None:
        settings["preset"] = SETTINGS_BY_NAME["preset"].check(value, flag)
    path = options.model_directory(model)
    return Side(path, options.topology_for(topology, path, settings), settings)


def _show(report: DiffReport) -> None:
    how = "bit by bit" if not report.not_bits else f"by tolerance {report.tolerance:.3g}, because {report.not_bits}"
    typer.echo(f"{report.num_tokens} tokens, compared {how}; differences over A's deviation\n")
    options.show_rows(
        report.layers,
        ("layer", lambda one: str(one.layer)),
        ("as they ran: rms", lambda one: f"{one.free.rms:.2e}"),
        ("max", lambda one: f"{one.free.largest:.2e}"),
        ("with A's inputs: rms", lambda one: f"{one.fed.rms:.2e}"),
        ("max", lambda one: f"{one.fed.largest:.2e}"),
        ("experts: rms", lambda one: "-" if one.experts is None else f"{one.experts.rms:.2e}"),
        ("max", lambda one: "-" if one.experts is None else f"{one.experts.largest:.2e}"),
        ("rerouted tokens", lambda one: "-" if one.experts is None else str(one.rerouted)),
    )
    typer.echo(
        f"logits: rms {report.logits.rms:.2e}, max {report.logits.largest:.2e}; KL {report.kl:.2e} nats; the best token is the "
        f"same at {100 * report.top1:.1f}% of the tokens"
    )
    for one in report.experts[:8]:
        held = ", and its weights are other bytes" if one.has_other_bytes else ""
        typer.echo(
            f"layer {report.asked_layer}, expert {one.expert}, asked alone: rms {one.rms:.2e}, max {one.largest:.2e}{held}"
        )
    if not report.parts:
        typer.echo("no difference: every bit is the same" if not report.not_bits else "no difference beyond the tolerance")
