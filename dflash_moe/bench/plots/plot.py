"""Draws pictures of bench results, from recorded JSON only and never from a live run. It needs the
`bench` extra (matplotlib).

Each case has a painter in plot_*.py. Here is what comes before: all files must be of one case, have
the fields that it needs, and be drawn in a format that can be written.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dflash_moe.bench.plots import attention as plot_attention
from dflash_moe.bench.plots import experts as plot_experts
from dflash_moe.bench.plots import ipc as plot_ipc
from dflash_moe.bench.plots import limits as plot_limits
from dflash_moe.bench.plots import modes as plot_modes
from dflash_moe.bench.plots import scheduler as plot_scheduler
from dflash_moe.bench.plots import streaming as plot_streaming
from dflash_moe.bench.plots import timeline as plot_timeline
from dflash_moe.bench.plots.axes import Named
from dflash_moe.bench.results import require_fields
from dflash_moe.errors import ConfigError, UnsupportedError

FORMATS = (".png", ".svg")
# A letter of a legend is 11 dots high, and a PNG of 64 colours tells a pale line from its neighbour
# and is a third of one in all colours.
DPI, COLOURS = 110, 64
PAINTERS: dict[str, Callable[[Sequence[Named], Any], Any]] = {
    "prefill": plot_modes.draw_prefill,
    "decode": plot_modes.draw_decode,
    "ipc": plot_ipc.draw_ipc,
    "experts": plot_experts.draw_experts,
    "attention": plot_attention.draw_attention,
    "scheduler": plot_scheduler.draw_scheduler,
    "streaming": plot_streaming.draw_streaming,
    "limits": plot_limits.draw_limits,
}


def draw(results: Sequence[Named], out: Path) -> None:
    """Draws results of one case, each named by its file, into `out` (PNG or SVG).

    Errors: `ConfigError` for a case without a picture, different cases, or rows that lack what the
    picture shows.
    """
    check_output(out)
    cases = {str(found["case"]): name for name, found in results}
    if len(cases) > 1:
        listed = ", ".join(f"{name} is of case {case!r}" for case, name in cases.items())
        raise ConfigError(f"results of one case can be drawn together; {listed}")
    case = next(iter(cases))
    painter = PAINTERS.get(case)
    if painter is None:
        raise ConfigError(f"no picture is defined for bench case {case!r}; there is one for {', '.join(PAINTERS)}")
    for name, found in results:
        if not found["rows"]:
            raise ConfigError(f"{name}: the result has no rows to draw")
        for row in found["rows"]:
            _check_row(case, row, name)
    _save(painter, [_literal(one) for one in results], out)


def draw_timeline(named: Named, out: Path) -> None:
    """Draws the recorded timelines of a prefill result. Raises ConfigError where it has none."""
    check_output(out)
    name, found = named
    timelines = found.get("timelines")
    if not isinstance(timelines, list) or not timelines:
        raise ConfigError(f"{name}: no timeline is recorded in it; measure with `bench prefill --timeline --json FILE`")
    for timeline in timelines:
        if not isinstance(timeline, Mapping):
            raise ConfigError(f"{name}: a timeline is not an object; is the file damaged?")
        _check_numbers({"name": "timeline", **timeline}, ("mode", "dtype", "prompt_tokens", "layer"), name)
        if not isinstance(timeline.get("clock_offsets_ns", {}), Mapping):
            raise ConfigError(f"{name}: 'clock_offsets_ns' of a timeline is not an object; is the file damaged?")
        slices = timeline.get("slices")
        if not isinstance(slices, list) or not slices or not all(isinstance(one, Mapping) for one in slices):
            raise ConfigError(f"{name}: a timeline has no slices, or they are no list of objects; is the file damaged?")
        for one in slices:
            _check_numbers({"name": "slice", **one}, plot_timeline.FIELDS, name)
    _save(plot_timeline.draw_timelines, _literal(named), out)


def timeline_path(plot: Path) -> Path:
    """Returns the path for the timeline of a run, beside its other picture."""
    return plot.with_name(f"{plot.stem}_timeline{plot.suffix}")


def check_output(out: Path) -> None:
    """Checks before any work that `out` can be drawn. Raises ConfigError for a format that is not
    drawn, and UnsupportedError without matplotlib.
    """
    if out.suffix.lower() not in FORMATS:
        raise ConfigError(f"{out}: pictures are written as {' or '.join(FORMATS)}; choose such a name")
    try:
        import matplotlib  # noqa: F401, ICN001 - only asked for
    except ImportError:
        raise UnsupportedError("pictures need matplotlib: pip install 'dflash-moe[bench]'") from None


def _save(painter: Callable[[Any, Any], Any], drawn: Any, out: Path) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure = painter(drawn, plt)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(out, dpi=DPI)
    finally:
        plt.close(figure)
    if out.suffix.lower() == ".png":
        from PIL import Image

        with Image.open(out) as drawn_in_full:
            few = drawn_in_full.convert("RGB").quantize(COLOURS)
        few.save(out, optimize=True)


def _literal(value: Any) -> Any:
    """Returns the value with the dollar signs of every text escaped, because the canvas would read
    a formula between two of them.
    """
    if isinstance(value, str):
        return value.replace("$", r"\$")
    if isinstance(value, Mapping):
        return {_literal(key): _literal(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_literal(one) for one in value)
    return value


def _check_row(case: str, row: Mapping[str, Any], name: str) -> None:
    fields = {
        "prefill": plot_modes.PREFILL_FIELDS,
        "decode": plot_modes.DECODE_FIELDS,
        "ipc": plot_ipc.fields_of(row),
        "experts": plot_experts.FIELDS,
        "attention": plot_attention.APPEND_FIELDS if plot_attention.is_append(row) else plot_attention.FIELDS,
        "scheduler": plot_scheduler.FIELDS,
        "streaming": plot_streaming.FIELDS,
        "limits": plot_limits.FIELDS,
    }[case]
    _check_numbers(row, ("name", *fields), name)
    _check_numbers(row, [key for key in ("prompt_tokens",) if row.get(key) is not None], name)
    if case == "scheduler":
        parts: dict[str, tuple[str, ...]] = dict.fromkeys(plot_scheduler.TIMES, ("p50",))
        if "per_step_s" in row:
            _check_numbers(row, ("engine_share",), name)
            parts["per_step_s"] = plot_scheduler.PARTS
        _check_parts(row, parts, name)
    if case == "streaming":
        # An answer that comes in one event has no gaps.
        times = [key for key in plot_streaming.TIMES if key in row and row[key] is not None]
        _check_parts(row, dict.fromkeys(times, plot_streaming.PERCENTILES), name)
    if case == "limits":
        if not isinstance(row.get("parts"), list) or not all(isinstance(part, Mapping) for part in row["parts"]):
            raise ConfigError(f"{name}: row {row['name']!r}, field 'parts': expected a list of objects")
        for part in row["parts"]:
            _check_numbers({"name": f"{row['name']} part", **part}, plot_limits.PART_FIELDS, name)


def _check_parts(row: Mapping[str, Any], parts: Mapping[str, Sequence[str]], name: str) -> None:
    """Checks objects within a row, and the numbers that each must have."""
    for key, fields in parts.items():
        if not isinstance(row.get(key), Mapping):
            raise ConfigError(f"{name}: row {row['name']!r}, field {key!r}: expected an object")
        _check_numbers({"name": f"{row['name']} {key}", **row[key]}, fields, name)


TEXTS = {"name", "part", "mode", "dtype", "worker", "transport", "format", "kv_dtype", "through"}
LISTS = {"samples_s"}
# These fields are drawn on logarithmic axes, or divided by.
POSITIVE = {"gflops", "bytes_per_s", "peak_gflops", "peak_bytes_per_s", "tokens", "payload_bytes", "memcpy_bytes_per_s",
            "context", "us", "step_s"}  # fmt: skip
# A number beyond this, in bytes, nanoseconds or operations, is damage, and axes cannot show it.
LARGEST = 1e18


def _check_numbers(row: Mapping[str, Any], fields: Sequence[str], name: str) -> None:
    """Checks that every field is there, that texts are texts, and that the rest are finite numbers
    or, for samples, a list of them.
    """
    require_fields(row, fields, name)
    for key in fields:
        values = row[key] if key in LISTS and isinstance(row[key], list) else [row[key]]
        is_right = _is_text if key in TEXTS else _is_number
        if not values or not all(is_right(one) for one in values) or (key in POSITIVE and not min(values) > 0):
            expected = "text" if key in TEXTS else "positive numbers" if key in POSITIVE else "numbers"
            raise ConfigError(f"{name}: row {row['name']!r}, field {key!r}: expected {expected}")


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _is_number(value: object) -> bool:
    # The comparison is false for NaN.
    return isinstance(value, int | float) and abs(value) <= LARGEST
