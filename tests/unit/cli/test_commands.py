"""The command line from outside: help, exit codes, the last line of stderr, and what is never
imported.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated

import pytest
import typer

from dflash_moe import __version__, _core
from dflash_moe.cli import demo, main, options, root
from dflash_moe.cli.command_line import Commands
from dflash_moe.cli.doctor import probes
from dflash_moe.cli.model_path import model_path
from dflash_moe.config import SETTINGS, CacheSettings
from dflash_moe.errors import ConfigError, DflashError, UnsupportedError, WorkerLost
from dflash_moe.holders import threads
from dflash_moe.protocol.keys import write_key_file
from dflash_moe.topology import Topology
from dflash_moe.topology.numerics import class_on
from tests.unit.cli.test_any_value import commands

BF16_CLASS = class_on("bf16", "cpu")


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch):
    for setting in SETTINGS:
        # That of conftest stays, with which nothing is kept on disk.
        if setting.environment and setting.name != "cache_path":
            monkeypatch.delenv(setting.environment, raising=False)
    for name in (*options.PASSIVE_OPENMP, "OMP_NUM_THREADS"):
        monkeypatch.setenv(name, os.environ.get(name, ""))  # restored after the test
        monkeypatch.delenv(name)


@pytest.fixture
def probe_app(monkeypatch):
    """Replaces the commands by one that takes settings and raises or returns what the test
    wants.
    """
    seen: dict = {}

    @options.with_settings(reads_config=True)
    def probe(
        name: str = typer.Option("x", help="A name."),
        topology: options.TopologyOption = None,
        json_out: Annotated[Path | None, options.json_option("What it saw")] = None,
        words: Annotated[list[str] | None, typer.Argument(help="Words.")] = None,
        **overrides: object,
    ) -> None:
        """Probe."""
        seen.update(name=name, topology=topology, json_out=json_out, words=words, overrides=overrides)
        if "error" in seen:
            raise seen["error"]
        typer.echo("a line of text")
        if json_out is not None:
            options.write_json(json_out, {"name": name})

    def build() -> typer.Typer:
        app = Commands()
        app.callback()(root._global_options)
        app.command(name="probe")(probe)
        return app

    monkeypatch.setattr(main, "build_app", build)
    return seen


def run(capsys, *arguments: str) -> tuple[int, str, list[str]]:
    code = main.run(arguments)
    out, err = capsys.readouterr()
    return code, out, err.splitlines()


@pytest.mark.parametrize("words", [["--version"], ["-v"], ["version"]])
def test_the_version_goes_to_stdout(words, capsys):
    assert run(capsys, *words) == (0, f"dflash-moe {__version__}\n", [])


@pytest.mark.parametrize("words", [["--help"], ["-h"], ["help"]])
def test_help_goes_to_stdout(words, capsys):
    code, out, err = run(capsys, *words)
    assert (code, err) == (0, [])
    assert "doctor" in out
    assert "key" in out


def modules_of(*arguments: str) -> str:
    code = f"import sys; from dflash_moe.cli.main import run; run({arguments!r}); print(sorted(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=200, check=True)
    return done.stdout.splitlines()[-1]


def test_a_worker_starts_without_the_modules_of_other_commands():
    loaded = modules_of("worker", "--help")
    assert "'dflash_moe.cli.worker'" in loaded
    for module in (
        "dflash_moe.cli.bench.bench",
        "dflash_moe.cli.generate.generate",
        "dflash_moe.experts",
        "dflash_moe.holders",
        "numpy",
        "yaml",
    ):
        assert f"'{module}'" not in loaded, module


def test_help_of_all_commands_imports_none_of_them():
    loaded = modules_of("--help")
    for module in (
        "dflash_moe.cli.generate.generate",
        "dflash_moe.cli.options",
        "dflash_moe.config.settings",
        "rich",
        "yaml",
    ):
        assert f"'{module}'" not in loaded, module


def test_help_of_a_command_imports_what_describes_its_options_only():
    loaded = modules_of("generate", "--help")
    assert "'dflash_moe.cli.generate.generate'" in loaded
    for module in (
        "dflash_moe.cli.chat.chat",
        "dflash_moe.experts",
        "dflash_moe.holders",
        "dflash_moe.topology.topology",
        "rich",
        "yaml",
        "torch",
    ):
        assert f"'{module}'" not in loaded, module


def test_every_command_that_is_there_explains_itself(capsys):
    _, out, _ = run(capsys, "--help")
    assert set(re.findall(r"^  ([a-z]+) ", out, re.MULTILINE)) == set(root.NAMES)
    for command in root.NAMES:
        assert run(capsys, command, "-h")[0] == 0


@pytest.mark.parametrize(
    ("arguments", "last"),
    [
        ([], "a command is missing; choose one of those above"),
        (["frobnicate"], "No such command 'frobnicate'; `dflash-moe --help` lists all"),
        (["generat"], "No such command 'generat'; did you mean `generate`?"),
        (["worke"], "No such command 'worke'; did you mean `worker` or `workers`?"),
        (["run", "model.gguf"], "No such command 'run': `chat` talks with a model, `generate` completes a prompt"),
        (["server"], "No such command 'server': it is `serve`; `llama -- llama-server` runs"),
        (["inspect"], "No such command 'inspect': it is `model inspect`"),
        (["ps"], "No such command 'ps': it is `workers list`"),
        (["generate", "--max-token", "3"], "No such option '--max-token'; did you mean `--max-tokens`?"),
        (["doctor", "--jsn"], "No such option"),
        (
            ["llama", "llama-server", "-m", "x.gguf"],
            "No such option '-m'; the program and its own flags follow behind `--`",
        ),
        (["llama", "llama-server", "-t", "4"], "No such option '-t'; the program and its own flags follow behind `--`"),
        (["key", "make"], "Missing argument 'FILE'."),
        (
            ["generate", "-p", "x"],
            "Missing option '-m' / '--model': a GGUF file, a folder of safetensors, or `demo` for the shipped model",
        ),
        (["verify", "-m", "demo", "again"], "'again': not expected here; a model is given with -m, as in `-m demo`"),
        (["doctor", "all"], "'all': not expected here; `dflash-moe doctor --help` says what it takes"),
        (["generate", "-x"], "No such option '-x'; `dflash-moe generate --help` lists all"),
    ],
)
def test_usage_errors_exit_with_2_and_one_sentence(capsys, arguments, last):
    code, out, err = run(capsys, *arguments)
    assert (code, out) == (2, "")
    assert last in err[-1]
    assert "\033" not in "".join(err)


@pytest.mark.parametrize(
    ("error", "code", "lines"),
    [
        (ConfigError("--mode: 'x' is not allowed"), 2, ["--mode: 'x' is not allowed"]),
        (UnsupportedError("no"), 2, ["no"]),
        (WorkerLost("worker w0 died; its log:\nline 1\n\nline 2"), 3, ["  line 1", "  line 2", "worker w0 died; its log:"]),
        (WorkerLost("worker w0 died; last lines of its log:\nline 1"), 3, ["  line 1", "worker w0 died"]),
        (KeyboardInterrupt(), 130, ["interrupted"]),
        (FileNotFoundError(2, "No such file or directory", "a.txt"), 2, ["a.txt: No such file or directory"]),
        (RuntimeError("bad"), 1, ["unexpected RuntimeError: bad; run it again with --debug for the traceback"]),
        (typer.Exit(7), 7, []),
    ],
)
def test_each_error_has_its_exit_code_and_a_last_line_without_decoration(capsys, probe_app, error, code, lines):
    probe_app["error"] = error
    assert run(capsys, "probe") == (code, "", lines)


@pytest.mark.parametrize("arguments", [["--debug", "probe"], ["probe", "--debug"]])
def test_a_traceback_appears_only_with_debug(capsys, probe_app, arguments):
    probe_app["error"] = ConfigError("wrong")
    code, _, err = run(capsys, *arguments)
    assert (code, err[-1]) == (2, "wrong")
    assert err[0].startswith("Traceback")


def test_given_flags_arrive_parsed_and_others_do_not(capsys, probe_app, tmp_path):
    key = tmp_path / "k"
    write_key_file(key)
    arguments = ["--mode", "STREAM", "--batch-capacity", "7", "--threads", "2", "--profile", "--name", "y"]
    arguments += ["--key-file", str(key)]
    assert run(capsys, "probe", *arguments)[0] == 0
    assert probe_app["name"] == "y"
    assert probe_app["overrides"] == {
        "mode": "stream", "batch_capacity": 7, "threads": 2, "key_file": key, "profile": True,
    }  # fmt: skip


@pytest.mark.parametrize(("given", "expected"), [("1", True), ("0", False)])
def test_profile_takes_a_value_too(capsys, probe_app, given, expected):
    assert run(capsys, "probe", "--profile", given)[0] == 0
    assert probe_app["overrides"] == {"profile": expected}


def test_short_names_are_those_that_fingers_know():
    flags = {flag for command in ("chat", "generate") for p in commands()[command,].params for flag in p.opts}
    assert {"-m", "-n", "-c", "-t", "-p", "--max-tokens", "--max-new-tokens"} <= flags


def test_the_former_name_of_max_tokens_still_works_and_is_not_shown(capsys):
    words = commands()["generate",].params
    (parameter,) = [one for one in words if one.name == "max_tokens"]
    assert parameter.opts == ["-n", "--max-tokens", "--max-new-tokens"]
    for arguments in (["generate", "-h"], ["help", "generate"]):
        out = run(capsys, *arguments)[1]
        assert "--max-tokens" in out
        assert "--max-new-tokens" not in out


@pytest.mark.parametrize(
    "given", [["--json"], ["--json", "-"], ["--json=-"], ["--json", "--name", "x"], ["--json", "--profile"]]
)
def test_json_without_a_file_is_all_that_stdout_gets(capsys, probe_app, given):
    assert run(capsys, "probe", *given) == (0, '{\n "name": "x"\n}\n', ["a line of text"])


def test_json_with_a_file_goes_there_and_text_to_stdout(capsys, probe_app, tmp_path):
    out = tmp_path / "new folder" / "out"
    assert run(capsys, "probe", "--json", str(out)) == (0, "a line of text\n", [])
    assert json.loads(out.read_text()) == {"name": "x"}


def test_a_model_behind_json_is_never_taken_for_its_file(capsys, probe_app, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "config.json").touch()
    for name in ("here.gguf", "without_suffix"):
        (tmp_path / name).write_bytes(b"GGUF and more")
    for model in ("demo", "folder", "here.gguf", "not_here.gguf", "without_suffix", "part.safetensors"):
        probe_app.clear()
        code, out, _ = run(capsys, "probe", "--json", model)
        assert (code, json.loads(out)) == (0, {"name": "x"})
        assert probe_app["words"] == [model]
    assert (tmp_path / "here.gguf").read_bytes() == b"GGUF and more"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder", "here.gguf", "without_suffix"]


def test_what_looks_like_an_option_may_be_the_value_of_another(capsys, probe_app):
    assert run(capsys, "probe", "--name", "--json", "--json")[0] == 0
    assert (probe_app["name"], probe_app["json_out"]) == ("--json", options.STDOUT)


def test_json_of_a_program_that_has_stdout_needs_a_file(capsys):
    code, out, err = run(capsys, "llama", "--json", "--", "true")
    assert (code, out) == (2, "")
    assert err[-1] == "--json: stdout is the program's; name a file for the counters, such as --json counters.json"


def test_an_output_that_cannot_be_written_is_refused_before_the_work(capsys, probe_app, tmp_path):
    for path, says in ((str(tmp_path), "cannot be written"), ("/dev/null/out.json", "its folder cannot be made")):
        code, _, err = run(capsys, "probe", "--json", path)
        assert code == 2
        assert err[-1].startswith(f"{path}: {says}")
    assert not probe_app


@pytest.mark.parametrize(
    ("shell", "says"), [("bash", "complete -o default -F"), ("zsh", "compdef"), ("fish", "complete --command")]
)
def test_completion_installs_in_the_usual_shells_and_completes(shell, says, tmp_path):
    binary = tmp_path / shell
    binary.symlink_to(sys.executable)
    program = "import sys; from dflash_moe.cli.main import run; sys.exit(run(sys.argv[1:]))"

    def called(*arguments: str, **variables: str) -> str:
        environment = os.environ | {"HOME": str(tmp_path), "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"} | variables
        command = [sys.executable, "-c", program, *arguments]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert says in called("--show-completion", shell)
    assert f"{shell} completion installed in {tmp_path}" in called("--install-completion", shell)
    words = {"COMP_WORDS": "dflash-moe gen", "COMP_CWORD": "1"} if shell == "bash" else {}
    words |= {"_TYPER_COMPLETE_ARGS": "dflash-moe gen", "_TYPER_COMPLETE_FISH_ACTION": "get-args"}
    assert "generate" in called(_DFLASH_MOE_COMPLETE=f"complete_{shell}", **words)


@pytest.mark.parametrize(
    ("arguments", "environment", "last"),
    [
        (["--mode", "fast"], {}, "--mode: 'fast' is not allowed; allowed: auto, batched, stream (any case)"),
        (["--dtype", "fp8"], {}, "--dtype: 'fp8' is not allowed; allowed: f32, f16, bf16"),
        ([], {"DFLASH_MOE_EXPERT_COMPUTE_IPC_MODE": "x"}, "DFLASH_MOE_EXPERT_COMPUTE_IPC_MODE: 'x' is not allowed"),
        ([], {"DFLASH_MOE_MODE": "auto"}, "environment variable DFLASH_MOE_MODE is not a setting"),
        (["--key-file", "nowhere.key"], {}, "key file nowhere.key cannot be read: No such file or directory"),
        (["--topology", "nowhere.yaml"], {}, "nowhere.yaml:1: the topology file cannot be read"),
    ],
)
def test_bad_settings_are_refused_before_the_command_runs(capsys, probe_app, monkeypatch, arguments, environment, last):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    code, _, err = run(capsys, "probe", *arguments)
    assert code == 2
    assert err[-1].startswith(last)
    assert not probe_app


@pytest.mark.parametrize("missing", ["torch", "transformers"])
def test_a_host_command_without_its_packages_says_what_to_install(capsys, probe_app, missing):
    probe_app["error"] = ModuleNotFoundError(f"No module named '{missing}'", name=missing)
    code, _, err = run(capsys, "probe")
    assert code == 2
    assert err == [f"{missing} is not installed; this command loads a model and needs it: pip install 'dflash-moe[host]'"]


@pytest.mark.parametrize("missing", ["uvicorn", "llguidance"])
def test_serve_without_its_extra_says_what_to_install(capsys, monkeypatch, missing):
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == missing else found(name))
    code, _, err = run(capsys, "serve", "-m", "demo")
    assert code == 2
    assert err == [f"{missing} is not installed, and the server needs it: pip install 'dflash-moe[serve]'"]


def test_demo_without_its_data_package_says_what_to_install(capsys, monkeypatch):
    monkeypatch.setattr("dflash_moe.cli.model_path.ASSETS", "no_such_package_of_assets")
    code, out, err = run(capsys, "demo")
    assert (code, out) == (2, "")
    assert "dflash-moe-demo" in err[-1]
    assert "pip install ./bench/demo_model" in err[-1]


def test_openmp_waits_passively_only_where_threads_outnumber_cores(monkeypatch):
    monkeypatch.setattr(threads, "usable_cores", lambda: 64)
    monkeypatch.setattr(threads, "physical_cores", lambda: 64)
    assert not options.prepare_host(Topology.local(2)).is_oversubscribed
    assert not any(name in os.environ for name in options.PASSIVE_OPENMP)
    monkeypatch.setattr(threads, "usable_cores", lambda: 2)
    monkeypatch.setenv("KMP_BLOCKTIME", "5")
    assert options.prepare_host(Topology.local(2)).is_oversubscribed
    assert {name: os.environ.get(name) for name in options.PASSIVE_OPENMP} == options.PASSIVE_OPENMP | {"KMP_BLOCKTIME": "5"}


def test_torch_gets_the_threads_that_the_topology_states_for_the_host(monkeypatch):
    options.prepare_host(Topology.local(2))
    assert "OMP_NUM_THREADS" not in os.environ
    stated = Topology.parse("version: 1\nhost: {threads: 3}\nworkers: [{name: w0, threads: 1}]")
    options.prepare_host(stated)
    assert os.environ["OMP_NUM_THREADS"] == "3"
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    options.prepare_host(stated)
    assert os.environ["OMP_NUM_THREADS"] == "2"  # what the user has set stays


def test_a_flag_beats_the_threads_of_the_topology():
    topology = Topology.parse("version: 1\nworkers: [{name: w0, threads: 3}]")
    assert threads.thread_plan(topology, options.resolve_settings(environ={}, threads=2)).workers == {"w0": 2}
    assert threads.thread_plan(topology, options.resolve_settings(environ={})).workers == {"w0": 3}


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ("Qwen/Qwen3-30B-A3B", "hf download Qwen/Qwen3-30B-A3B --local-dir Qwen3-30B-A3B"),
        ("Qwen/Qwen3-30B-A3B", 'add `--include "*Q4_K_M*"`, or another quantisation'),
        ("a/Qwen3-GGUF", 'hf download a/Qwen3-GGUF --include "*Q4_K_M*" --local-dir Qwen3-GGUF'),
        ("a/Qwen3-GGUF:IQ3_XXS", 'hf download a/Qwen3-GGUF --include "*IQ3_XXS*" --local-dir Qwen3-GGUF'),
        ("https://hub.example/a/Qwen3", "hf download a/Qwen3 --local-dir Qwen3"),
        ("https://hub.example/a/Qwen3/tree/main", "hf download a/Qwen3 --local-dir Qwen3"),
        ("no/such/directory", "no such file or directory; pass a checkpoint directory, a GGUF file, or `demo`"),
        ("nothing", "no such file or directory"),
        (__file__, "this is a file"),
    ],
)
def test_a_model_that_is_no_directory_is_answered_with_what_to_do(value, says):
    with pytest.raises(ConfigError, match=re.escape(says)):
        model_path(value)


def test_a_typing_error_is_answered_with_what_was_meant(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "Qwen3-30B-A3B-Q4_K_M.gguf").touch()
    (tmp_path / "models" / "notes.txt").touch()
    for value in ("models/Qwen3-30b-A3B-Q4_KM.gguf", str(tmp_path / "models" / "Qwen3-30B-A3B-Q4_K_M.guf")):
        with pytest.raises(ConfigError, match=r"directory; did you mean .*models/Qwen3-30B-A3B-Q4_K_M\.gguf\?"):
            model_path(value)
    # A folder that is here begins a path, and no hub has a user of that name for all we know.
    with pytest.raises(ConfigError, match=r"no such file or directory; pass a checkpoint"):
        model_path("models/mixtral")
    with pytest.raises(ConfigError, match=r"did you mean models\?"):
        model_path("model")
    with pytest.raises(ConfigError, match=r"no such file or directory; pass"):
        model_path("models/note.txt")


def test_demo_names_the_shipped_model(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "demo").mkdir()
    monkeypatch.setattr("dflash_moe.cli.model_path.find_assets", lambda: tmp_path / "assets")
    assert model_path("demo") == tmp_path / "assets" / "model"
    assert model_path("./demo") == Path("demo")
    monkeypatch.undo()
    monkeypatch.setattr("dflash_moe.cli.model_path.ASSETS", "no_such_package_of_assets")
    with pytest.raises(ConfigError, match=r"pip install \./bench/demo_model"):
        model_path("demo")


def test_a_model_path_is_taken(tmp_path):
    assert model_path(str(tmp_path)) == tmp_path


def test_tables_align_numbers_right_and_words_left():
    table = options.Table("name", "count", "why")
    table.add_row("a", "1,000", "long words")
    table.add_row("long", "2.5", "b")
    assert table.row_count == 2
    assert table.lines() == ["name  count  why", "----  -----  ----------", "a     1,000  long words", "long    2.5  b"]
    with pytest.raises(ValueError, match="1 cells for 3 columns"):
        table.add_row("x")


def test_key_make_writes_a_private_key_once(capsys, tmp_path):
    path = tmp_path / "cluster.key"
    assert run(capsys, "key", "make", str(path))[0] == 0
    assert path.stat().st_mode & 0o777 == 0o600
    assert re.fullmatch(r"[0-9a-f]{64}\n", path.read_text())
    before = path.read_text()
    code, _, err = run(capsys, "key", "make", str(path))
    assert code == 2
    assert "exists" in err[-1]
    assert path.read_text() == before


def test_key_make_derives_a_workers_own_key(capsys, tmp_path):
    group, own = tmp_path / "group.key", tmp_path / "w0.key"
    assert run(capsys, "key", "make", str(group))[0] == 0
    code, out, _ = run(capsys, "key", "make", str(own), "--worker", "w0", "--from", str(group))
    assert (code, out) == (0, f"wrote the key of worker w0 to {own} (mode 0600)\n")
    assert re.fullmatch(r"[0-9a-f]{64}\nworker w0\n", own.read_text())
    for given, missing in ((("--worker", "w1"), "--from GROUP"), (("--from", str(group)), "--worker NAME")):
        code, _, err = run(capsys, "key", "make", str(tmp_path / "w1.key"), *given)
        assert code == 2
        assert f"{given[0]} needs {missing}" in err[-1]


def test_doctor_reports_backends_transports_machine_and_problems(capsys):
    code, out, err = run(capsys, "doctor", "--json")
    found = json.loads(out)
    assert (code, err) == (0, [])
    assert set(found) == {
        "backends", "transports", "machine", "problems", "numerics", "host_device", "host_operators", "settings", "audit",
        "registration",
    }  # fmt: skip
    assert set(found["backends"]) == {"cpu", "cuda", "hip", "sim"}
    assert found["backends"]["cpu"]["available"]
    # plug-ins of cards are there after `make plugins`, cards on few machines
    for name in ("cuda", "hip", "sim"):
        backend = found["backends"][name]
        assert backend["available"] == any(not device["reason"] for device in backend["devices"])
        assert backend["built"] or "is not next to the core; build it with `make plugins`" in backend["reason"]
        assert backend["reason"]
    assert [device["vendor"] for device in found["backends"]["sim"]["devices"]] == ["cuda", "hip"]
    assert found["backends"]["sim"]["available"]
    fabric = found["transports"].pop("fabric")
    assert all(finding["available"] for finding in found["transports"].values())
    assert list(found["transports"]) == ["loopback", "shared", "unix", "tcp"]
    assert [one["name"] for one in fabric["providers"]] if fabric["available"] else "libfabric" in fabric["reason"]
    threads = found["machine"]["threads"]
    assert threads["total"] == threads["host"] + sum(threads["workers"].values())
    assert threads["oversubscribed"] == (threads["total"] > found["machine"]["usable_cores"])
    assert threads["host_pool"] == ["operators", "experts", "encoding"]
    assert found["machine"]["memory_available_bytes"] > 0
    operators = found["host_operators"]
    assert (operators["setting"], operators["taken"], operators["numerics"]) == ("auto", True, "f32-canonical")
    assert operators["kv"] == {"block_tokens": 16, "memory": "25%", "dtype": "auto"}
    assert {"linear", "norm", "router", "paged attention"} <= set(operators["operators"])
    assert found["backends"]["cpu"]["numerics_classes"] == _core.numerics_classes(_core.best_isa())
    assert found["numerics"] == {"policy": "exact", "classes": {"w0": "f32-canonical", "w1": "f32-canonical"}}


def test_doctor_says_what_it_cannot_have(capsys, monkeypatch):
    def refuse() -> None:
        raise DflashError("memfd_create: Function not implemented")

    monkeypatch.setitem(probes.TRANSPORTS, "shared", SimpleNamespace(try_here=refuse))
    code, out, _ = run(capsys, "doctor")
    assert code == 0, "a machine that lacks something is no failure"
    assert "note: transport shared: memfd_create: Function not implemented" in out


@pytest.mark.parametrize(
    ("note", "says"),
    [
        ("__version__ = '2.13.0+cpu'\ncuda: Optional[str] = None\nhip: Optional[str] = None\n", "a build for processors"),
        ("cuda: Optional[str] = None\nhip: Optional[str] = '7.0'\n", "built for hip only"),
        ("cuda: Optional[str] = '12.8'\nhip: Optional[str] = None\n", None),
    ],
)
def test_doctor_flags_a_torch_that_cannot_use_the_card_beside_it(monkeypatch, tmp_path, note, says):
    package = tmp_path / "torch"
    package.mkdir()
    (package / "__init__.py").write_text("raise AssertionError('doctor imports no torch')")
    (package / "version.py").write_text(note)
    found = importlib.util.spec_from_file_location("torch", package / "__init__.py")
    monkeypatch.setattr(probes.importlib.util, "find_spec", lambda _name: found)
    monkeypatch.setattr(probes, "DRIVER_NODES", {"cuda": str(package), "hip": str(tmp_path / "absent")})
    problems = probes.torch_problems("2.13.0", probes.torch_backends())
    if says is None:
        assert problems == []
    else:
        (problem,) = problems
        assert f"this machine has an NVIDIA card ({package} is there), and torch 2.13.0 is {says}" in problem
        assert "`host.device: cuda:0` cannot; install a torch for cuda" in problem


def test_a_failed_self_test_exits_with_1(capsys, monkeypatch):
    from dflash_moe.cli.doctor import device_tests, selftest

    monkeypatch.setattr(selftest, "run_self_tests", lambda: [selftest.SelfTest("avx2", "f32", 1, 9, 2)])
    monkeypatch.setattr(device_tests, "run_device_tests", lambda _: [])
    code, out, err = run(capsys, "doctor", "--selftest")
    assert code == 1
    assert "FAILED" in out
    assert err[-1].startswith("1 of 1 self-tests failed")


def test_self_tests_run_on_every_device_that_a_plug_in_finds_and_a_failing_one_is_named(capsys, monkeypatch):
    from dflash_moe.cli.doctor import device_tests

    listed = {"name": "toy", "vendor": "cuda", "arch": "sm_00", "memory_bytes": 1, "reason": ""}
    unusable = listed | {"reason": "too old"}
    cpu = _core.BackendDevice

    def open_device(*, backend: str, device: int) -> object:
        if device == 2:
            raise DflashError("device cuda:2 (toy): the card has fallen off the bus")
        return cpu(backend="cpu")

    monkeypatch.setattr(_core, "BackendDevice", open_device)
    tests = device_tests.run_device_tests({"cpu": {}, "cuda": {"devices": [listed, unusable, listed]}})
    assert {test.isa for test in tests} == {"cuda:0 sm_00", "cuda:2 sm_00"}
    passed = [test for test in tests if test.is_passed]
    assert {test.weight_dtype for test in passed} >= {"f32", "bf16", "int4_g32", "q6_k", "mxfp4"}
    assert all(test.cases >= 1 and test.elements > 1000 for test in passed)
    assert [test.error for test in tests if not test.is_passed] == ["device cuda:2 (toy): the card has fallen off the bus"]


def test_self_tests_compare_every_kernel_set_and_see_a_difference(monkeypatch):
    from dflash_moe.cli.doctor import selftest

    monkeypatch.setattr(_core, "supported_isas", lambda: ["reference", "scalar"])
    monkeypatch.setattr(selftest, "SPECS", {"silu": selftest.SPECS["silu"]})
    monkeypatch.setattr(selftest, "WEIGHTS", ("f32", "bf16"))
    classes = _core.numerics_classes("scalar")
    tests = selftest.run_self_tests()
    assert {(test.isa, test.is_passed, test.cases) for test in tests} == {("scalar", True, 3)}
    assert [(test.numerics, test.weight_dtype) for test in tests][:2] == [("f32-canonical", "f32"), ("f32-canonical", "bf16")]
    assert {test.numerics for test in tests} == {
        numerics for numerics in classes if any(selftest.takes_weights(numerics, kept) for kept in selftest.WEIGHTS)
    }
    forward = selftest._forward

    def one_bit_off(isa: str, case: tuple[str, str, str], numerics: str):
        bits = forward(isa, case, numerics).copy()
        if isa != "reference":
            bits[3, 4] ^= 1
        return bits

    monkeypatch.setattr(selftest, "_forward", one_bit_off)
    assert [test.differing for test in selftest.run_self_tests()] == [3] * len(tests)


def test_doctor_names_the_classes_and_cores_of_a_topology(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("DFLASH_MOE_CPU_ISA", "scalar")
    cpu = min(os.sched_getaffinity(0))
    path = tmp_path / "two.yaml"
    path.write_text(
        "version: 1\nhost: {experts: {memory: 10%}}\nworkers:\n"
        f"  - {{name: w0, activations: bf16, cpus: {cpu}}}\n  - {{name: far, address: 'tcp://10.0.0.2:7171'}}\n"
    )
    code, out, _ = run(capsys, "doctor", "--topology", str(path))
    assert code == 0
    assert "kernels    scalar (as DFLASH_MOE_CPU_ISA asks" in out
    assert f"workers ask for {BF16_CLASS}, f32-canonical (exact)" in out
    assert f"w0 1 on CPU {cpu}" in out
    assert f"note: w0 asks for numerics class {BF16_CLASS}, which kernel set scalar does not compute" in out
    assert f"(host f32-canonical, w0 {BF16_CLASS}, far f32-canonical): numerics: exact refuses it" in out
    nodes = re.search(r"nodes +(.*)", out)
    assert nodes is not None
    assert re.fullmatch(r"(\d+: \d+ CPUs(, )?)+|the kernel tells of no memory nodes", nodes[1])


@pytest.mark.parametrize("arguments", [["doctor"], ["key", "--help"], ["worker", "--help"], ["--help"]])
def test_light_commands_import_neither_torch_nor_transformers(arguments):
    script = (
        "import sys; from dflash_moe.cli.main import run; code = run(sys.argv[1:]); "
        "heavy = {'torch', 'transformers'} & set(sys.modules); sys.exit(f'imported {heavy}' if heavy else code)"
    )
    done = subprocess.run([sys.executable, "-c", script, *arguments], capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr


def test_the_module_runs_as_a_program():
    done = subprocess.run(
        [sys.executable, "-m", "dflash_moe", "nonsense"], capture_output=True, text=True, timeout=200, check=False
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.splitlines()[-1] == "No such command 'nonsense'; `dflash-moe --help` lists all"


def test_the_recorded_demo_is_the_demo_that_users_run():
    def essence(topology):
        workers = [(worker.name, worker.backend, worker.threads) for worker in topology.workers]
        return topology.host.threads, topology.placement.policy, topology.ipc, workers

    recorded = Topology.load(Path(__file__).parents[3] / "bench" / "settings" / "demo" / "topology.yaml")
    assert essence(recorded) == essence(demo.demo_topology())


def test_a_worker_by_hand_keeps_on_disk_what_its_own_topology_and_environment_say(tmp_path, monkeypatch):
    topology = tmp_path / "far.yaml"
    topology.write_text("version: 1\ncache: {path: /var/kept, max_bytes: 1GiB, panels: on}\nworkers: [{name: far}]\n")
    command = ["worker", "--name", "far", "--model", "demo", "--topology", str(topology), "--listen", f"unix://{tmp_path}/w"]
    told: list[CacheSettings] = []
    monkeypatch.setattr("dflash_moe.workers.process.run_hand_started_worker", lambda **given: told.append(given["cache"]) or 0)
    assert main.run(command) == 0
    monkeypatch.delenv("DFLASH_MOE_CACHE_PATH")
    monkeypatch.setenv("DFLASH_MOE_CACHE_PANELS", "off")
    assert main.run(command) == 0
    assert told == [
        CacheSettings(is_off=True, max_bytes=1 << 30, panels="on"),
        CacheSettings(Path("/var/kept"), max_bytes=1 << 30, panels="off"),
    ]


def test_doctor_says_what_the_keys_of_workers_that_register_allow(capsys, tmp_path):
    path = tmp_path / "registered.yaml"
    text = "version: 1\nregistration: {listen: 'tcp://0.0.0.0:7170'%s}\nworkers: [{name: w0, address: registered}]\n"
    for more, said in (
        ("", "w0 at tcp://0.0.0.0:7170, with the group's key or one of its own each; who has the group's can be any worker"),
        (", names: any, require_key_per_worker: true", "w0, any at tcp://0.0.0.0:7170, with a key of its own each"),
    ):
        path.write_text(text % more)
        _, out, _ = run(capsys, "doctor", "--topology", str(path))
        (line,) = [line for line in out.splitlines() if line.startswith("register ")]
        assert said in line
