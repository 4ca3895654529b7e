"""`dflash-moe model make`, `model inspect` and `model stub`.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dflash_moe.cli import options
from dflash_moe.cli.command_line import Commands
from dflash_moe.cli.loading import doing_shown
from dflash_moe.cli.model_path import model_path
from dflash_moe.config.values import format_bytes
from dflash_moe.errors import ConfigError, shown
from dflash_moe.model.formats.gguf_header import is_gguf

if TYPE_CHECKING:
    from dflash_moe.model.inspect import Inspection
    from dflash_moe.model.spec import LayerSpec

GIB = 1 << 30
# So many runs of layers are listed in a row.
MAX_RUNS = 5


def register(app: typer.Typer) -> None:
    """Adds `model make`, `model inspect` and `model stub`."""
    model = Commands(help="Make and inspect checkpoints, and stubs of GGUF files.", no_args_is_help=True)
    for command in (make, inspect, stub):
        model.command(name=command.__name__)(command)
    app.add_typer(model, name="model")


def make(
    arch: Annotated[str, typer.Option(help="Model type in transformers: qwen3_moe, mixtral ...", show_default=False)],
    out: Annotated[Path, typer.Option(metavar="DIR", help="Where to write; new or empty.", show_default=False)],
    num_layers: Annotated[int, typer.Option("--layers", help="Decoder layers.")] = 4,
    hidden_size: Annotated[int, typer.Option(help="Width of a token, in elements; a multiple of 32.")] = 256,
    num_experts: Annotated[int, typer.Option(help="Routed experts of a layer.")] = 16,
    top_k: Annotated[int, typer.Option(help="Experts of a token.")] = 4,
    moe_intermediate_size: Annotated[int, typer.Option(help="Width inside an expert, in elements.")] = 128,
    dtype: Annotated[str, typer.Option(help="Format of the weights: f32, f16 or bf16.")] = "bf16",
    seed: Annotated[int, typer.Option(help="Seed of the random weights.")] = 0,
) -> None:
    """Write a random-weight checkpoint of a real architecture, with a byte-level tokenizer."""
    from dflash_moe.model.make import MakeOptions, make_checkpoint

    wanted = MakeOptions(arch, num_layers, hidden_size, num_experts, top_k, moe_intermediate_size, dtype, seed)
    wanted.check()
    options.say(f"making {arch} with random weights")
    made = make_checkpoint(wanted, out)
    typer.echo(
        f"wrote {made.class_name} with {made.num_parameters:,} parameters in {dtype} to {made.directory}; on random text an "
        f"expert gets {made.least_used:.2f} to {made.most_used:.2f} times its even share of the tokens"
    )


def inspect(
    directory: Annotated[str, typer.Argument(metavar="DIR", help="Checkpoint directory or GGUF file.", show_default=False)],
    json_out: Annotated[Path | None, options.json_option("All that is known")] = None,
) -> None:
    """Show layers, experts, bytes per expert, what fits where, and whether the model is
    supported.
    """
    path = model_path(directory)
    with doing_shown(f"reading {path.name}"):
        from dflash_moe.model.inspect import inspect_model

        found = inspect_model(path)
    options.write_json(json_out, found.to_json())
    if json_out == options.STDOUT:
        return
    class_names = ", ".join(found.architectures) or "no class named"
    typer.echo(f"{class_names} ({found.model_type}), {format_bytes(found.checkpoint_bytes)}")
    if found.is_stub:
        typer.echo("a stub: it holds no experts, which workers load from the full file; copy it with `rsync -S` or `tar -S`")
    if found.spec is None:
        typer.echo(f"not supported: {found.reason}")
        return
    typer.echo(f"supported, runs in {found.spec.dtype}")
    typer.echo(f"{found.left_out}\n" if found.left_out else "")
    _show_sizes(found)
    _show_layers(found)
    _show_fits(found)


def stub(
    source: Annotated[str, typer.Argument(metavar="FILE.gguf", help="The full model.", show_default=False)],
    target: Annotated[Path, typer.Argument(metavar="OUT.gguf", help="Where to write; a new name.", show_default=False)],
) -> None:
    """Write a GGUF file without its routed experts, for a program whose experts workers compute.

    It has the same size and offsets, with holes in the place of experts, so that it takes as much
    room on disk as the other weights. Copy it with `rsync -S` or `tar -S`, which keep holes.
    Workers need the full file.
    """
    from dflash_moe.cli.left_out import grouped
    from dflash_moe.cli.loading import copying_shown
    from dflash_moe.model.stub import write_stub

    with copying_shown() as report:
        made = write_stub(_full_model(source), target, report)
    for left in grouped(made.left_out):
        options.say(f"kept whole: {left.names}: {left.reason}")
    names = f"{made.files[0]}" + (f" and {len(made.files) - 1} more parts" if len(made.files) > 1 else "")
    typer.echo(
        f"wrote {names}: {made.apparent_bytes:,} bytes apparent, {made.disk_bytes:,} on disk, "
        f"with pages in place of {made.num_tensors} tensors"
    )


def _full_model(value: str) -> Path:
    """Returns the path of a GGUF file, or of a directory of one. Raises ConfigError."""
    try:
        path = Path(value).expanduser()
        is_file = stat.S_ISREG(os.stat(path).st_mode)
    except (FileNotFoundError, NotADirectoryError):
        raise ConfigError(f"{shown(value)}: no such file; give the GGUF file of the full model") from None
    except (OSError, RuntimeError, ValueError) as error:
        # ~NAME of a user that is not there is a RuntimeError, and a zero byte a ValueError.
        raise ConfigError(f"{shown(value)}: {getattr(error, 'strerror', None) or error}") from None
    if is_file and not is_gguf(path):
        raise ConfigError(f"{shown(value)}: this is not GGUF; give the GGUF file of the full model")
    return path


def _show_layers(found: Inspection) -> None:
    """Shows one row for all layers that are alike, wherever they are."""
    from dflash_moe.placement.fit_text import ranges

    options.show_rows(
        _alike(found.layers),
        ("layers", lambda layers: str(len(layers))),
        ("experts", lambda layers: str(layers[0].num_experts)),
        ("top-k", lambda layers: str(layers[0].top_k)),
        ("in", lambda layers: str(layers[0].ffn.in_size)),
        ("inner", lambda layers: str(layers[0].ffn.intermediate_size)),
        ("out", lambda layers: str(layers[0].ffn.out_size)),
        ("formula", lambda layers: _formula(layers[0])),
        ("weights", lambda layers: layers[0].weight_dtype),
        ("an expert", lambda layers: format_bytes(layers[0].expert_bytes)),
        ("a layer", lambda layers: format_bytes(layers[0].num_experts * layers[0].expert_bytes)),
        ("which", lambda layers: _shortened(ranges([item.index for item in layers]))),
    )


def _formula(layer: LayerSpec) -> str:
    return layer.ffn.activation if layer.ffn.gate in ("gated", "none") else layer.ffn.gate


def _shortened(runs: str) -> str:
    """Returns runs of numbers with some of many left out, so that a row fits a line."""
    each = runs.split(", ")
    return runs if len(each) <= MAX_RUNS else ", ".join([*each[: MAX_RUNS - 2], "...", each[-1]])


def _alike(layers: tuple[LayerSpec, ...]) -> list[list[LayerSpec]]:
    """Returns the layers that have equal sizes, formats and formulas together."""
    kinds: dict[tuple[object, ...], list[LayerSpec]] = {}
    for layer in layers:
        kind = (layer.num_experts, layer.top_k, layer.weight_dtype, tuple(layer.ffn.kernel_spec().items()))
        kinds.setdefault(kind, []).append(layer)
    return list(kinds.values())


def _show_sizes(found: Inspection) -> None:
    """Says what takes how much, in total."""
    largest = max(layer.resident_bytes("auto") for layer in found.layers)
    assert found.spec is not None
    on_card = f", {format_bytes(found.host_bytes_on_card)} in {found.spec.dtype} on a card"
    typer.echo(
        f"routed experts: {format_bytes(found.expert_bytes)}, {sum(layer.num_experts for layer in found.layers)} of them, "
        f"{GIB // largest} fit in a GiB\nother weights, at the host: {format_bytes(found.host_bytes)}"
        f"{on_card if found.host_bytes_on_card != found.host_bytes else ''}"
    )
    resident = found.resident_bytes()
    for weights, size in resident.items() if len(set(resident.values())) > 1 else ():
        typer.echo(f"with `weights: {weights}` at the workers the experts take {format_bytes(size)}")
    typer.echo()


def _show_fits(found: Inspection) -> None:
    resident = found.resident_bytes()["auto"]
    table = options.Table("card or worker, GiB", "layers whose experts fit", "of all experts, %", "workers needed")
    for gib, fraction in found.fits().items():
        layers = f"{found.layers_within(gib * GIB)} of {len(found.layers)}"
        table.add_row(str(gib), layers, f"{100 * fraction:.0f}", str(-(-resident // (gib * GIB))))
    options.show(table)
