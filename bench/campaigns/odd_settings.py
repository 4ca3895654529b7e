"""Runs tiny models of every family that transformers has on its experts interface, with the odd
settings of each family's own configuration one at a time, and compares all logits with eager's.

    python -m bench.campaigns.odd_settings [--families NAME,...] [--most 3] \
        [--jobs 2] [--json bench/results/odd_settings.json]

What settings there are is derived (bench/models/odd_settings.py), and so is what may differ
(bench/models/family_sweep.py). A row for each family. Exit code 1 where a setting is wrong.
`--most` takes as many settings of each family that a proof of a layer is most likely to overlook.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections import Counter
from functools import partial
from typing import Any

from bench.campaigns.harness import command_line
from dflash_moe.bench.results import BenchResult
from dflash_moe.cli import options

FAMILIES_EACH = 16


def main() -> int:
    """Does what the module text says, and returns the exit status."""
    parser = command_line(__doc__, "odd_settings")
    parser.add_argument("--families", default="", help="comma-separated [all]")
    parser.add_argument("--most", type=int, default=0, help="odd settings of each family [all]")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="families at a time [cores]")
    arguments = parser.parse_args()
    from bench.models.families import families_on_interface
    from bench.models.odd_settings import TOKENS

    families = arguments.families.split(",") if arguments.families else families_on_interface()
    params = {"families": len(families), "tokens": TOKENS, "dtype": "f32", "workers": 2, "most": arguments.most}
    result = BenchResult("odd_settings", params)
    # Processes end after a few families, so that what these leave behind does not pile up.
    with multiprocessing.get_context("spawn").Pool(arguments.jobs, maxtasksperchild=FAMILIES_EACH) as pool:
        for row in pool.imap(partial(sweep_family, most=arguments.most), families):
            result.rows.append(row)
            result.write(arguments.json)
            options.say(f"{row['name']}: {said(row)}")
    result.summary = [totals(result.rows)]
    result.complete = True
    result.write(arguments.json)
    options.say(str(result.summary[0]))
    return 1 if result.summary[0]["wrong"] else 0


def sweep_family(arch: str, most: int) -> dict[str, Any]:
    """Returns the row of a family, with all its odd settings or `most` of them."""
    import torch
    from transformers.utils import logging

    from bench.models.family_sweep import sweep
    from bench.models.odd_settings import most_dangerous

    torch.set_num_threads(1)
    logging.set_verbosity_error()
    chosen = partial(most_dangerous, count=most) if most else list
    return row_of(arch, [outcome.to_json() for outcome in sweep(arch, chosen)])


def row_of(arch: str, outcomes: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns the row of a family by what became of its settings."""
    compared = [outcome for outcome in outcomes if "taken" in outcome]
    usual = next((outcome for outcome in outcomes if not outcome["setting"]), {})
    as_usual = [outcome for outcome in compared if all(outcome.get(key) == usual.get(key) for key in ("taken", "reason"))]
    return {
        "name": arch,
        "usual": usual.get("taken", ""),
        "reason": usual.get("reason", ""),
        "settings": len(outcomes),
        "refused": dict(Counter(outcome["refused_by"] for outcome in outcomes if "refused_by" in outcome)),
        "taken": dict(Counter(outcome["taken"] for outcome in compared)),
        "worst_error": max((outcome["error"] for outcome in compared), default=0.0),
        "worst_of_allowed": max((outcome["error"] / outcome["allowed"] for outcome in compared), default=0.0),
        "wrong": [outcome["setting"] or "the usual one" for outcome in outcomes if "is_wrong" in outcome],
        "as_usual": [outcome["setting"] for outcome in as_usual],
        "outcomes": [outcome for outcome in outcomes if outcome not in as_usual or "is_wrong" in outcome],
    }


def totals(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns how many families and settings were taken over in which way, refused, and wrong."""
    taken, refused = Counter[str](), Counter[str]()
    for row in rows:
        taken.update(row["taken"])
        refused.update(row["refused"])
    return {
        "families": dict(Counter(row["usual"] or "refused" for row in rows)),
        "settings": dict(taken),
        "refused": dict(refused),
        "wrong": sum(len(row["wrong"]) for row in rows),
    }


def said(row: dict[str, Any]) -> str:
    """Returns a line about a family."""
    wrong = f"; WRONG: {', '.join(row['wrong'])}" if row["wrong"] else ""
    return f"{row['usual'] or 'refused'}; {row['taken']} refused {row['refused']}, at most {row['worst_error']:.2g}{wrong}"


if __name__ == "__main__":
    sys.exit(main())
