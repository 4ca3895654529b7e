"""`dflash-moe store`: what is kept on disk, as tables and JSON, and how it is removed.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import json
import os
import re

import pytest

from dflash_moe import _core
from dflash_moe.cli import main
from dflash_moe.store import machine_panels
from dflash_moe.store.folder import PANELS
from tests.unit.store.stored_panels import GROUP, MODEL, make_checkpoint, never, of_model, opened, overwrite, pieces


@pytest.fixture
def kept(tmp_path):
    """A store with one file; returns its path."""
    checkpoint = make_checkpoint(tmp_path / "model")
    store = opened(tmp_path)

    def summed(expert):
        made = pieces(expert)
        whole = b"".join(bytes(one) for one in made.pieces)
        return type(made)(made.pieces, made.content_checksum, _core.checksum(whole), made.source)

    with of_model(store, checkpoint).write(GROUP, summed, is_over=never) as found:
        path = found.path
    store.close()
    return path


def run(capsys, tmp_path, *arguments: str) -> tuple[int, str, list[str]]:
    code = main.run(["store", "--path", str(tmp_path / "store"), *arguments])
    out, err = capsys.readouterr()
    return code, out, err.splitlines()


def test_ls_shows_each_model(capsys, tmp_path, kept):
    code, out, _ = run(capsys, tmp_path, "ls")
    assert code == 0
    head, names, _, row = out.splitlines()[:4]
    assert head.startswith(f"{tmp_path / 'store'}: 28.0 KiB of ")
    assert names.split() == ["model", "files", "size", "layouts", "last", "used", "state", "path"]
    assert row.startswith(MODEL[:12])
    assert row.endswith(f"as it was  {tmp_path / 'model'}")


def test_ls_gives_json(capsys, tmp_path, kept):
    code, out, _ = run(capsys, tmp_path, "ls", "--json")
    assert code == 0
    found = json.loads(out)
    assert found["num_bytes"] == 28 * 1024
    assert found["models"][0]["layouts"] == ["1-16-plain-q4_k-q6_k-6000-24"]
    assert found["models"][0]["is_current"]


def test_the_default_folder_is_that_of_the_user(capsys, tmp_path, kept, monkeypatch):
    kept.parent.parent.rename(tmp_path / "dflash-moe")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("DFLASH_MOE_CACHE_PATH")
    assert main.run(["store", "ls"]) == 0
    assert str(tmp_path / "dflash-moe") in capsys.readouterr().out


def test_folder_and_budget_are_those_of_the_environment(capsys, tmp_path, kept, monkeypatch):
    monkeypatch.setenv("DFLASH_MOE_CACHE_PATH", str(kept.parent.parent))
    monkeypatch.setenv("DFLASH_MOE_CACHE_MAX_BYTES", "20KiB")
    assert main.run(["store", "ls"]) == 0
    assert capsys.readouterr().out.startswith(f"{tmp_path / 'store'}: 28.0 KiB of 20.0 KiB, ")
    assert main.run(["store", "gc"]) == 0
    assert capsys.readouterr().out.startswith("removed 1 files, 28.0 KiB")


def test_gc_removes_panels_that_no_kernel_of_this_machine_reads(capsys, tmp_path, kept, monkeypatch):
    version, width = 1, 16  # those of `kept`
    monkeypatch.setattr(machine_panels, "known_layouts", lambda: {(version, width), (version, 2)})
    assert run(capsys, tmp_path, "gc")[1].startswith("removed 0 files")
    monkeypatch.setattr(machine_panels, "known_layouts", lambda: {(version, 2), (version + 1, width)})
    assert run(capsys, tmp_path, "gc")[1].startswith("removed 1 files, 28.0 KiB")
    assert not kept.exists()


def test_the_layouts_of_this_machine_are_those_of_its_kernel_sets():
    known = machine_panels.known_layouts()
    assert {version for version, _ in known} == {1}
    assert {width for _, width in known} <= {2, 8, 16, 32}
    assert (1, 2) in known  # of the set that every processor has


def test_where_nothing_is_kept_that_is_said(capsys):
    assert main.run(["store", "ls"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines[-1] == "nothing is kept on this machine: DFLASH_MOE_CACHE_PATH is none; --path names a folder"


def test_a_folder_that_is_not_there_is_not_made(capsys, tmp_path):
    code, _, err = run(capsys, tmp_path, "ls")
    assert code == 2
    assert err[-1] == f"{tmp_path / 'store'}: nothing is kept there; --path names another folder"
    assert not (tmp_path / "store").exists()


def test_verify_reads_all(capsys, tmp_path, kept):
    assert run(capsys, tmp_path, "verify")[0] == 0
    overwrite(kept, 5000, b"xx")
    code, out, err = run(capsys, tmp_path, "verify", "--json")
    assert code == 1
    assert err[-1].startswith(f"damaged and set aside: {kept}: the panels of expert 4 sum up to ")
    assert json.loads(out)["num_files"] == 1
    assert [path.name for path in kept.parent.iterdir()] == [f"{kept.name}.damaged"]


def test_gc_keeps_what_is_used_unless_a_size_is_given(capsys, tmp_path, kept):
    assert run(capsys, tmp_path, "gc")[1] == "removed 0 files, 0 bytes; 28.0 KiB are left\n"
    with_reader = opened(tmp_path)
    descriptor = with_reader.folder.open_file(PANELS, kept.name)
    assert "1 more are in use and stay" in run(capsys, tmp_path, "gc", "--max-bytes", "0")[1]
    os.close(descriptor)
    assert run(capsys, tmp_path, "gc", "--max-bytes", "1KiB")[1].startswith("removed 1 files, 28.0 KiB; 0 bytes are left")
    assert run(capsys, tmp_path, "gc", "--max-bytes", "much")[0] == 2


@pytest.mark.parametrize("how", ["path", "fingerprint", "beginning", "all"])
def test_rm_removes_a_model_or_all(capsys, tmp_path, kept, how):
    words = {"path": str(tmp_path / "model"), "fingerprint": MODEL, "beginning": MODEL[:12], "all": "--all"}[how]
    code, out, _ = run(capsys, tmp_path, "rm", words, "--yes")
    assert code == 0
    assert out.startswith("removed 1 files, 28.0 KiB")
    assert not list(kept.parent.iterdir())


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["rm"], "name one model by its path or fingerprint, or pass --all"),
        (["rm", "model", "--all"], "name one model by its path or fingerprint, or pass --all"),
        (["rm", "nothing", "--yes"], "keeps 0 models by the name 'nothing'; `dflash-moe store ls` lists all"),
        (["rm", "--all"], "pass --yes where nobody can be asked"),
    ],
)
def test_rm_says_what_it_needs(capsys, tmp_path, kept, words, sentence):
    code, _, err = run(capsys, tmp_path, *words)
    assert code == 2
    assert err[-1].endswith(sentence)
    assert kept.exists()


# -- warm ------------------------------------------------------------------------------------------

WORKER = "version: 1\nworkers:\n  - {name: w0, threads: 1, weights_layout: stored}\n"


@pytest.fixture
def warm(capsys, tmp_path):
    """Runs `store warm` for the demo's model with a topology."""

    def run_warm(topology: str | None, *arguments: str) -> tuple[int, str, list[str]]:
        given = ()
        if topology is not None:
            (tmp_path / "t.yaml").write_text(topology)
            given = ("--topology", str(tmp_path / "t.yaml"))
        return run(capsys, tmp_path, "warm", "--model", "demo", *given, *arguments)

    return run_warm


@pytest.mark.transformers
@pytest.mark.parametrize("topology", [WORKER, None], ids=["topology", "fitted"])
def test_warm_writes_all_once(capsys, tmp_path, warm, topology):
    code, out, err = warm(topology, "--threads", "2")
    assert code == 0, err
    wrote = rf"{tmp_path}/store: wrote 4 files, 5\.\d MiB in \d+\.\d s \(\d+\.\d\d GB/s\)\n"
    assert re.fullmatch(wrote, out)
    code, out, _ = warm(topology)
    assert code == 0
    assert re.fullmatch(rf"{tmp_path}/store: all 4 files are there, 5\.\d MiB\n", out)
    assert run(capsys, tmp_path, "verify")[0] == 0


@pytest.mark.transformers
def test_what_warm_wrote_is_what_a_start_maps(tmp_path, warm):
    from dflash_moe.cli.model_path import demo_model
    from dflash_moe.experts.expert_runtime import ExpertRuntime
    from dflash_moe.topology import Topology

    text = "version: 1\nhost: {experts: {memory: 1MiB}}\nworkers:\n  - {name: w0, threads: 1, weights_layout: stored}\n"
    for preset in ("exact", "fast"):
        assert warm(text, "--preset", preset)[0] == 0
        terms = {"cache_path": tmp_path / "store", "preset": preset}
        with ExpertRuntime.start(Topology.parse(text), model=demo_model(), **terms) as runtime:
            for found in runtime.worker_stats().values():
                assert found["panel_bytes_mapped"] > 0
                assert (found["panel_bytes_written"], found["panel_shards_left"]) == (0, 0)


@pytest.mark.transformers
@pytest.mark.parametrize(
    ("topology", "arguments", "sentence"),
    [
        (WORKER.replace("stored", "mapped"), (), "no worker on this machine would map packed experts of this model"),
        (WORKER.replace("stored", "packed"), (), "no worker on this machine would map packed experts of this model"),
        (
            WORKER.replace("}", ", address: 'tcp://10.0.0.2:7171'}").replace("stored", "auto") + "ipc: {encryption: off}\n",
            ("--key-file", "key"), "no worker on this machine would map packed experts of this model",
        ),
        (WORKER + "cache: {panels: off}\n", (), "cache.panels is off, so that no start would use what is written"),
        (WORKER + "cache: {max_bytes: 1MiB}\n", (), "all models may take 1.0 MiB; raise `cache.max_bytes`"),
    ],
)  # fmt: skip
def test_warm_says_in_one_line_why_nothing_is_written(tmp_path, warm, monkeypatch, topology, arguments, sentence):
    from dflash_moe.protocol.keys import write_key_file

    monkeypatch.chdir(tmp_path)
    write_key_file(tmp_path / "key")
    code, out, err = warm(topology, *arguments)
    assert (code, out) == (2, "")
    assert sentence in err[-1]
    assert not list(tmp_path.glob("store/panels/*"))


def test_warm_has_no_place_where_nothing_is_kept(capsys, monkeypatch, tmp_path):
    (tmp_path / "t.yaml").write_text(WORKER)
    assert main.run(["store", "warm", "--model", "demo", "--topology", str(tmp_path / "t.yaml")]) == 2
    assert "cache.path is none, so that no start would use what is written" in capsys.readouterr().err
