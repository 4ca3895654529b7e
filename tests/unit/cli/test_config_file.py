"""The file of everyday options: where it stands among the places that state a setting, which
commands read it, what it may hold, and what `doctor` says of it.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import json
import os

import pytest

from dflash_moe.cli import main, options
from dflash_moe.cli.config_file import KEYS, read_config_file
from dflash_moe.config import SETTINGS
from dflash_moe.config.settings import CONFIG_VARIABLE
from dflash_moe.errors import ConfigError
from dflash_moe.topology import Topology
from tests.unit.cli.test_any_value import commands

MODE_VARIABLE = "DFLASH_MOE_EXPERT_COMPUTE_IPC_MODE"
READERS = ("chat", "diff", "generate", "plan", "serve", "store", "verify")


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch):
    for setting in SETTINGS:
        # That of conftest stays, with which nothing is kept on disk.
        if setting.environment and setting.name != "cache_path":
            monkeypatch.delenv(setting.environment, raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    for name in options.PASSIVE_OPENMP:
        monkeypatch.setenv(name, "x")


@pytest.fixture
def file(tmp_path, monkeypatch):
    """Writes the file that DFLASH_MOE_CONFIG names."""

    def write(text: str):
        path = tmp_path / "mine.yaml"
        path.write_text(text)
        monkeypatch.setenv(CONFIG_VARIABLE, str(path))
        return path

    return write


def overrides_of(command: str, *arguments: str) -> dict:
    """What a command with settings gets as `overrides`."""
    seen: dict = {}

    @options.with_settings(reads_config=True)
    def probe(topology: options.TopologyOption = None, **overrides: object) -> None:
        seen.update(overrides)

    from dflash_moe.cli.command_line import Commands

    app = Commands()
    app.command(name=command)(probe)
    app(list(arguments), standalone_mode=False)
    return seen


def test_every_place_wins_over_the_next(file, monkeypatch, tmp_path):
    topology = tmp_path / "t.yaml"
    topology.write_text("version: 1\nipc: {mode: batched}\nworkers: [{name: w0, threads: 1}]\n")
    plain = tmp_path / "plain.yaml"
    plain.write_text("version: 1\nworkers: [{name: w0}]\n")

    def mode(*arguments: str) -> str:
        found = overrides_of("x", *arguments)
        where = Topology.load(topology if str(topology) in arguments else plain)
        return options.resolve_settings(where.stated_settings, **found).mode

    assert mode("--topology", str(plain)) == "auto"
    file("mode: stream\n")
    assert mode("--topology", str(plain)) == "stream"
    assert mode("--topology", str(topology)) == "batched"
    monkeypatch.setenv(MODE_VARIABLE, "auto")
    assert mode("--topology", str(topology)) == mode("--topology", str(plain)) == "auto"
    assert mode("--topology", str(topology), "--mode", "stream") == "stream"


def test_threads_of_a_topology_and_a_fit_by_one_keep_the_files_out(file, tmp_path):
    file("threads: 1\nexperts_on_card: 3\n")
    assert overrides_of("x") == {"threads": 1, "experts_on_card": 3}
    topology = tmp_path / "t.yaml"
    topology.write_text("version: 1\nworkers: [{name: w0}, {name: w1}]\n")
    assert overrides_of("x", "--topology", str(topology)) == {"threads": 1}
    topology.write_text("version: 1\nworkers: [{name: w0}, {name: w1, threads: 1}]\n")
    assert overrides_of("x", "--topology", str(topology)) == {}


def test_options_of_commands_come_from_the_file_unless_they_are_given(file):
    text = "model: ~/m.gguf\ntemperature: 0.7\nmax_tokens: 9\nseed: 4\nsystem: Be short.\n"
    file(text)
    generate = commands()["generate",].make_context("generate", ["-p", "x", "-n", "3"]).params
    assert (generate["model"], generate["temperature"], generate["max_tokens"]) == (os.path.expanduser("~/m.gguf"), 0.7, 3)
    assert commands()["chat",].make_context("chat", []).params["system"] == "Be short."
    # The seed of random ids is no sampling.
    assert commands()["verify",].make_context("verify", []).params["seed"] == 0


def test_only_commands_for_a_model_of_ones_own_read_it(file):
    assert {words[0] for words, one in commands().items() if getattr(one.callback, "reads_config", False)} == set(READERS)
    file("model: [broken\n")
    context = commands()["bench", "prefill"].make_context("prefill", ["-m", "demo"])
    assert context.params["model"] == "demo"
    # `llama` takes the model of its program.
    file("model: demo\n")
    assert commands()["llama",].make_context("llama", ["--", "true"]).params["model"] is None


def test_help_does_not_depend_on_the_file(file, capsys):
    file("mode: [broken\n")
    assert main.run(["generate", "--help"]) == 0
    assert main.run(["help", "generate"]) == 0


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("mode: fast\n", ":1: mode: 'fast' is not allowed; allowed: auto, batched, stream (any case)"),
        ("\n# note\nmax-context: 5\n", ":3: unknown key 'max-context'; did you mean 'max_context'?"),
        ("call_timeout_s: 5\n", ":1: unknown key 'call_timeout_s'"),
        ("mode: auto\nmode: stream\n", ":2: duplicate key 'mode'; it is also on line 1"),
        ("temperature: hot\n", ":1: temperature='hot' is not allowed; allowed: a number 0..10000"),
        ("top_p: 0\n", ":1: top_p=0 is not allowed; allowed: above 0 and at most 1"),
        ("max_tokens: 1.5\n", ":1: max_tokens=1.5 is not allowed; allowed: an integer 1.."),
        ("model: 7\n", ":1: model must be text, found 7"),
        ("system: {a: 1}\n", ":1: system must be a single value, not a map"),
        ("- mode\n", ":1: the file must be a map of options, such as `max_context: 16384`"),
        ("mode: [a\n", ":2: "),
        ("threads: 0\n", ":1: threads: 0 is not allowed; allowed: 1..1024 threads"),
    ],
)
def test_what_is_wrong_is_named_with_file_and_line(text, says, file, capsys):
    path = file(text)
    assert main.run(["generate", "-m", "demo", "-p", "x"]) == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith(f"{path}{says}")


def test_a_named_file_must_be_there_and_the_usual_one_need_not(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv(CONFIG_VARIABLE, str(tmp_path / "none.yaml"))
    assert main.run(["plan", "-m", "demo"]) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith(f"DFLASH_MOE_CONFIG={tmp_path}/none.yaml: ")
    assert last.endswith("cannot be read: No such file or directory; name a file of options, or DFLASH_MOE_CONFIG=none")
    home = {"XDG_CONFIG_HOME": str(tmp_path)}
    assert read_config_file(home).path is None
    path = tmp_path / "dflash-moe" / "config.yaml"
    path.parent.mkdir()
    path.write_text("# nothing yet\n")
    assert read_config_file(home).path == path
    path.write_text("seed: 3\n")
    assert read_config_file(home).options["seed"].origin == f"{path}:1"
    assert read_config_file({**home, CONFIG_VARIABLE: "none"}).path is None


@pytest.mark.parametrize("content", [b"\xff\xfe", b"a: " + b"x" * (1 << 20)])
def test_a_file_of_other_bytes_is_refused(content, tmp_path):
    path = tmp_path / "c.yaml"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=f"^{path}:1: the file is "):
        read_config_file({CONFIG_VARIABLE: str(path)})


def test_every_flag_of_a_setting_has_its_key():
    assert {setting.name for setting in SETTINGS if setting.flag} <= set(KEYS)


def test_doctor_says_where_each_value_comes_from(file, monkeypatch, capsys, tmp_path):
    topology = tmp_path / "t.yaml"
    topology.write_text("version: 1\nipc: {dtype: f32}\nengine: {kv_memory: 10%}\nworkers: [{name: w0}]\n")
    path = file("max_context: 4096\ndtype: bf16\ntemperature: 0.5\n")
    monkeypatch.setenv(MODE_VARIABLE, "stream")
    assert main.run(["doctor", "--topology", str(topology), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["settings"]
    assert found == {
        "mode": {"value": "stream", "from": MODE_VARIABLE},
        "dtype": {"value": "f32", "from": f"{topology}: ipc.dtype"},
        "kv_memory": {"value": "10%", "from": f"{topology}: engine.kv_memory"},
        "max_context": {"value": "4096", "from": f"{path}:1"},
        "temperature": {"value": "0.5", "from": f"{path}:3"},
        "cache_path": {"value": "none", "from": "DFLASH_MOE_CACHE_PATH"},
    }
    assert main.run(["doctor"]) == 0
    out = capsys.readouterr().out
    assert f"settings   mode         stream  {MODE_VARIABLE}\n" in out
    file("mode: fast\n")
    assert main.run(["doctor"]) == 0
    assert "mode: 'fast' is not allowed" in capsys.readouterr().out
