"""Measures all recorded results again that HEAD's sources did not give: `make results`.

    python -m bench.record [--only NAME,...] [--again] [--quick] [--list]

Each step writes into build/results. What is complete there, or recorded, and was measured with the
same trees of what the step depends on (bench/record/trees.py), is not measured again, so that an
interrupted run goes on where it was, in another checkout too. In the end results are copied to
bench/results, and plots and documents are written from them. A changed tree is refused (results and
documents apart): a number that belongs to no commit is worth nothing. --quick tries every step with
tiny parameters, whatever the tree, and writes nothing outside of build/results_quick. Exit status 1
when a step failed.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bench.documents.markup import DOCUMENTS, written
from bench.record.steps import ROOT, STEPS, Place, Step
from bench.record.trees import RESULTS, is_of_head, with_trees, write
from dflash_moe.bench.results import read_result, source_commit

# A step that takes this many times its estimate, and this long at least, is stuck.
PATIENCE, LEAST_S = 6, 900
# No worker writes panels while something is measured, or starts from those of an earlier step. A
# step about them says so in its own command (`env`).
ENVIRONMENT = {"DFLASH_MOE_CACHE_PANELS": "off"}
CARDS = "cards: none of these is measured on one; `make gpu-check` measures on the card at hand, into a folder of its own"


@dataclass(slots=True)
class Run:
    """What came of the steps of one run."""

    took_s: dict[str, float] = field(default_factory=dict)
    kept: list[str] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)


def main(arguments: Sequence[str] | None = None) -> int:
    """Does what the module text says, and returns the exit status."""
    given = _arguments(arguments)
    steps = _chosen(given.only)
    commit, is_dirty = source_commit()
    if is_dirty and not given.quick and not given.list:
        print("the tree has changes: commit them first, so that the results belong to a commit", file=sys.stderr)
        return 2
    place = Place(ROOT / "build" / ("results_quick" if given.quick else "results"), given.quick)
    _show_plan(steps, place, commit, given)
    if given.list:
        return 0
    place.folder.mkdir(parents=True, exist_ok=True)
    run = record(steps, place, again=given.again or given.quick)
    if not given.quick:
        publish([step for step in steps if step.name not in run.failed and step.name not in run.left_out], place)
    _show_outcome(run)
    if given.quick and not (given.only or run.left_out or run.failed):
        for name in DOCUMENTS:
            written((ROOT / name).read_text(encoding="utf-8"), place.folder)
        print(f"{', '.join(DOCUMENTS)} could be written from these")
    return 1 if run.failed else 0


def record(steps: Sequence[Step], place: Place, *, again: bool) -> Run:
    """Runs the steps one after the other. One that fails does not end the others."""
    run = Run()
    for number, step in enumerate(steps, start=1):
        title = f"== step {number} of {len(steps)}: {step.name}"
        if lacking := step.lacking():
            run.left_out[step.name] = f"this machine lacks {lacking}"
            print(f"{title}: left out, {run.left_out[step.name]}", flush=True)
            continue
        if not again and is_there(step, place):
            run.kept.append(step.name)
            print(f"{title}: measured already", flush=True)
            continue
        about = "with tiny parameters" if place.is_quick else f"about {step.minutes:g} minutes"
        print(f"\n{title}, {about}", flush=True)
        began = time.monotonic()
        problem = _measure(step, place) or what_is_missing(step, place.json, place)
        run.took_s[step.name] = time.monotonic() - began
        if problem:
            run.failed[step.name] = problem
        print(f"{title}: {'FAILED, ' + problem if problem else 'done'} after {run.took_s[step.name]:.0f} s", flush=True)
    return run


def _measure(step: Step, place: Place) -> str:
    """Runs one step and returns why it failed, or "" when every command ended well."""
    for name in step.results:
        place.json(name).unlink(missing_ok=True)
    try:
        for command in step.commands(place):
            words = [str(part) for part in command]
            limit_s = max(LEAST_S, PATIENCE * 60 * step.minutes)
            code = subprocess.run(words, cwd=ROOT, check=False, timeout=limit_s, env=os.environ | ENVIRONMENT).returncode
            if code:
                return f"exit status {code} of {' '.join(words[1:5])} ..."
    except subprocess.TimeoutExpired as error:
        return f"no end after {error.timeout:.0f} s"
    except Exception as error:  # noqa: BLE001 - making a model may fail as well; the other steps go on
        return f"{type(error).__name__}: {error}"
    return ""


def is_there(step: Step, place: Place) -> bool:
    """Says whether a step need not be measured: its results are among those of this run, or
    recorded.
    """
    return not what_is_missing(step, place.json, place) or not what_is_missing(step, _recorded, place)


def _recorded(name: str) -> Path:
    return RESULTS / f"{name}.json"


def what_is_missing(step: Step, file_of: Callable[[str], Path], place: Place) -> str:
    """Says which result of a step is not in its file, incomplete or of other sources, or "" when
    all are as they should be.
    """
    for name in step.results:
        try:
            found = json.loads(file_of(name).read_text(encoding="utf-8"))
        except FileNotFoundError:
            return f"{name}.json was not written"
        except ValueError:
            return f"{name}.json is not JSON"
        if not found.get("complete"):
            return f"{name}.json is incomplete"
        if not place.is_quick and (found.get("dirty") or not is_of_head(ROOT, found, step)):
            return f"{name}.json is of other sources"
    return ""


def publish(steps: Sequence[Step], place: Place) -> None:
    """Copies results to bench/results, draws their plots and writes the documents."""
    for step in steps:
        if what_is_missing(step, place.json, place):
            continue  # recorded already
        for name in step.results:
            write(_recorded(name), with_trees(read_result(place.json(name)), step))
        for name, picture, is_timeline in step.plots:
            options = ["--timeline"] if is_timeline else []
            plot = [
                sys.executable,
                "-m",
                "dflash_moe",
                "bench",
                "plot",
                RESULTS / f"{name}.json",
                "--out",
                RESULTS / picture,
                *options,
            ]
            subprocess.run([str(part) for part in plot], cwd=ROOT, check=True, timeout=LEAST_S)
    subprocess.run([sys.executable, "-m", "bench.documents"], cwd=ROOT, check=True, timeout=LEAST_S)


def _show_plan(steps: Sequence[Step], place: Place, commit: str, given: argparse.Namespace) -> None:
    left = [step for step in steps if not step.lacking() and (given.again or not is_there(step, place))]
    minutes = sum(step.minutes for step in left)
    print(f"{len(steps)} steps at commit {commit[:10]}, {len(left)} to measure: about {minutes:.0f} minutes")
    for step in steps:
        state = f"{step.minutes:4g} min" if step in left else "  there  "
        state = "left out" if step.lacking() else state
        reason = f"this machine lacks {step.lacking()}" if step.lacking() else step.note()
        print(f"  {state:>9}  {step.name:14} {', '.join(step.results)}{'; ' + reason if reason else ''}")
    print(f"  {CARDS}", flush=True)


def _show_outcome(run: Run) -> None:
    print(f"\n{len(run.took_s) - len(run.failed)} steps measured in {sum(run.took_s.values()) / 60:.0f} minutes")
    for name, seconds in run.took_s.items():
        print(f"  {seconds:6.0f} s  {name}")
    for name in run.kept:
        print(f"    there  {name}")
    for name, reason in run.left_out.items():
        print(f" left out  {name}: {reason}")
    for name, problem in run.failed.items():
        print(f"   FAILED  {name}: {problem}")


def _chosen(only: str) -> list[Step]:
    known = {step.name: step for step in STEPS}
    wanted = [name.strip() for name in only.split(",") if name.strip()]
    if unknown := [name for name in wanted if name not in known]:
        raise SystemExit(f"--only {unknown[0]}: no such step; there are {', '.join(known)}")
    return [known[name] for name in wanted] or list(STEPS)


def _arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="comma-separated names of steps [all]")
    parser.add_argument("--again", action="store_true", help="measure also what is there already")
    parser.add_argument("--quick", action="store_true", help="tiny parameters, into build/results_quick")
    parser.add_argument("--list", action="store_true", help="show the plan and end")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
