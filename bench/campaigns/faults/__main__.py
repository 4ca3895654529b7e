"""Runs fault campaigns over the whole stack: real processes, supervised restarts.

    python -m bench.campaigns.faults [NAME ...] [--size N] [--quick] [--seed 0]
        [--out bench/results] [--events build/faults]

Without names all of them run. Each breaks something `--size` times (without it as often as is
recorded, with `--quick` as often as tests do) while calls are under way, and writes
OUT/fault_NAME.json and one JSON line for each event to EVENTS/fault_NAME.jsonl. What a seed draws
is the same in every run; when a signal arrives is up to the machine. A campaign that this machine
cannot run is named with the reason. Exit status 1 where something is not as it must be; times are
shown against their goals and decide nothing, since they are the machine's.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import argparse
import logging
import tempfile
from pathlib import Path

from bench.campaigns.faults import (
    all_dead,
    control_groups,
    crash_loop,
    damaged_files,
    failing_calls,
    kills,
    lossy_link,
    mode_changes,
    partitions,
    proxies,
    registrations,
    scribblers,
    soak,
    stops,
    strangers,
)
from bench.campaigns.faults.campaign import Campaign, Run
from dflash_moe.cli import options

ROOT = Path(__file__).resolve().parents[3]
MODULES = (
    kills, stops, all_dead, crash_loop, partitions, lossy_link, proxies, strangers, registrations, control_groups,
    damaged_files, scribblers, failing_calls, mode_changes, soak,
)  # fmt: skip
CAMPAIGNS: dict[str, Campaign] = {module.CAMPAIGN.name: module.CAMPAIGN for module in MODULES}


def main() -> int:
    """Does what the module text says, and returns the exit status."""
    given = _arguments()
    # Every loss is warned of, and thousands are meant to happen.
    logging.getLogger("dflash_moe").setLevel(logging.ERROR)
    is_clean = True
    for name in given.names or CAMPAIGNS:
        campaign = CAMPAIGNS[name]
        if reason := campaign.lacking():
            options.say(f"{name}: skipped: {reason}")
            continue
        size = given.size if given.size is not None else campaign.quick if given.quick else campaign.size
        options.say(f"{name}: {campaign.what}: {size} {campaign.unit}")
        run = run_campaign(campaign, size=size, seed=given.seed, events_file=given.events / f"fault_{name}.jsonl")
        run.write(given.out / f"fault_{name}.json")
        for line in shown(run):
            options.say(line)
        is_clean = is_clean and run.is_clean
    return 0 if is_clean else 1


def run_campaign(campaign: Campaign, *, size: int, seed: int = 0, events_file: Path | None = None) -> Run:
    """Runs one campaign in a folder that is gone afterwards. Events of a former run are
    replaced.
    """
    if events_file is not None:
        events_file.parent.mkdir(parents=True, exist_ok=True)
        events_file.unlink(missing_ok=True)
    with tempfile.TemporaryDirectory(prefix="dflash-fault-") as folder:
        run = Run.begin(campaign, size=size, seed=seed, folder=Path(folder))
        run.events_file = events_file
        campaign.run(run)
        return run


def shown(run: Run) -> list[str]:
    """Returns a line for each claim and goal that was not met, and one that sums up."""
    lines = [
        f"  {'FAILED' if one['decides'] else 'missed'}: {one['what']}: {one['value']:g}, "
        f"{'at most' if 'at_most' in one else 'at least'} {one.get('at_most', one.get('at_least')):g}"
        for one in run.result.summary
        if not one["met"]
    ]
    met = sum(one["met"] for one in run.result.summary)
    return [*lines, f"  {len(run.events)} events, {met} of {len(run.result.summary)} claims and goals met"]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.campaigns.faults", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", choices=[[], *CAMPAIGNS], metavar="NAME", help=f"of {', '.join(CAMPAIGNS)}")
    parser.add_argument("--size", type=int, help="how many events each campaign has [as recorded]")
    parser.add_argument("--quick", action="store_true", help="as few events as tests have")
    parser.add_argument("--seed", type=int, default=0, help="of all that is drawn [%(default)s]")
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "results", help="folder of the results [bench/results]")
    parser.add_argument("--events", type=Path, default=ROOT / "build" / "faults", help="folder of the events [build/faults]")
    return parser.parse_args()


if __name__ == "__main__":
    raise SystemExit(main())
