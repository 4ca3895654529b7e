"""Whether the simulator finds bugs that are planted on purpose: each is one change in a copy of one
source of the product, for which a simulator of its own is linked.

    python -m bench.campaigns.planted_bugs [--bugs NAME,...] [--seeds 600] [--out FILE]

Needs build/core as `make` leaves it. Prints per bug the first seed that finds it, and what it says.
The exit status is 1 where a bug is not found. A few minutes.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from dflash_moe.bench.results import BenchResult

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 30.0  # virtual ones of each seed in which things break
_LIMIT_S = 600.0  # of real time for all seeds of one bug
# Runs seeds until one breaks a rule, and says before each which it is: a bug may also crash.
_RUNNER = """
import importlib.machinery, importlib.util, json, sys
path, first, count, seconds = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])
loader = importlib.machinery.ExtensionFileLoader("_simulation", path)
module = importlib.util.module_from_spec(importlib.util.spec_from_loader("_simulation", loader))
loader.exec_module(module)
from dflash_moe.cli.simulate import SimulatedMembers
for seed in range(first, first + count):
    print(json.dumps({"seed": seed}), flush=True)
    report = module.simulate(seed, seconds, SimulatedMembers)
    if report.violations:
        print(json.dumps({"seed": seed, "violation": report.violations[0]}), flush=True)
        break
else:
    print(json.dumps({"seed": None}), flush=True)
"""


@dataclass(frozen=True, slots=True)
class Bug:
    """A change that breaks a rule: in `source`, the only `good` becomes `bad`."""

    name: str
    what: str
    source: str
    good: str
    bad: str


@dataclass(frozen=True, slots=True)
class Finding:
    """Which seed finds a bug, None where none does, how it shows, and the time that it took."""

    bug: str
    seed: int | None
    shown: str
    elapsed_s: float


_ANSWERS, _PATH, _SENDING = "csrc/client/answers.cc", "csrc/client/path.cc", "csrc/client/sending.cc"
_LOSSES, _REMEDIES = "csrc/client/losses.cc", "csrc/client/remedies.cc"
_ENGINE = "csrc/client/engine.cc"
_TURNS, _MERGED, _PIECES = "csrc/store/compute_turns.cc", "csrc/worker/merged_batch.cc", "csrc/worker/pieces.cc"

BUGS = {
    bug.name: bug
    for bug in (
        Bug(
            "slot_reused_early", "a slot is free as soon as its call has ended, whether its reply came or not",
            _PATH, "  slots_[slot].quarantine = kept;\n  ++num_quarantined_;\n", "  static_cast<void>(kept);\n",
        ),
        Bug(
            "quarantine_forgotten", "a late reply does not give its slot back",
            _ANSWERS, "  link.release(slot, crew_.clock);\n  link.tell_if_idle();\n",
            "  link.tell_if_idle();\n",
        ),
        Bug(
            "attempt_not_compared", "a reply to another attempt passes for the one that is awaited",
            _ANSWERS, "         header.attempt == attempt.number &&\n", "",
        ),
        Bug(
            "generation_not_compared", "a frame of a former path passes",
            _ANSWERS, "decoded.value().generation != path.generation() ||\n      ", "",
        ),
        Bug(
            "call_not_compared", "a reply is taken by its slot alone, whichever call it names",
            _ANSWERS, "return header.call_id == slice.call->id && header.layer == plan.layer &&",
            "return header.layer == plan.layer &&",
        ),
        Bug(
            "checksum_skipped", "rows are taken without comparing their checksum",
            _ANSWERS, "sum.finish() != header.payload_checksum || ", "",
        ),
        Bug(
            "requeued_although_under_way", "a slice that another holder is still asked for is sent a third time",
            _LOSSES, "    if (--slice->num_in_flight == 0) {\n      taken.push_back(slice);\n    } else {",
            "    --slice->num_in_flight;\n    taken.push_back(slice);\n    if (slice->num_in_flight > 0) {",
        ),
        Bug(
            "loss_ends_calls", "a lost worker ends its calls although another holder is there",
            _LOSSES, "    calls_.make_homeless(*slice, link);\n    slice->troubles->add(std::move(error));\n",
            "    if (!slice->call->is_done) calls_.fail(*slice->call, std::move(error));\n",
        ),
        Bug(
            "superseded_not_detached", "the reply of the slower holder is taken too",
            _ANSWERS, "    for (const auto& other : crew_.links) other->supersede(slice);\n", "",
        ),
        Bug(
            "deadlines_not_judged", "calls do not end at their deadline",
            _LOSSES, "return now >= call->deadline_ns;", "return now >= call->deadline_ns + 100'000'000;",
        ),
        Bug(
            "hedges_not_counted", "bytes of second requests are in no counter",
            _SENDING, "    ++counters.hedges;\n    counters.hedge_request_bytes += message_bytes.value();\n", "",
        ),
        Bug(
            "refusal_ends_calls", "a refusal that is not about the numbers ends the call although another holder could answer",
            _ANSWERS, "  if (is_range) return calls_.fail(call, std::move(error));",
            "  return calls_.fail(call, std::move(error));",
        ),
        Bug(
            "holders_left_unasked", "at its deadline a call fails although a holder was not asked yet",
            _LOSSES, "    if (remedies_.ask_untried(*call, now)) continue;\n", "",
        ),
        Bug(
            "hedges_without_budget", "second requests for slices that are merely slow need no token",
            _REMEDIES, "(!link.is_suspect() && !hedge_budget_.spend())",
            "(!link.is_suspect() && (hedge_budget_.spend(), false))",
        ),
        Bug(
            "hang_up_unheard", "the end of a worker's pulses says nothing",
            "csrc/client/liveness.cc", '    failure = "hung up";\n', "",
        ),
        Bug(
            "stall_ignored", "a worker that shows no progress is suspected and never lost",
            _LOSSES, "if (link.liveness.is_stalled(now, crew_.options.stall_timeout_ns)) {\n    const",
            "if (link.liveness.is_stalled(now, 1000 * crew_.options.stall_timeout_ns)) {\n    const",
        ),
        Bug(
            "silence_ignored", "a worker that answers nothing is suspected and never lost",
            _LOSSES, "  if (lasts(2)) {", "  if (lasts(2000)) {",
        ),
        Bug(
            "pulse_ends_silence", "a pulse lifts the suspicion that a worker answers nothing",
            _LOSSES, "  judge_silence(link, now);\n",
            "  if (!link.liveness.is_stalled(now, kTickNs)) link.hear(now);\n  judge_silence(link, now);\n",
        ),
        Bug(
            "path_ends_silence", "a fresh data path lifts the suspicion that a worker answers nothing",
            _ENGINE, "  link.renew(std::move(path), crew_.now(), crew_.options.call_timeout_ns);\n",
            "  link.renew(std::move(path), crew_.now(), crew_.options.call_timeout_ns);\n  link.hear(crew_.now());\n",
        ),
        Bug(
            "absence_counts", "time in which nobody looked at what had arrived counts against workers",
            _ENGINE, "  crew_.clock.look(began);\n",
            "  const int64_t from = crew_.clock.at_last_look() == 0 ? began : began - 20'000'000'000;\n"
            "  for (int64_t at = from; at < began; at += kTickNs) crew_.clock.look(at);\n  crew_.clock.look(began);\n",
        ),
        # Those that only two hosts at one worker show.
        Bug(
            "scattered_to_the_first", "every piece of a batch of several hosts gets the rows of the first",
            _MERGED, "    from += bytes;\n", "",
        ),
        Bug(
            "any_company", "rows for another shard are computed with this one",
            _TURNS, "         other.piece_->shard == piece_->shard &&\n", "",
        ),
        Bug(
            "company_forgotten", "who was computed with another one's piece is not told",
            _TURNS, "    other->place_ = Place::kComputed;\n", "",
        ),
        Bug(
            "pieces_not_cut", "a long request is computed whole although another host waits",
            _PIECES, "  if (ids.size() <= most) {", "  if (num_left > 0) {",
        ),
    )
}  # fmt: skip


def plant(bug: Bug, build: Path, place: Path) -> Path:
    """Links a simulator with the bug below `place`, and returns the extension's path. Raises
    ValueError where the source does not have the passage exactly once, CalledProcessError where it
    does not compile.
    """
    source = ROOT / bug.source
    text = source.read_text(encoding="utf-8")
    if text.count(bug.good) != 1:
        raise ValueError(f"{bug.name}: {bug.source} has the passage {text.count(bug.good)} times; the bug needs another one")
    place.mkdir(parents=True, exist_ok=True)
    changed, compiled = place / source.name, place / f"{source.stem}.o"
    changed.write_text(text.replace(bug.good, bug.bad), encoding="utf-8")
    _run([*_compiler(build, source), "-Wno-error", "-c", str(changed), "-o", str(compiled)], build)
    return _link(build, compiled, place)


def find(bug: Bug, build: Path, place: Path, num_seeds: int) -> Finding:
    """Plants a bug and runs seeds from 1 until one finds it."""
    began = time.monotonic()
    extension = plant(bug, build, place)
    arguments = [sys.executable, "-c", _RUNNER, str(extension), "1", str(num_seeds), str(SECONDS)]
    run = subprocess.run(arguments, capture_output=True, text=True, timeout=_LIMIT_S, check=False)
    last = json.loads(run.stdout.splitlines()[-1])
    shown = last.get("violation", "not found")
    if run.returncode != 0:
        said = run.stderr.strip().splitlines()
        shown = f"the process ends with {run.returncode}: {said[-1] if said else 'no message'}"
    return Finding(bug.name, last["seed"], shown, time.monotonic() - began)


def _compiler(build: Path, source: Path) -> list[str]:
    """Returns how the build compiles a source, without the source and its outputs."""
    commands = json.loads((build / "compile_commands.json").read_text(encoding="utf-8"))
    command = next(shlex.split(entry["command"]) for entry in commands if Path(entry["file"]).resolve() == source)
    kept: list[str] = []
    skip = False
    for word in command:
        if skip or word in {"-c", "-MD", str(source)}:
            skip = False
        elif word in {"-o", "-MT", "-MF"}:
            skip = True
        else:
            kept.append(word)
    return kept


def _link(build: Path, compiled: Path, place: Path) -> Path:
    """Links the simulator's objects, then the changed one, then the libraries."""
    lines = _run(["ninja", "-t", "commands", "_simulation"], build).splitlines()
    words = shlex.split(next(line for line in reversed(lines) if " -shared " in line))
    output = words[words.index("-o") + 1]
    target = place / Path(output).name
    end = words.index("&&", words.index("-o"))
    start = words.index("&&") + 1 if "&&" in words[: words.index("-o")] else 0
    command = [str(target) if word == output else word for word in words[start:end]]
    first_library = next(i for i, word in enumerate(command) if word.endswith(".a"))
    command.insert(first_library, str(compiled))
    _run(command, build)
    return target


def _run(command: list[str], directory: Path) -> str:
    return subprocess.run(command, cwd=directory, capture_output=True, text=True, timeout=_LIMIT_S, check=True).stdout


def main() -> int:
    """Does what the module text says, and returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bugs", default=",".join(BUGS), help="comma-separated [all]")
    parser.add_argument("--seeds", type=int, default=600, help="how many each bug gets [600]")
    parser.add_argument("--out", type=Path, help="result file [none]")
    arguments = parser.parse_args()
    findings = []
    for name in arguments.bugs.split(","):
        finding = find(BUGS[name], ROOT / "build" / "core", ROOT / "build" / "planted" / name, arguments.seeds)
        findings.append(finding)
        print(f"{name:>28}: seed {finding.seed}, {finding.elapsed_s:.0f} s: {finding.shown}", flush=True)
    if arguments.out is not None:
        rows = [{"name": f.bug, "what": BUGS[f.bug].what, "seed": f.seed, "shown": f.shown} for f in findings]
        params = {"seeds": arguments.seeds, "seconds_each": SECONDS}
        BenchResult("planted_bugs", params, rows=rows, complete=True).write(arguments.out)
    return 0 if all(finding.seed is not None for finding in findings) else 1


if __name__ == "__main__":
    sys.exit(main())
