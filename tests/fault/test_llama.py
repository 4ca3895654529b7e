"""`dflash-moe llama` with a program that takes the workers over and calls them: same bits, who may
take them, renewals, lost workers, signals, and the proof that nothing is computed silently.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import contextlib
import json
import os
import pty
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("gguf")

from bench.models.tiny_gguf import tiny_gguf
from dflash_moe.cli import main
from dflash_moe.cli.llama import proof
from dflash_moe.experts.expert_runtime import ExpertRuntime
from dflash_moe.model.gguf_architectures.gguf_experts import gguf_experts
from dflash_moe.model.stub import write_stub
from dflash_moe.topology import Topology
from tests import handover_program

PROGRAM = Path(handover_program.__file__)
ROOT = PROGRAM.parents[1]
LIMIT_S = 120
WORKERS = "version: 1\nworkers:\n"


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    tiny_gguf(path, "q8_0", hidden_size=64, moe_intermediate_size=32, num_experts=8, top_k=2, num_layers=2)
    return path


def topology(folder: Path, *workers: str) -> Path:
    path = folder / "topology.yaml"
    path.write_text(WORKERS + "".join(f"  - {{{worker}}}\n" for worker in workers))
    return path


Llama = Callable[..., tuple[int, str]]


@pytest.fixture(autouse=True)
def lost_workers_are_missed() -> None:
    """No host of ours is here that could stand in for a worker, so that none is forbidden to."""


@pytest.fixture
def llama(model, tmp_path, monkeypatch, capfd) -> Llama:
    """Runs the command in this process, which saves it an import of half a second, and gives its
    exit code and what came to stderr.
    """
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("TEST_MODEL", str(model))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.chdir(ROOT)

    def run(*arguments: object) -> tuple[int, str]:
        code = main.run(["llama", *map(str, arguments)])
        stderr = capfd.readouterr().err
        assert not list(tmp_path.glob("dflash-moe-*")), stderr
        return code, stderr

    return run


@pytest.fixture
def play(llama, model, tmp_path) -> Llama:
    """Runs the command with a program that plays a scene."""

    def run(scene: str, *flags: object) -> tuple[int, str]:
        scene, *arguments = scene.split()
        program = [sys.executable, PROGRAM, scene, tmp_path / "out", *arguments]
        return llama("--model", model, "--plugin", "none", *flags, "--", *program)

    return run


def start(
    scene: str, out: Path, model: Path, *flags: object, new_session: bool = False, terminal: int = -1
) -> subprocess.Popen[str]:
    """Starts the command in a process, for what comes from outside while it runs. `terminal`
    becomes the process's own, in a session of its own.
    """
    command = [
        sys.executable, "-m", "dflash_moe", "llama", "--model", model, "--plugin", "none", *flags, "--",
        sys.executable, PROGRAM, scene, out,
    ]  # fmt: skip
    if terminal >= 0:
        # Opening a terminal makes it that of a session without one.
        take = "import os, sys; os.open(os.ttyname(int(sys.argv[1])), os.O_RDWR); os.execv(sys.argv[2], sys.argv[2:])"
        command = [sys.executable, "-c", take, terminal, *command]
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "TEST_MODEL": str(model), "TMPDIR": str(out.parent)}
    return subprocess.Popen(
        [*map(str, command)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environ, cwd=ROOT,
        start_new_session=new_session or terminal >= 0, pass_fds=[terminal] if terminal >= 0 else (),
    )  # fmt: skip


def end(process: subprocess.Popen[str], out: Path) -> tuple[int, str]:
    """(exit code, stderr). The folder of the hand-over is gone by then."""
    try:
        _, stderr = process.communicate(timeout=LIMIT_S)
    finally:
        process.kill()
    assert not list(out.parent.glob("dflash-moe-*")), stderr
    return process.returncode, stderr


def wait_until_ready(process: subprocess.Popen[str], out: Path) -> None:
    until = time.monotonic() + LIMIT_S
    while not Path(f"{out}.ready").exists():
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < until
        time.sleep(0.02)


def children_of(parent: int) -> dict[int, list[bytes]]:
    """The command lines of a process's children."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if int((entry / "stat").read_text().rpartition(")")[2].split()[1]) == parent:
                    found[int(entry.name)] = (entry / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
    return found


def worker_process(process: subprocess.Popen[str], name: str) -> int:
    """The process of a worker that `process` started."""
    workers = children_of(process.pid)
    return next(pid for pid, command in workers.items() if b"worker" in command and name.encode() in command)


TWO = ("name: w0, backend: cpu, threads: 1", "name: w1, backend: cpu, threads: 1")


@pytest.mark.parametrize("address", ["", ", address: unix", ", address: tcp"])
@pytest.mark.timeout(300)
def test_program_gets_the_bits_of_a_runtime(play, model, tmp_path, address):
    plan = topology(tmp_path, *(worker + address for worker in TWO))
    code, stderr = play("compute", "--topology", plan)
    assert code == 0, stderr
    assert "dflash-moe: 2 calls, 1000 bytes moved, 1.000 of the floor, 2.00 s in experts, 1.00 s of it" in stderr
    found = json.loads((tmp_path / "out").read_text())
    assert found["architecture"] == "qwen3moe"
    assert int(found["threads"]) >= 1
    with ExpertRuntime.start(Topology.load(plan), gguf_experts(model).spec) as runtime:
        for layer, output in zip(runtime.layers, found["outputs"], strict=True):
            rows, ids, weights = handover_program.inputs(layer.ffn.in_size, layer.num_experts, layer.top_k)
            assert runtime.experts(layer.index, rows, ids, weights).tolist() == output


@pytest.mark.parametrize(("address", "encryption"), [("", "auto"), (", address: tcp", "auto"), (", address: tcp", "on")])
def test_worn_paths_are_renewed(play, tmp_path, monkeypatch, address, encryption):
    monkeypatch.setenv("DFLASH_MOE_EXPERT_COMPUTE_IPC_ENCRYPTION", encryption)
    plan = topology(tmp_path, *(worker + address for worker in TWO))
    code, stderr = play("worn", "--topology", plan)
    assert code == 0, stderr
    found = json.loads((tmp_path / "out").read_text())
    assert found["equal"]
    assert len(set(found["generations"])) == 6


@pytest.mark.parametrize(
    ("scene", "said"),
    [
        ("second", "has taken the workers already"),
        ("wrong_token", "the token is not the one"),
        ("grandchild", "have a script replace itself by it (exec)"),
        ("hostile worker", "worker 1000 of 1"),
        ("hostile generation", "which nobody asked for"),
        ("hostile descriptors", "announced 0 descriptors, 1 arrived"),
        ("hostile missing", "announced 1 descriptors, 0 arrived"),
        ("hostile role", "Ready, which only the supervisor sends"),
        ("garbage", "not a msgpack message"),
    ],
)
def test_others_get_a_sentence(play, tmp_path, scene, said):
    code, stderr = play(scene)
    assert code == 0, stderr
    assert said in json.loads((tmp_path / "out").read_text())


def test_program_that_keeps_a_tensor_is_ended(play, monkeypatch):
    monkeypatch.setattr(proof, "KEPT_S", 0.5)
    code, stderr = play("kept")
    assert code == 1
    last = stderr.splitlines()[-1]
    assert "keeps" in last
    assert "blk.0.ffn_" in last
    assert "no kernel for it" in last


@pytest.mark.parametrize(("scene", "said"), [("silent", "has not asked for the workers"), ("local", "called no worker")])
def test_program_that_computes_by_itself_is_noticed(play, monkeypatch, scene, said):
    if scene == "silent":
        monkeypatch.setattr(proof, "DIAL_S", 0.5)
    code, stderr = play(scene)
    assert code == 1
    assert said in stderr.splitlines()[-1]


def test_lost_worker_is_told_once_and_the_program_lives(model, tmp_path):
    process = start("lost", tmp_path / "out", model, "--topology", topology(tmp_path, *TWO))
    wait_until_ready(process, tmp_path / "out")
    os.kill(worker_process(process, "w1"), signal.SIGKILL)
    code, stderr = end(process, tmp_path / "out")
    assert code == 0, stderr
    found = json.loads((tmp_path / "out").read_text())
    assert "w1" in found["failure"]
    assert found["worker"] == 1
    assert stderr.count("worker w1 is lost: hung up; process") == 1
    assert "was killed by SIGKILL" in stderr


@pytest.mark.parametrize(("number", "expected"), [(signal.SIGTERM, 7), (signal.SIGHUP, 128 + 1), (signal.SIGINT, 1)], ids=str)
def test_signals_are_passed_on(model, tmp_path, number, expected):
    process = start("idle", tmp_path / "out", model, new_session=True)
    wait_until_ready(process, tmp_path / "out")
    process.send_signal(number)
    code, stderr = end(process, tmp_path / "out")
    # The program waits for SIGTERM, SIGHUP kills it, and Ctrl-C ends its interpreter.
    assert code == (130 if number == signal.SIGINT else expected), stderr


def test_signal_to_the_group_reaches_the_program_once_and_no_worker(model, tmp_path):
    out = tmp_path / "out"
    process = start("interrupts", out, model, "--topology", topology(tmp_path, *TWO), new_session=True)
    wait_until_ready(process, out)
    children = children_of(process.pid)
    assert len(children) == 3
    assert process.pid not in [os.getpgid(pid) for pid in children]
    os.killpg(process.pid, signal.SIGINT)
    code, stderr = end(process, out)
    assert code == 0, stderr
    assert json.loads(out.read_text()) == 1


def test_sigterm_to_the_group_leaves_the_workers_to_the_program(model, tmp_path):
    out = tmp_path / "out"
    process = start("idle", out, model, new_session=True)
    wait_until_ready(process, out)
    os.killpg(process.pid, signal.SIGTERM)
    code, stderr = end(process, out)
    assert code == 7, stderr
    assert "hung up" not in stderr


def without_restart(path: Path) -> Path:
    path.write_text(path.read_text() + "failure: {restart: off}\n")
    return path


def test_worker_lost_before_the_hand_over_ends_the_program(model, tmp_path):
    out = tmp_path / "out"
    process = start("late", out, model, "--topology", without_restart(topology(tmp_path, *TWO)))
    wait_until_ready(process, out)
    os.kill(worker_process(process, "w0"), signal.SIGKILL)
    Path(f"{out}.go").touch()
    code, stderr = end(process, out)
    assert code == 3, stderr
    assert "w0" in json.loads(out.read_text())
    assert stderr.splitlines()[-1].startswith("worker w0 ")


def test_program_that_ends_when_refused_leaves_the_last_word_to_us(model, tmp_path):
    out = tmp_path / "out"
    process = start("late", out, model, "--topology", without_restart(topology(tmp_path, *TWO)))
    wait_until_ready(process, out)
    children = children_of(process.pid).items()
    program = next(pid for pid, command in children if os.fsencode(PROGRAM) in command)
    os.kill(worker_process(process, "w0"), signal.SIGKILL)
    Path(f"{out}.go").touch()
    while not out.exists() and process.poll() is None:
        time.sleep(0.001)
    # It is gone before it is looked at again, unless this test is slow.
    with contextlib.suppress(ProcessLookupError):
        os.kill(program, signal.SIGKILL)
    code, stderr = end(process, out)
    assert code == 3, stderr
    assert "w0" in json.loads(out.read_text())
    assert stderr.splitlines()[-1].startswith("worker w0 ")


def test_worker_that_does_not_renew_its_path_is_lost(model, tmp_path):
    plan = topology(tmp_path, TWO[0])
    plan.write_text(plan.read_text() + "ipc: {call_timeout_s: 0.3}\n")
    process = start("stopped", tmp_path / "out", model, "--topology", plan)
    wait_until_ready(process, tmp_path / "out")
    os.kill(worker_process(process, "w0"), signal.SIGSTOP)
    (tmp_path / "out.stopped").touch()
    code, stderr = end(process, tmp_path / "out")
    assert code == 0, stderr
    found = json.loads((tmp_path / "out").read_text())
    assert found["num_tries"] == 3
    assert "did not answer when its data path was to be renewed, 3 times" in found["reason"]
    assert stderr.count("calls that need worker w0 fail until it is back") == 1


def test_program_that_breaks_the_protocol_is_said(play):
    code, stderr = play("broken")
    assert code == 7, stderr
    assert stderr.count("the hand-over has ended, and calls fail from now on") == 1


def test_ctrl_c_of_a_terminal_reaches_the_program_once(model, tmp_path):
    ours, theirs = pty.openpty()
    out = tmp_path / "out"
    process = start("interrupts", out, model, terminal=theirs)
    os.close(theirs)
    try:
        wait_until_ready(process, out)
        os.write(ours, b"\x03")
        code, stderr = end(process, out)
    finally:
        os.close(ours)
    assert code == 0, stderr
    assert json.loads(out.read_text()) == 1
    assert "2 calls" in stderr


def test_program_that_lets_go_of_the_workers_is_ended(play):
    code, stderr = play("leaver")
    assert code == 1
    assert "hung up before it had taken the workers" in stderr.splitlines()[-1]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=str)
def test_signal_while_loading_leaves_nothing(model, tmp_path, number):
    process = start("idle", tmp_path / "out", model, new_session=True)
    until = time.monotonic() + LIMIT_S
    while not (children := children_of(process.pid)) and time.monotonic() < until:
        time.sleep(0.005)
    assert children
    process.send_signal(number)
    code, stderr = end(process, tmp_path / "out")
    assert code == 128 + number, stderr
    assert "Traceback" not in stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--", "no-such-program"], "'no-such-program': not found"),
        (["--", "true"], "no model is named"),
        (["--model", "gone.gguf", "--", "true"], "'gone.gguf': no such file"),
        (["--plugin", "gone.so", "--", "true"], "--plugin gone.so: no such file"),
        (["--model", "README.md", "--", "true"], "README.md"),
    ],
)
def test_bad_input_is_one_sentence(llama, arguments, said):
    code, stderr = llama(*arguments)
    assert code == 2, stderr
    assert said in stderr.splitlines()[-1]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("workers:\n  - {name: w0, backend: cpu, address: loopback}\n", "address loopback is the host's process"),
        ("workers:\n  - {name: w0, backend: cpu, emulate: {delay_ms: 1}}\n", "are emulated in a host of ours only"),
        ("host:\n  experts: {memory: 1GiB}\nworkers:\n  - {name: w0, backend: cpu}\n", "keeps experts in the host's process"),
    ],
)
def test_topology_that_needs_a_host_of_ours_is_refused(play, tmp_path, text, said):
    (tmp_path / "plan.yaml").write_text("version: 1\n" + text)
    code, stderr = play("compute", "--topology", tmp_path / "plan.yaml")
    assert code == 2, stderr
    assert said in stderr.splitlines()[-1]


def test_stub_is_nothing_for_workers_of_this_command(llama, model, tmp_path):
    write_stub(model, tmp_path / "stub.gguf")
    code, stderr = llama("--model", tmp_path / "stub.gguf", "--plugin", "none", "--", "true")
    assert code == 2, stderr
    assert "name the full file, for the workers, with --model FILE" in stderr.splitlines()[-1]


def test_telling_flags_run_the_program_alone(tmp_path):
    program = tmp_path / "llama-tells"
    program.write_text("#!/bin/sh\necho told $1\n")
    program.chmod(0o755)
    command = [sys.executable, "-m", "dflash_moe", "llama", "--", program, "--version"]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, cwd=ROOT, timeout=LIMIT_S, check=False)
    assert done.returncode == 0
    assert done.stdout == "told --version\n"
    assert done.stderr == ""


def test_router_is_refused_although_the_workers_have_a_model(llama, model, tmp_path):
    program = tmp_path / "llama-server"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    code, stderr = llama("--model", model, "--allow-local", "--", program)
    assert code == 2
    assert "router mode starts processes of its own" in stderr.splitlines()[-1]


def test_exit_code_is_the_programs(llama, model):
    code, stderr = llama("--model", model, "--plugin", "none", "--", "sh", "-c", "exit 5")
    assert code == 5, stderr
    last = stderr.splitlines()[-1]
    assert last.startswith("the program has ended with exit code 5 and has not asked for the workers")
    assert "dflash_moe_open" in last


def is_there(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def test_counters_of_a_program_that_called_nobody_are_zeros(llama, model, tmp_path):
    counters = tmp_path / "counters.json"
    counters.write_text('{"calls": 7}')
    code, stderr = llama("--model", model, "--plugin", "none", "--json", counters, "--", "true")
    assert code == 0, stderr
    assert set(json.loads(counters.read_text()).values()) == {0}


def test_killed_launcher_takes_program_and_workers_along(model, tmp_path):
    process = start("orphan", tmp_path / "out", model)
    wait_until_ready(process, tmp_path / "out")
    pids = children_of(process.pid)
    assert json.loads((tmp_path / "out").read_text()) in pids
    # The worker ends too, although it is in a session of its own.
    assert len(pids) == 2
    process.kill()
    process.communicate(timeout=LIMIT_S)
    until = time.monotonic() + LIMIT_S
    while any(map(is_there, pids)) and time.monotonic() < until:
        time.sleep(0.02)
    assert not any(map(is_there, pids))


def hand_worker(model: Path, plan: Path, *flags: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "dflash_moe", "worker", "--name", "w0", "--model", model, "--topology", plan, *flags]
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen([*map(str, command)], stdout=subprocess.PIPE, text=True, env=environ, cwd=ROOT)
    assert process.stdout is not None
    assert "listens on" in process.stdout.readline()
    return process


@pytest.mark.parametrize(("kind", "encryption"), [("unix", "auto"), ("tcp", "auto"), ("tcp", "on")])
def test_worker_by_hand_comes_back(model, tmp_path, monkeypatch, kind, encryption):
    monkeypatch.setenv("DFLASH_MOE_EXPERT_COMPUTE_IPC_ENCRYPTION", encryption)
    key, flags = tmp_path / "key", []
    if kind == "tcp":
        subprocess.run(
            [sys.executable, "-m", "dflash_moe", "key", "make", key], check=True, cwd=ROOT, stdout=subprocess.DEVNULL
        )
        flags = ["--key-file", key]
    address = f"tcp://127.0.0.1:{free_port()}" if kind == "tcp" else f"unix://{tmp_path}/w0.sock"
    plan = topology(tmp_path, f"name: w0, backend: cpu, threads: 1, address: '{address}'")
    worker = hand_worker(model, plan, *flags)
    process = start("back", tmp_path / "out", model, "--topology", plan, *flags)
    try:
        wait_until_ready(process, tmp_path / "out")
        worker.kill()
        worker.communicate()
        worker = hand_worker(model, plan, *flags)
        code, stderr = end(process, tmp_path / "out")
    finally:
        process.kill()
        worker.kill()
        worker.communicate()
    assert code == 0, stderr
    assert json.loads((tmp_path / "out").read_text())["equal"]
    assert stderr.count("calls that need worker w0 fail until it is back") == 1
    assert "worker w0 is back" in stderr


def test_started_worker_is_started_again_and_handed_over(model, tmp_path):
    process = start("back", tmp_path / "out", model, "--topology", topology(tmp_path, TWO[0]))
    wait_until_ready(process, tmp_path / "out")
    os.kill(worker_process(process, "w0"), signal.SIGKILL)
    code, stderr = end(process, tmp_path / "out")
    assert code == 0, stderr
    assert json.loads((tmp_path / "out").read_text())["equal"]
    assert stderr.count("worker w0 is lost: hung up; process") == 1
    assert "worker w0 is back" in stderr


def test_started_worker_that_dies_again_and_again_is_left_alone(model, tmp_path):
    plan = topology(tmp_path, *TWO)
    plan.write_text(plan.read_text() + "failure: {restart: {deaths: 1}}\n")
    process = start("lost", tmp_path / "out", model, "--topology", plan)
    wait_until_ready(process, tmp_path / "out")
    os.kill(worker_process(process, "w1"), signal.SIGKILL)
    code, stderr = end(process, tmp_path / "out")
    assert code == 0, stderr
    assert json.loads((tmp_path / "out").read_text())["worker"] == 1
    assert stderr.count("calls that need worker w1 fail until it is back") == 1
    assert stderr.count("worker w1 is not started again: ") == 1


def test_worker_by_hand_that_returns_with_another_model_is_said_once(model, tmp_path):
    other = tmp_path / "other.gguf"
    tiny_gguf(other, "q8_0", hidden_size=64, moe_intermediate_size=64, num_experts=8, top_k=2, num_layers=2)
    plan = topology(tmp_path, f"name: w0, backend: cpu, threads: 1, address: 'unix://{tmp_path}/w0.sock'")
    worker = hand_worker(model, plan)
    process = start("back", tmp_path / "out", model, "--topology", plan)
    assert process.stderr is not None
    said = ""
    try:
        wait_until_ready(process, tmp_path / "out")
        worker.kill()
        worker.communicate()
        worker = hand_worker(other, plan)
        while "cannot be taken" not in said:
            line = process.stderr.readline()
            assert line, said
            said += line
        # It is dialled again meanwhile, and nothing is said of it any more.
        time.sleep(2.0)
        worker.kill()
        worker.communicate()
        worker = hand_worker(model, plan)
        code, stderr = end(process, tmp_path / "out")
    finally:
        process.kill()
        worker.kill()
        worker.communicate()
    said += stderr
    assert code == 0, said
    assert said.count("worker w0 is there again and cannot be taken: ") == 1
    assert "worker w0 is back" in said


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
