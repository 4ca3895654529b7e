"""What every Python test gets: the check for leaks and the named marks. Skips are counted aloud,
and a run that skipped every test fails.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Iterator

import hypothesis
import pytest

from tests import leaks
from tests.markers import MARKS

# Threads of torch that wait spin by default, which takes the cores of the workers for milliseconds
# in each layer. torch reads this when it loads, so that it is set before any test imports torch.
# `make test` sets it to the same.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# Nor do the many processes that import numpy need a thread of its library for each core.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
# No test depends on the options of whoever runs it.
os.environ["DFLASH_MOE_CONFIG"] = "none"
# Nor does any touch what that person keeps on disk. A test of the cache names a folder of its own.
os.environ["DFLASH_MOE_CACHE_PATH"] = "none"

# On two shared cores a pause of the machine is no property of an input. So an example has no
# deadline, and its speed is not checked.
hypothesis.settings.register_profile(
    "shared_cores", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow], print_blob=True
)
hypothesis.settings.load_profile("shared_cores")


# A shell that starts the run in the background has it and its programs ignore Ctrl-C, and the tests
# of that would wait in vain.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--require", action="append", default=[], metavar="MARK", choices=sorted(MARKS),
        help="fail instead of skipping where the machine lacks what MARK names",
    )  # fmt: skip


def pytest_configure(config: pytest.Config) -> None:
    for name, mark in MARKS.items():
        config.addinivalue_line("markers", f"{name}: {mark.description}")


def pytest_runtest_setup(item: pytest.Item) -> None:
    for marker in item.iter_markers():
        mark = MARKS.get(marker.name)
        reason = mark.probe() if mark else None
        if reason and marker.name in item.config.getoption("--require"):
            pytest.fail(f"--require {marker.name}: {reason}", pytrace=False)
        if reason:
            pytest.skip(reason)


@pytest.fixture(autouse=True)
def _nothing_left_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fails a test that leaves a process, a segment, a socket or a name behind.

    Fixtures of wider scope exist before the snapshot, so that a runtime which a module shares is no
    leak of its first test.
    """
    before = leaks.take()
    yield
    found = leaks.leaks_since(before)
    if found:
        pytest.fail("left behind: " + "; ".join(found), pytrace=False)


@pytest.fixture(scope="session", autouse=True)
def _no_process_outlives_the_run() -> Iterator[None]:
    before = leaks.take()
    yield
    lines = [line for line in leaks.leaks_since(before) if line.startswith("process ")]
    if lines:
        pytest.fail("left behind by the run: " + "; ".join(lines), pytrace=False)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Prints skips by reason, most frequent first."""
    skipped = terminalreporter.stats.get("skipped", [])
    reasons = Counter(str(report.longrepr[2]) if isinstance(report.longrepr, tuple) else "?" for report in skipped)
    for reason, count in reasons.most_common():
        terminalreporter.write_line(f"skipped {count}: {reason.removeprefix('Skipped: ')}")


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """A run in which every test was skipped tested nothing, and says so by failing."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if reporter is None or exitstatus != pytest.ExitCode.OK:
        return
    num_skipped = len(reporter.stats.get("skipped", []))
    num_run = sum(len(reporter.stats.get(outcome, [])) for outcome in ("passed", "failed", "xfailed", "xpassed", "error"))
    if num_skipped and not num_run:
        reporter.write_line(f"all {num_skipped} tests were skipped: nothing was tested", red=True)
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
