"""Whether the tests find bugs that are planted on purpose: each is one change of one passage of the
product, for which the tests are run that should fail.

    python bench/campaigns/bugs_against_tests.py [--bugs NAME,...] [--limit-s 300]

Passages and tests are searched for by their text and names, wherever files lie, and spaces and line
breaks of a passage do not count. So a bug can be planted again after code was moved. Where its
passage is gone the bug is not applicable; its sentence says what to plant instead.

Needs what `make` leaves, and doctest. All happens in a tree of the latest commit below build/bugs,
which is removed at the end. The tests have to pass there before anything is planted. The exit
status is 1 where a bug is not caught or not applicable. About half an hour.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pybind11

from dflash_moe.version import __version__

ROOT = Path(__file__).resolve().parents[2]
TREE = ROOT / "build" / "bugs"
# As deep below the sources as the Makefile's folders are, so that a compiler's cache knows them.
OBJECTS = TREE / "build" / "objects"
_BUILD_LIMIT_S = 3600.0


@dataclass(frozen=True, slots=True)
class Bug:
    """A change that some test should find: the only `good` below dflash_moe and csrc becomes `bad`.

    `tests` are Python files by their stem, Python test functions, or rooms of tests/csrc.
    """

    name: str
    room: str
    what: str
    good: str
    bad: str
    tests: tuple[str, ...]


BUGS = {
    bug.name: bug
    for bug in (
        # -- the way of a call
        Bug(
            "duplicates_reversed", "experts",
            "an expert that a token names twice is summed in the other order",
            "before.local_expert_id <= pair.entry.local_expert_id",
            "before.local_expert_id < pair.entry.local_expert_id",
            ("client",),
        ),
        Bug(
            "slice_end_late", "experts",
            "combining goes to the next slice of a shard one row too late",
            "if (row == slice->row_end) ++slice;", "if (row > slice->row_end) ++slice;",
            ("client",),
        ),
        Bug(
            "weights_of_other_rows", "experts",
            "the routing weights of a slice begin at the number of its first row, not at "
            "that of its first pair", "rows.weights.data() + slice.pair_begin",
            "rows.weights.data() + slice.row_begin",
            ("client", "test_every_mode_gives_the_same_bits_with_its_own_number_of_calls"),
        ),
        Bug(
            "one_sleeper_woken", "experts",
            "whoever gives the turn back wakes one of those who sleep for it, not all",
            "released_.notify_all();", "released_.notify_one();", ("client",),
        ),
        Bug(
            "worst_clock_kept", "experts",
            "the clocks of host and worker are set by the longest exchange, not by the shortest",
            "if (link > best_now_.link_ns) return;", "if (link < best_now_.link_ns) return;",
            ("client",),
        ),
        Bug(
            "stride_of_the_original", "experts",
            "a copy that was made because of odd strides is read with the strides of the "
            "original", "hidden = hidden.contiguous() row_stride = in_size",
            "hidden = hidden.contiguous()", ("test_tensors",),
        ),
        Bug(
            "step_not_undone", "experts",
            "a device step is replayed by plain calls without taking back what it did so far",
            'self._count("replays") undo()', 'self._count("replays")', ("test_device_step_failover",),
        ),
        Bug(
            "ready_with_some_holders", "experts",
            "a shard counts as ready only where all of its holders serve, not one",
            'if not any(reports[place]["state"] in SERVING for place in places)',
            'if not all(reports[place]["state"] in SERVING for place in places)', ("test_readiness",),
        ),
        # -- who holds what
        Bug(
            "silence_remembered", "holders",
            "a worker that is lost and comes back is judged by its former silence",
            "void forget() { since_ns_ = before_ns_ = limit_ns_ = 0; }",
            "void forget() { limit_ns_ = 0; }",
            ("client", "simulation", "test_silent_workers"),
        ),
        Bug(
            "asked_twice_for_ever", "holders",
            "a slice whose second holder is lost still counts as asked twice",
            "slice->is_hedged = false;", "static_cast<void>(slice);", ("client",),
        ),
        Bug(
            "idle_too_early", "holders",
            "a worker that drains is told to be idle while it owes parts of a call",
            "Admission::kDraining && num_chunks == 0 && waiting.empty() && !owes()",
            "Admission::kDraining && waiting.empty()", ("client",),
        ),
        Bug(
            "last_resort_first", "holders",
            "the host's own processor is asked as soon as it has less to do than the workers",
            "if (link.is_last_resort) return 2;", "if (link.is_last_resort) return 0;",
            ("client", "test_host_fallback"),
        ),
        Bug(
            "former_attempts_heard", "holders",
            "what is said of an earlier attempt to start a worker counts for the latest",
            "if event.what in _OF_AN_ATTEMPT and event.attempt != self.attempt:",
            "if event.what in _OF_AN_ATTEMPT and event.attempt > self.attempt:",
            ("test_membership", "test_worker_keeper"),
        ),
        Bug(
            "suspicion_unheard", "holders",
            "that calls suspect a worker is not heard: the host stands in once it is lost",
            'event["kind"] == "suspect"', 'event["kind"] == "suspected"',
            ("test_a_frozen_worker_is_answered_for_before_it_is_given_up",),
        ),
        Bug(
            "holders_not_told", "holders",
            "calls are not told of the other holders that a shard has got",
            "tuple(workers) self._tell(where)", "tuple(workers)",
            (
                "test_a_worker_added_under_load_becomes_a_holder_of_all_that_fits",
                "test_the_last_holder_is_removed_only_by_force_and_another_one_takes_over",
            ),
        ),
        Bug(
            "end_of_removal_untold", "holders",
            "whoever waits until a removed worker is gone is not woken when it is",
            "kept.parting.gone(kept) with self._changed: self._changed.notify_all()",
            "kept.parting.gone(kept)",
            ("test_worker_keeper",),
        ),
        # -- a model's pass over paged memory
        Bug(
            "copied_block_kept", "forward",
            "the shared block that a copy has replaced is never given back",
            "self._pool.release(self.held_blocks)", "self._pool.num_free",
            ("test_sequence", "test_step_blocks"),
        ),
        Bug(
            "halves_rotated_alike", "forward",
            "the second half of a sequence stands at the positions of the first",
            "found.append((anything, first + skipped, stop - skipped))",
            "found.append((anything, first, stop - skipped))",
            ("test_half_steps",),
        ),
        Bug(
            "cut_before_the_block", "forward",
            "a step is cut a row before a block begins, so that both halves write a block",
            "np.flatnonzero(step.positions[1:] % BLOCK_TOKENS == 0) + 1",
            "np.flatnonzero(step.positions[1:] % BLOCK_TOKENS == 0)", ("test_half_steps",),
        ),
        Bug(
            "turns_not_awaited", "forward", "a half of a step computes before its turn has come",
            "lambda: self._turn == number", "lambda: self._turn <= number",
            ("test_two_halves", "test_micro_batches"),
        ),
        Bug(
            "one_position_too_long", "forward",
            "rotary tables are made for a sequence that is one token longer than it may be",
            "positions.clamp(max=length - 1), length - 1, arguments",
            "positions.clamp(max=length), length, arguments",
            ("test_rotary_tables", "test_prefix_lengths"),
        ),
        Bug(
            "logits_of_drafts_reversed", "forward",
            "the logits of several rows of one sequence come in the reverse order",
            "range(end - entry.num_logits, end)", "range(end - 1, end - 1 - entry.num_logits, -1)",
            ("test_drafts_change_no_bit",),
        ),
        Bug(
            "rewritten_block_found", "forward",
            "a published block that is written again is still found under its former hash",
            "self._cache.forget(shared)", "self._cache.has(shared)", ("test_prefix_cache",),
        ),
        # -- requests
        Bug(
            "epoch_outlives_preemption", "engine",
            "rows that were planned for a request before it was preempted are computed",
            "request.epoch += 1 self.num_preempted += 1", "self.num_preempted += 1",
            ("test_schedule", "test_engine_ahead", "test_bits_after_a_preemption_are_those_before"),
        ),
        Bug(
            "whole_prompt_cached", "engine",
            "of a prompt that is cached to its last token nothing is computed",
            "(len(request.tokens) - 1) // self._pool.block_tokens",
            "len(request.tokens) // self._pool.block_tokens",
            ("test_schedule",),
        ),
        Bug(
            "tokens_behind_the_end", "engine",
            "the tokens of a step that lie behind the one which ends a request are its too",
            "token_ids = outcome.token_ids[:taken]", "token_ids = outcome.token_ids",
            ("test_a_token_that_ends_a_request_among_its_drafts_ends_it", "test_engine_speculation"),
        ),
        Bug(
            "rejected_drafts_kept", "engine",
            "a sequence keeps the keys and values of drafts that were wrong",
            "rows.count + outcome.num_accepted", "rows.count + outcome.num_drafts",
            ("test_drafts_change_no_bit",),
        ),
        Bug(
            "queue_never_empties", "engine",
            "requests that the engine has taken still count as waiting in its queue",
            "self._num_submitted = 0 self._num_waiting +=", "self._num_waiting +=",
            ("test_delivery",),
        ),
        Bug(
            "last_words_lost", "engine",
            "what may be the beginning of a stop string is held back for ever when a text ends",
            "held = 0 if is_last else max(", "held = max(", ("test_text",),
        ),
        Bug(
            "plan_of_dropped_prefixes", "engine",
            "a step planned with cached blocks is computed after they were dropped",
            "self._ahead = None self._forward.blocks.forget_cached()",
            "self._forward.blocks.forget_cached()",
            ("test_engine_ahead",),
        ),
    )
}  # fmt: skip


def find_passage(tree: Path, passage: str) -> tuple[Path, tuple[int, int]] | str:
    """Returns the file that has a passage, and where, or why the passage means nothing."""
    pattern = re.compile(r"\s+".join(map(re.escape, passage.split())))
    found = [
        (path, match.span())
        for folder in ("dflash_moe", "csrc")
        for path in sorted((tree / folder).rglob("*"))
        if path.suffix in (".py", ".h", ".cc")
        for match in pattern.finditer(path.read_text(encoding="utf-8"))
    ]
    return found[0] if len(found) == 1 else f"its passage is there {len(found)} times"


def find_test(tree: Path, name: str) -> str:
    """Returns a test as pytest takes it, or the room of tests/csrc. Raises LookupError where the
    name means none, or several.
    """
    if (tree / "tests" / "csrc" / name).is_dir():
        return name
    files = sorted((tree / "tests").rglob("test_*.py"))
    found = [str(path.relative_to(tree)) for path in files if path.stem == name]
    if not found:
        function = re.compile(rf"^(?:async )?def {name}\(", re.MULTILINE)
        found = [f"{path.relative_to(tree)}::{name}" for path in files if function.search(path.read_text(encoding="utf-8"))]
    if not found:
        raise LookupError(f"no test is named {name}")
    return " ".join(found)


def plant(tree: Path, bug: Bug) -> tuple[Path, str] | str:
    """Plants a bug, and returns the changed file and its former text, or why that is impossible."""
    found = find_passage(tree, bug.good)
    if isinstance(found, str):
        return found
    path, (begin, end) = found
    text = path.read_text(encoding="utf-8")
    path.write_text(text[:begin] + bug.bad + text[end:], encoding="utf-8")
    return path, text


class Bench:
    """The tree, what is built of it, and the tests that run there."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._is_configured = False
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
        self._environment = os.environ | {
            "PATH": path,
            "PYTHONPATH": str(TREE),
            "CCACHE_BASEDIR": str(TREE),
            "CCACHE_NOHASHDIR": "1",
        }
        self.remove()
        subprocess.run(["git", "worktree", "add", "--quiet", "--detach", str(TREE), "HEAD"], cwd=ROOT, check=True, timeout=60)
        for built in [*(ROOT / "dflash_moe").glob("*.so"), ROOT / "dflash_moe" / "include"]:
            (shutil.copytree if built.is_dir() else shutil.copy2)(built, TREE / "dflash_moe" / built.name)

    def remove(self) -> None:
        """Removes the tree with all that was built in it."""
        if TREE.exists():
            subprocess.run(["git", "worktree", "remove", "--force", str(TREE)], cwd=ROOT, check=True, timeout=60)

    def build(self, target: str) -> bool:
        """Builds a target of the tree as it is now; returns whether it compiles."""
        if not self._is_configured:
            configure = ["cmake", "-S", str(TREE / "csrc"), "-B", str(OBJECTS), "-G", "Ninja", "-DCMAKE_BUILD_TYPE=Release",
                         "-DDFLASH_TESTS=ON", f"-DPython_EXECUTABLE={sys.executable}", "--log-level=WARNING",
                         f"-Dpybind11_DIR={pybind11.get_cmake_dir()}", f"-DDFLASH_VERSION={__version__}"]  # fmt: skip
            if shutil.which("ccache"):
                configure.append("-DCMAKE_CXX_COMPILER_LAUNCHER=ccache")
            subprocess.run(configure, env=self._environment, stdout=subprocess.DEVNULL, check=True, timeout=_BUILD_LIMIT_S)
            self._is_configured = True
        command = ["cmake", "--build", str(OBJECTS), "--target", target]
        built = subprocess.run(command, env=self._environment, capture_output=True, check=False, timeout=_BUILD_LIMIT_S)
        return built.returncode == 0

    def failure(self, names: Sequence[str], *, is_core_changed: bool) -> str:
        """Runs tests one after the other and returns what failed first; empty where all pass. Where
        the core was changed it is built anew for tests of Python. Raises LookupError for a test
        that is not there, RuntimeError for a core or a test that does not compile.
        """
        for name in names:
            test = find_test(TREE, name)
            if test == name:
                if not self.build(f"test_{name}"):
                    raise RuntimeError(f"test_{name} does not compile")
                command = [str(OBJECTS / f"test_{name}"), "--abort-after=1"]
            else:
                if is_core_changed:
                    self._build_core()
                command = [sys.executable, "-m", "pytest", "-x", "--tb=line", "-p", "no:cacheprovider", *test.split()]
            if said := self._run(command):
                return said
        return ""

    def _build_core(self) -> None:
        if not self.build("_core"):
            raise RuntimeError("the core does not compile")
        for built in OBJECTS.glob("_core.*.so"):
            (TREE / "dflash_moe" / built.name).unlink()
            shutil.copy2(built, TREE / "dflash_moe" / built.name)

    def restore_core(self) -> None:
        """Puts the core that `make` has built in the place of a changed one."""
        for built in (ROOT / "dflash_moe").glob("_core.*.so"):
            (TREE / "dflash_moe" / built.name).unlink()
            shutil.copy2(built, TREE / "dflash_moe" / built.name)

    def _run(self, command: list[str]) -> str:
        process = subprocess.Popen(command, cwd=TREE, env=self._environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                                   text=True, errors="replace", start_new_session=True)  # fmt: skip
        try:
            said, _ = process.communicate(timeout=self._limit_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            return f"{Path(command[0]).name if len(command) < 3 else command[-1]} hangs"
        if process.returncode == 0:
            return ""
        failed = re.search(r"^(?:FAILED|ERROR) (\S+)|^TEST CASE: +(.*)", said, re.MULTILINE)
        return (failed[1] or failed[2]) if failed else f"exit status {process.returncode}"


def judge(bench: Bench, bug: Bug) -> tuple[bool, str]:
    """Plants one bug, runs its tests and takes it out again. Returns whether it was caught, and by
    which test, or why not.
    """
    planted = plant(TREE, bug)
    if isinstance(planted, str):
        return False, f"not applicable: {planted}"
    path, text = planted
    is_core_changed = path.suffix != ".py"
    try:
        failed = bench.failure(bug.tests, is_core_changed=is_core_changed)
    except (LookupError, RuntimeError) as error:
        return False, f"not applicable: {error}"
    finally:
        path.write_text(text, encoding="utf-8")
        if is_core_changed:
            bench.restore_core()
    return bool(failed), f"caught: {failed}" if failed else "not caught"


def main() -> int:
    """Does what the module text says, and returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bugs", default=",".join(BUGS), help="comma-separated [all]")
    parser.add_argument("--limit-s", type=float, default=300.0, help="seconds after which a test counts as hanging [300]")
    arguments = parser.parse_args()
    bugs = [BUGS[name] for name in arguments.bugs.split(",")]
    bench = Bench(arguments.limit_s)
    num_caught = 0
    try:
        for name in dict.fromkeys(name for bug in bugs for name in bug.tests):
            if failed := bench.failure([name], is_core_changed=False):
                print(f"{name} fails without any bug: {failed}", file=sys.stderr)
                return 2
        for bug in bugs:
            began = time.monotonic()
            is_caught, said = judge(bench, bug)
            num_caught += is_caught
            print(f"{bug.room:>8} {bug.name:>28} {time.monotonic() - began:5.0f} s  {said}", flush=True)
    finally:
        bench.remove()
    print(f"{num_caught} of {len(bugs)} bugs are caught")
    return 0 if num_caught == len(bugs) else 1


if __name__ == "__main__":
    sys.exit(main())
