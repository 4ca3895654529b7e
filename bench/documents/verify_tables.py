"""Writes the tables of `verify` on a model of real size, and of the sweep of families with odd
settings.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from collections.abc import Callable

from bench.documents.engine_tables import summary_marks
from bench.documents.recorded import Recorded
from bench.documents.text import markdown, mebibytes, seconds

REAL_SIZE = "verify_real_size"
ODD_SETTINGS = "odd_settings"


def stages(recorded: Recorded) -> str:
    """Writes what each stage of `verify` took, and the first token beside reading the file."""
    rows = {row["name"]: row for row in recorded.rows(REAL_SIZE)}
    verified = rows.pop("verify")
    lines = [(name, seconds(took), mebibytes(verified["peaks_by_stage"].get(name, 0))) for name, took in verified["stages_s"]]
    lines.append(("all of `verify`", seconds(verified["wall_s"]), mebibytes(verified["peak_anonymous_bytes"])))
    names = {"read": "reading the file once", "first token": "`generate`, one token"}
    lines += [(names[name], seconds(row["median_s"]), "-") for name, row in rows.items()]
    return markdown(("what", "time", "most anonymous MiB"), lines)


def odd_settings(recorded: Recorded) -> str:
    """Writes for every family how its models ran with how many settings, and how far off."""
    head = ("family", "as usual", "settings as layers", "as modules", "in torch", "refused by it", "by us", "largest error",
            "of what is allowed", "wrong")  # fmt: skip
    lines = [
        (
            row["name"],
            row["usual"] or "-",
            *(str(row["taken"].get(name, 0)) for name in ("layers", "modules", "torch")),
            *(str(row["refused"].get(name, 0)) for name in ("model", "dflash_moe")),
            f"{row['worst_error']:.1e}" if row["taken"] else "-",
            f"{row['worst_of_allowed']:.2f}" if row["taken"] else "-",
            ", ".join(row["wrong"]) or "none",
        )
        for row in recorded.rows(ODD_SETTINGS)
    ]
    return markdown(head, lines)


def odd_settings_together(recorded: Recorded) -> str:
    """Writes the sums of `odd_settings`."""
    (total,) = recorded.summary(ODD_SETTINGS)
    kinds = ("layers", "modules", "torch")
    lines = [
        (what, *(f"{total[what].get(kind, 0):,}" for kind in kinds), f"{refused:,}")
        for what, refused in (
            ("families", total["families"].get("refused", 0)), ("settings", sum(total["refused"].values())),
        )
    ]  # fmt: skip
    return markdown(("", *kinds, "refused", "wrong"), [(*lines[0], "-"), (*lines[1], f"{total['wrong']:,}")])


TABLES: dict[str, Callable[[Recorded], str]] = {
    "verify-real-size": stages,
    "odd-settings": odd_settings,
    "odd-settings-together": odd_settings_together,
    "verify-real-size-marks": summary_marks(REAL_SIZE),
}
