"""Writes the tables of `verify` on a model of real size.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from collections.abc import Callable

from bench.documents.engine_tables import summary_marks
from bench.documents.recorded import Recorded
from bench.documents.text import markdown, mebibytes, seconds

REAL_SIZE = "verify_real_size"


def stages(recorded: Recorded) -> str:
    """Writes what each stage of `verify` took, and the first token beside reading the file."""
    rows = {row["name"]: row for row in recorded.rows(REAL_SIZE)}
    verified = rows.pop("verify")
    lines = [(name, seconds(took), mebibytes(verified["peaks_by_stage"].get(name, 0))) for name, took in verified["stages_s"]]
    lines.append(("all of `verify`", seconds(verified["wall_s"]), mebibytes(verified["peak_anonymous_bytes"])))
    names = {"read": "reading the file once", "first token": "`generate`, one token"}
    lines += [(names[name], seconds(row["median_s"]), "-") for name, row in rows.items()]
    return markdown(("what", "time", "most anonymous MiB"), lines)


TABLES: dict[str, Callable[[Recorded], str]] = {
    "verify-real-size": stages,
    "verify-real-size-marks": summary_marks(REAL_SIZE),
}
