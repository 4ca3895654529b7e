"""Packed experts on disk that are damaged, cut off, exchanged or half written, writers that are
killed, disks that are full: every call has the bits of packed memory, every start succeeds, and
nothing half written stays.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import contextlib
import logging
import os
import resource
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dflash_moe import _core
from dflash_moe.errors import ConfigError, DflashError
from dflash_moe.experts.expert_runtime import ExpertRuntime
from dflash_moe.model.checkpoint import Checkpoint
from dflash_moe.model.spec import ModelSpec
from dflash_moe.store.folder import PANELS, TEMPORARY_NAME
from dflash_moe.store.panel_store import PanelStore
from dflash_moe.topology import Topology
from tests.expert_cases import call, expected_of, make_checkpoint, tiny_spec
from tests.fault.conftest import FAR, StartWorker, flip_a_bit, kill, state_of, wait_until

# A busy machine does in much less what is waited for here.
BACK_S = 90.0
# So many files are written where a writer is to be killed in between.
NUM_LAYERS = 10
Outputs = list[np.ndarray]


def text_of(*, address: str = "", layout: str = "stored", workers: int = 1) -> str:
    where = f", address: '{address}'" if address else ""
    rows = [f"  - {{name: w{one}, threads: 1, weights_layout: {layout}{where}}}\n" for one in range(workers)]
    return "version: 1\nworkers:\n" + "".join(rows)


def start(
    spec: ModelSpec, cache: Path, *, address: str = "", layout: str = "stored", workers: int = 1, **overrides: Any
) -> ExpertRuntime:
    settings = {"cache_path": cache, "audit_cpu": "off", **FAR, **overrides}
    topology = Topology.parse(text_of(address=address, layout=layout, workers=workers))
    return ExpertRuntime.start(topology, model=spec, **settings)


def outputs(runtime: ExpertRuntime) -> Outputs:
    return [call(runtime, layer=layer.index) for layer in runtime.layers]


def packed_outputs(spec: ModelSpec, cache: Path, workers: int = 1) -> Outputs:
    """What so many workers compute that know of no files."""
    with start(spec, cache, layout="packed", workers=workers) as runtime:
        return outputs(runtime)


def are_equal(found: Outputs, expected: Outputs) -> bool:
    return all(np.array_equal(one, other) for one, other in zip(found, expected, strict=True))


def counted(runtime: ExpertRuntime, worker: str = "w0") -> dict[str, int]:
    return runtime.worker_stats()[worker]


def settle(runtime: ExpertRuntime) -> None:
    """Waits until all that was packed is on disk."""
    assert wait_until(lambda: all(one["panel_shards_left"] == 0 for one in runtime.worker_stats().values()), BACK_S)


def files(cache: Path) -> list[Path]:
    return sorted((cache / PANELS).glob("*.panels"))


def damaged(cache: Path) -> list[Path]:
    return sorted((cache / PANELS).glob("*.damaged"))


def fill(spec: ModelSpec, cache: Path, **terms: Any) -> list[Path]:
    """Starts once, so that all panels are on disk."""
    with start(spec, cache, **terms) as runtime:
        settle(runtime)
    return files(cache)


@contextlib.contextmanager
def writable(path: Path) -> Iterator[None]:
    os.chmod(path, 0o600)
    yield
    os.chmod(path, 0o400)


def flip(path: Path) -> None:
    """Changes a bit in the middle of a file, which is inside of some expert."""
    with writable(path), path.open("r+b") as file:
        file.seek(path.stat().st_size // 2)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 0x40]))


def cut(path: Path) -> None:
    with writable(path):
        os.truncate(path, path.stat().st_size // 2)


@pytest.fixture(scope="module")
def expected(spec: ModelSpec, tmp_path_factory: pytest.TempPathFactory) -> Outputs:
    return packed_outputs(spec, tmp_path_factory.mktemp("none"))


@pytest.fixture(scope="module")
def expected_of_two(spec: ModelSpec, tmp_path_factory: pytest.TempPathFactory) -> Outputs:
    return packed_outputs(spec, tmp_path_factory.mktemp("none"), workers=2)


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def test_a_second_start_maps_what_the_first_has_written(spec: ModelSpec, cache: Path, expected_of_two: Outputs) -> None:
    with start(spec, cache, workers=2) as runtime:
        settle(runtime)
        assert are_equal(outputs(runtime), expected_of_two)
        whole = sum(counted(runtime, name)["panel_bytes_mapped"] for name in ("w0", "w1"))
        assert whole >= sum(layer.num_experts * layer.expert_bytes for layer in spec.layers)
    with start(spec, cache, workers=2) as runtime:
        for name in ("w0", "w1"):
            found = counted(runtime, name)
            assert (found["resident_weight_bytes"], found["panel_bytes_written"], found["panel_shards_left"]) == (0, 0, 0)
            assert found["panel_bytes_mapped"] > 0
        assert are_equal(outputs(runtime), expected_of_two)
        assert np.array_equal(call(runtime), expected_of(runtime))


class Notices(logging.Handler):
    """Keeps what people are told."""

    def __init__(self) -> None:
        super().__init__()
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())


def test_a_start_that_writes_says_so_once(spec: ModelSpec, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    heard = Notices()
    notices = logging.getLogger("dflash_moe.notices")
    monkeypatch.setattr(notices, "handlers", [heard])
    before = notices.level
    notices.setLevel(logging.INFO)
    # While nobody else may write, the worker is still about to.
    holder = PanelStore.open(cache, max_bytes=None, allow_network=False)
    with holder.folder.writing(lambda: False), start(spec, cache, workers=2):
        pass
    holder.close()
    first = list(heard.said)
    fill(spec, cache)
    heard.said.clear()
    fill(spec, cache, workers=2)
    notices.setLevel(before)
    assert first == [
        f"packed experts are written to {cache} meanwhile, about 1.1 MiB as far as that fits, so that the next start maps "
        "them; DFLASH_MOE_CACHE_PANELS=off keeps none"
    ]
    assert heard.said == []


# -- writers that are killed -----------------------------------------------------------------------


@pytest.mark.parametrize("kills", [20, pytest.param(200, marks=pytest.mark.long)])
@pytest.mark.timeout(600)
def test_a_worker_that_is_killed_while_it_writes_leaves_no_trace(tmp_path: Path, cache: Path, kills: int) -> None:
    spec = tiny_spec(make_checkpoint(tmp_path / "model", num_layers=NUM_LAYERS), num_layers=NUM_LAYERS)
    expected = packed_outputs(spec, cache)
    restarts = {"restart_backoff_ms": (1.0, 1.0), "restart_deaths": 10_000, "park_s": BACK_S}
    writing_s, num_cut_short = 0.0, 0
    with start(spec, cache, **restarts) as runtime:
        for number in range(kills):
            begun = time.monotonic()
            if number == 0:
                settle(runtime)
                writing_s = time.monotonic() - begun
            else:
                # Where exactly in the writing that is, nobody has to know.
                threading.Event().wait(writing_s * number / kills)
            kill(runtime, "w0")
            assert wait_until(partial(has_died, runtime, number + 1), BACK_S)
            num_cut_short += check_folder(cache, keeps_files=number % 4 == 1)
            assert wait_until(lambda: state_of(runtime, "w0").state == "ready", BACK_S)
            assert np.array_equal(call(runtime, layer=number % NUM_LAYERS), expected[number % NUM_LAYERS])
        settle(runtime)
        assert are_equal(outputs(runtime), expected)
    assert len(files(cache)) == NUM_LAYERS
    assert num_cut_short > kills // 10


def has_died(runtime: ExpertRuntime, times: int) -> bool:
    return state_of(runtime, "w0").deaths == times


def check_folder(cache: Path, *, keeps_files: bool) -> bool:
    """Opens the folder as a start does, and finds nothing but whole files there. Removes all of
    them now and then, so that the next writer has something to write. Returns whether the former
    one had not come to its end.
    """
    was_whole = len(files(cache)) == NUM_LAYERS
    store = PanelStore.open(cache, max_bytes=None, allow_network=False)
    try:
        # The worker that was started again may be writing by now.
        assert [one.fault for one in store.verify(_core.checksum) if one.fault] == []
        if not keeps_files:
            store.remove(None, is_over=lambda: False)
    finally:
        store.close()
    return not was_whole


def test_what_a_killed_writer_left_is_gone_after_the_next_start(spec: ModelSpec, cache: Path, expected: Outputs) -> None:
    fill(spec, cache)
    for inside in (PANELS, "index"):
        (cache / inside / TEMPORARY_NAME).write_bytes(bytes(10_000))
    with start(spec, cache) as runtime:
        assert list(cache.rglob(TEMPORARY_NAME)) == []
        assert are_equal(outputs(runtime), expected)


# -- damage ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("address", ["", "loopback"])
@pytest.mark.parametrize("scrub_s", [0.0, 600.0])
@pytest.mark.parametrize("damage", [flip, cut])
def test_a_file_damaged_before_a_start_is_packed_anew(
    spec: ModelSpec, cache: Path, expected: Outputs, damage: Callable[[Path], None], scrub_s: float, address: str
) -> None:
    path, other = fill(spec, cache)
    damage(path)
    with start(spec, cache, scrub_s=scrub_s, address=address) as runtime:
        assert are_equal(outputs(runtime), expected)
        assert wait_until(lambda: [one.name for one in damaged(cache)] == [f"{path.name}.damaged"], BACK_S)
        settle(runtime)
    with start(spec, cache, scrub_s=scrub_s, address=address) as runtime:
        settle(runtime)
        assert are_equal(outputs(runtime), expected)
    assert files(cache) == [path, other]
    with start(spec, cache) as runtime:
        assert counted(runtime)["panel_bytes_written"] == 0
        assert are_equal(outputs(runtime), expected)


@pytest.mark.parametrize("scrub_s", [0.0, 600.0])
@pytest.mark.parametrize("damage", [flip, cut])
def test_a_file_damaged_under_use_is_set_aside(
    spec: ModelSpec, cache: Path, expected: Outputs, damage: Callable[[Path], None], scrub_s: float
) -> None:
    with start(spec, cache, scrub_s=scrub_s) as runtime:
        settle(runtime)
        assert are_equal(outputs(runtime), expected)
        whole = files(cache)
        for path in whole:
            damage(path)
        for _ in range(3):
            assert are_equal(outputs(runtime), expected)
        assert wait_until(lambda: len(damaged(cache)) == len(whole), BACK_S)
        assert wait_until(lambda: counted(runtime)["scrub_reloads"] > 0, BACK_S)
        assert are_equal(outputs(runtime), expected)
    assert fill(spec, cache) == whole


def test_files_removed_under_use_change_nothing(spec: ModelSpec, cache: Path, expected: Outputs) -> None:
    with start(spec, cache) as runtime:
        settle(runtime)
        shutil.rmtree(cache)
        assert are_equal(outputs(runtime), expected)
    assert len(fill(spec, cache)) == 2


# -- disks and folders that will not do ------------------------------------------------------------


@pytest.mark.parametrize("most", [0, 4096, 300_000, 1_000_000])
def test_a_worker_that_cannot_write_so_much_computes_all_the_same(
    spec: ModelSpec, cache: Path, expected: Outputs, start_worker: StartWorker, tmp_path: Path, most: int
) -> None:
    """Files of this process must not grow over a size, as on a disk without room."""
    address = f"unix://{tmp_path}/w.sock"
    with kept_in(cache):
        worker = start_worker(Path(spec.path), address, name="w0")
    resource.prlimit(worker.process.pid, resource.RLIMIT_FSIZE, (most, most))
    # Shared segments are files too.
    with start(spec, cache, address=address, transport="stream") as runtime:
        settle(runtime)
        assert are_equal(outputs(runtime), expected)
        assert (counted(runtime)["panel_bytes_written"] > 0) == (most == 1_000_000)
    assert list(cache.rglob(TEMPORARY_NAME)) == []


def test_a_budget_that_is_full_is_no_error(spec: ModelSpec, cache: Path, expected: Outputs) -> None:
    with start(spec, cache, cache_max_bytes=700_000) as runtime:
        settle(runtime)
        assert are_equal(outputs(runtime), expected)
    assert len(files(cache)) == 1


@contextlib.contextmanager
def kept_in(cache: Path) -> Iterator[None]:
    """Workers that are started by hand meanwhile keep panels there."""
    before = os.environ["DFLASH_MOE_CACHE_PATH"]
    os.environ["DFLASH_MOE_CACHE_PATH"] = str(cache)
    try:
        yield
    finally:
        os.environ["DFLASH_MOE_CACHE_PATH"] = before


@pytest.mark.parametrize("terms", [{"layout": "stored"}, {"layout": "auto", "cache_panels": "on"}])
def test_a_folder_that_others_may_write_is_refused_by_name_where_somebody_asked_for_it(
    spec: ModelSpec, cache: Path, terms: dict[str, Any]
) -> None:
    cache.mkdir(mode=0o777)
    cache.chmod(0o777)
    with pytest.raises(ConfigError) as caught:
        start(spec, cache, **terms)
    assert f"cache folder {cache} has mode 0777, it must have 755: chmod 755 {cache}" in str(caught.value) or (
        f"cache folder {cache} has mode 0777, it must have 700: chmod 700 {cache}" in str(caught.value)
    )
    assert "\n" not in str(caught.value)


def test_a_folder_that_others_may_write_is_left_alone_by_default(spec: ModelSpec, cache: Path, expected: Outputs) -> None:
    cache.mkdir()
    cache.chmod(0o777)
    with start(spec, cache, layout="auto") as runtime:
        assert are_equal(outputs(runtime), expected)
    assert list(cache.iterdir()) == []


# -- checkpoints that are exchanged, moved, touched ------------------------------------------------


def exchange(model: Path, *, is_new_file: bool) -> None:
    """Changes the sign of a weight without a trace in size, samples and time of change."""
    file = model / "model.safetensors"
    before = file.stat()
    fingerprint = Checkpoint.open(model).fingerprint()
    if is_new_file:
        shutil.copyfile(file, model / "new")
        (model / "new").rename(file)
    flip_a_bit(model, -61, 0x80)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert Checkpoint.open(model).fingerprint() == fingerprint


@pytest.mark.parametrize("is_new_file", [False, True])
def test_panels_of_an_exchanged_checkpoint_are_never_used(tmp_path: Path, cache: Path, is_new_file: bool) -> None:
    model = make_checkpoint(tmp_path / "model")
    fill(tiny_spec(model), cache)
    former = packed_outputs(tiny_spec(model), cache)
    exchange(model, is_new_file=is_new_file)
    spec = tiny_spec(model)
    expected = packed_outputs(spec, cache)
    assert not are_equal(former, expected)
    for _ in range(2):
        with start(spec, cache) as runtime:
            assert are_equal(outputs(runtime), expected)
            settle(runtime)
            assert are_equal(outputs(runtime), expected)
    # What did not change is taken over.
    assert len(files(cache)) == 3


def test_a_checkpoint_exchanged_under_use_changes_nothing_for_the_worker_that_has_it(tmp_path: Path, cache: Path) -> None:
    model = make_checkpoint(tmp_path / "model")
    with start(tiny_spec(model), cache) as runtime:
        settle(runtime)
        former = outputs(runtime)
        exchange(model, is_new_file=True)
        assert are_equal(outputs(runtime), former)
        time.sleep(0.06)  # what changed so recently is not looked for
    with start(tiny_spec(model), cache) as runtime:
        settle(runtime)
        assert are_equal(outputs(runtime), packed_outputs(tiny_spec(model), cache))


@pytest.mark.parametrize("change", ["moved", "copied", "touched"])
def test_a_checkpoint_that_was_moved_or_touched_is_not_packed_again(tmp_path: Path, cache: Path, change: str) -> None:
    model = make_checkpoint(tmp_path / "model")
    fill(tiny_spec(model), cache)
    expected = packed_outputs(tiny_spec(model), cache)
    if change == "moved":
        model = model.rename(tmp_path / "elsewhere")
    elif change == "copied":
        model = shutil.copytree(model, tmp_path / "copy")
    else:
        (model / "model.safetensors").touch()
    time.sleep(0.06)  # what changed so recently may change again unseen, and is packed
    for _ in range(2):
        with start(tiny_spec(model), cache) as runtime:
            found = counted(runtime)
            assert (found["resident_weight_bytes"], found["panel_bytes_written"], found["panel_shards_left"]) == (0, 0, 0)
            assert are_equal(outputs(runtime), expected)
    assert len(files(cache)) == 2


# -- several processes -----------------------------------------------------------------------------


def test_workers_of_unlike_widths_have_files_of_their_own(
    spec: ModelSpec,
    cache: Path,
    expected_of_two: Outputs,
    start_worker: StartWorker,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with kept_in(cache), monkeypatch.context() as patched:
        patched.setenv("DFLASH_MOE_CPU_ISA", "scalar")
        worker = start_worker(Path(spec.path), f"unix://{tmp_path}/w.sock")
    text = f"{text_of()}  - {{name: far, threads: 1, weights_layout: stored, address: '{worker.address}'}}\n"
    for number in range(2):
        with ExpertRuntime.start(Topology.parse(text), model=spec, cache_path=cache, audit_cpu="off", **FAR) as runtime:
            settle(runtime)
            assert are_equal(outputs(runtime), expected_of_two)
            assert all(one["panel_bytes_mapped"] > 0 for one in runtime.worker_stats().values())
            assert number == 0 or counted(runtime)["resident_weight_bytes"] == 0
    store = PanelStore.open(cache, max_bytes=None, allow_network=False)
    layouts = {layout.split("-")[1] for entry in store.entries() for layout in entry.layouts}
    store.close()
    assert len(files(cache)) == 4
    assert len(layouts) == 2


def test_a_collection_beside_starts_breaks_none(spec: ModelSpec, cache: Path, expected_of_two: Outputs) -> None:
    fill(spec, cache)
    is_over, num_removed, failures = threading.Event(), [0], []

    def collect() -> None:
        store = PanelStore.open(cache, max_bytes=None, allow_network=False)
        while not is_over.wait(0.002):
            try:
                num_removed[0] += store.collect(0, is_over=is_over.is_set).num_files
            except DflashError as error:
                if not is_over.is_set():
                    failures.append(error)
        store.close()

    thread = threading.Thread(target=collect)
    thread.start()
    try:
        for _ in range(4):
            with start(spec, cache, workers=2) as runtime:
                assert are_equal(outputs(runtime), expected_of_two)
                settle(runtime)
                assert are_equal(outputs(runtime), expected_of_two)
    finally:
        is_over.set()
        thread.join(BACK_S)
    assert failures == []
    assert num_removed[0] > 0


@pytest.mark.parametrize("has_room", [True, False])
def test_a_host_that_comes_back_to_a_worker_finds_right_numbers(
    spec: ModelSpec, cache: Path, expected: Outputs, start_worker: StartWorker, tmp_path: Path, has_room: bool
) -> None:
    """Where not all could be written the worker keeps the rest in memory for its next host."""
    address = f"unix://{tmp_path}/w.sock"
    if not has_room:
        os.environ["DFLASH_MOE_CACHE_MAX_BYTES"] = "700000"
    try:
        with kept_in(cache):
            start_worker(Path(spec.path), address, name="w0")
    finally:
        os.environ.pop("DFLASH_MOE_CACHE_MAX_BYTES", None)
    for number in range(4):
        with start(spec, cache, address=address) as runtime:
            assert are_equal(outputs(runtime), expected)
            if number in (1, 2):
                settle(runtime)
                assert counted(runtime)["panel_bytes_mapped"] > 0
                assert (counted(runtime)["resident_weight_bytes"] == 0) == has_room
            assert are_equal(outputs(runtime), expected)
        if number == 2:
            for path in files(cache):
                flip(path)
    assert len(damaged(cache)) == (2 if has_room else 1)
