"""The harness: rounds interleave and rotate, every sample is kept, whatever ends a bench early
leaves its samples marked.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass, field

import pytest

from dflash_moe.bench.harness import EXIT_TERMINATED, Recorder, run_rounds
from dflash_moe.bench.results import read_result, timing_fields
from dflash_moe.errors import WorkerLost


@dataclass
class Counting:
    """A case whose n-th sample is n; writes what happened into a shared log."""

    label: str
    log: list
    rounds: int | None = None
    fails_at: tuple[int, BaseException] | None = None
    samples: list[float] = field(default_factory=list)
    measured: int = 0

    def measure(self, *, keep):
        self.measured += 1
        self.log.append((self.label, keep))
        if self.fails_at is not None and self.measured == self.fails_at[0]:
            raise self.fails_at[1]
        if keep:
            self.samples.append(float(self.measured))

    def row(self):
        return {"name": self.label, **timing_fields(self.samples)} if self.samples else None


class Said:
    def __init__(self):
        self.lines, self.steps = [], []

    def say(self, line):
        self.lines.append(line)

    def advance(self, done, total, label):
        self.steps.append((done, total))


@pytest.fixture
def recorder(tmp_path):
    recorder = Recorder(tmp_path / "out.json", Said())
    recorder.begin("prefill", {})
    return recorder


def test_every_case_is_measured_in_every_round_after_a_warm_up_that_is_not_kept(recorder):
    log = []
    cases = [Counting(label, log) for label in "abc"]
    with recorder.recording():
        run_rounds(recorder, cases, rounds=4)
    assert [sorted(label for label, _ in log[start : start + 3]) for start in range(0, 15, 3)] == [["a", "b", "c"]] * 5
    assert [keep for _, keep in log] == [False] * 3 + [True] * 12
    # another case comes first in every round
    assert {log[start][0] for start in range(3, 15, 3)} == {"a", "b", "c"}
    result = read_result(recorder.path)
    assert result["complete"] is True
    assert result["interleaved"] is True
    assert {row["name"]: row["samples_s"] for row in result["rows"]} == dict.fromkeys("abc", [2.0, 3.0, 4.0, 5.0])
    assert recorder.reporter.steps[-1] == (15, 15)


def test_a_slow_case_may_have_fewer_rounds(recorder):
    log = []
    with recorder.recording():
        run_rounds(recorder, [Counting("slow", log, rounds=2), Counting("quick", log)], rounds=5)
    assert [len(row["samples_s"]) for row in recorder.result.rows] == [2, 5]
    assert recorder.reporter.steps[-1] == (9, 9)


def test_rows_of_an_earlier_group_stay(recorder):
    with recorder.recording():
        run_rounds(recorder, [Counting("first", [])], rounds=1, warmup=0)
        run_rounds(recorder, [Counting("second", [])], rounds=1, warmup=0)
    assert [row["name"] for row in read_result(recorder.path)["rows"]] == ["first", "second"]


@pytest.mark.parametrize(
    ("error", "said"),
    [(KeyboardInterrupt(), "Ctrl-C"), (WorkerLost("worker w0 is lost"), "WorkerLost"), (OSError(5, "x"), "OSError")],
)
def test_an_error_keeps_all_samples_marked_incomplete_and_goes_on(recorder, error, said):
    log = []
    # third time: its second kept sample
    cases = [Counting("a", log), Counting("b", log, fails_at=(3, error))]
    with pytest.raises(type(error)), recorder.recording():
        run_rounds(recorder, cases, rounds=5)
    result = read_result(recorder.path)
    assert result["complete"] is False
    assert result["ended_by"] == said
    kept = {row["name"]: len(row["samples_s"]) for row in result["rows"]}
    assert kept["b"] == 1
    assert kept["a"] == len([keep for label, keep in log if label == "a" and keep])
    assert str(recorder.path) in recorder.reporter.lines[-1]
    assert "incomplete" in recorder.reporter.lines[-1]


def test_the_file_is_current_after_every_round(recorder):
    seen = []

    class Reader(Counting):
        def measure(self, *, keep):
            if self.samples:
                found = read_result(recorder.path)
                seen.append((found["complete"], len(found["rows"][0]["samples_s"])))
            super().measure(keep=keep)

    with recorder.recording():
        run_rounds(recorder, [Reader("a", [])], rounds=3)
    assert seen == [(False, 1), (False, 2)]


def test_sigterm_leaves_through_the_with_blocks_and_keeps_the_samples(recorder):
    class Terminated(Counting):
        def measure(self, *, keep):
            super().measure(keep=keep)
            if len(self.samples) == 2:
                os.kill(os.getpid(), signal.SIGTERM)

    former = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as caught, recorder.recording():
        run_rounds(recorder, [Terminated("a", [])], rounds=5)
    assert caught.value.code == EXIT_TERMINATED
    assert signal.getsignal(signal.SIGTERM) is former
    result = read_result(recorder.path)
    assert (result["complete"], result["ended_by"]) == (False, "SIGTERM")


def test_a_disk_that_fills_up_is_the_error_and_the_last_round_stays(recorder, monkeypatch):
    class FullAfterTwo(Counting):
        def measure(self, *, keep):
            super().measure(keep=keep)
            if len(self.samples) == 3:
                monkeypatch.setattr(recorder.result.__class__, "write", fail)

    def fail(*_):
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"), recorder.recording():
        run_rounds(recorder, [FullAfterTwo("a", [])], rounds=5)
    assert read_result(recorder.path)["rows"][0]["samples_s"] == [2.0, 3.0]
    assert "cannot be written (No space left on device)" in recorder.reporter.lines[-1]


def test_nothing_measured_writes_no_file(recorder):
    with pytest.raises(KeyboardInterrupt), recorder.recording():
        raise KeyboardInterrupt
    assert not recorder.path.exists()
    assert "before anything was measured" in recorder.reporter.lines[-1]
