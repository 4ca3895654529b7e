"""The manifests of docs/howto/kubernetes.md: their command runs as in pods, in network namespaces
with the environment and the files that they say.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from dflash_moe.model.spec import ModelSpec
from tests.cluster.conftest import ENVIRONMENT, ROOT
from tests.cluster.pods import HEAD_ADDRESS, PORT, Pods, within
from tests.fault.conftest import READY_S, first_line

PAGE = (ROOT / "docs" / "howto" / "kubernetes.md").read_text(encoding="utf-8")
SECRET, SET = (
    yaml.safe_load(textwrap.dedent(block)) for block in re.findall(r"^ *```yaml\n(.*?)^ *```", PAGE, re.DOTALL | re.MULTILINE)
)
(TOPOLOGY,) = (textwrap.dedent(block) for block in re.findall(r"^ +version: 1\n(?: +.*\n)+", PAGE, re.MULTILINE))


@pytest.fixture
def pods() -> Iterator[Pods]:
    made = Pods(SET["spec"]["replicas"])
    try:
        if lacking := made.make():
            pytest.skip(f"this machine makes no network namespaces: {lacking}")
        yield made
    finally:
        made.close()


def mounted(folder: Path, key_file: Path) -> Path:
    """Lays out the Secret's volume as a kubelet does, by links; returns where it is mounted."""
    (volume,) = [one for one in SET["spec"]["template"]["spec"]["volumes"] if "secret" in one]
    assert volume["secret"]["secretName"] == SECRET["metadata"]["name"]
    data = folder / "keys" / "..2026_01_01"
    data.mkdir(parents=True)
    (folder / "keys" / "..data").symlink_to(data.name)
    for name in SECRET["stringData"]:
        (data / name).write_text(key_file.read_text())
        (data / name).chmod(volume["secret"]["defaultMode"])
        (folder / "keys" / name).symlink_to(f"..data/{name}")
    return folder / "keys"


def container_of(pod: str, mounts: dict[str, str]) -> tuple[list[str], dict[str, str]]:
    """Returns command and environment of a pod's container, with other folders for its mounts."""
    (container,) = SET["spec"]["template"]["spec"]["containers"]
    fields = {"metadata.name": pod}
    variables = {one["name"]: fields[one["valueFrom"]["fieldRef"]["fieldPath"]] for one in container["env"]}
    assert {mount["mountPath"] for mount in container["volumeMounts"]} == {"/keys", "/models"}

    def expanded(word: str) -> str:
        for name, value in variables.items():
            word = word.replace(f"$({name})", value)
        for path, there in mounts.items():
            word = word.replace(path, there)
        return word

    program, *words = map(expanded, container["command"])
    assert program == "dflash-moe"
    # A pod has no home, and no variables but its own and the image's.
    image = {name: ENVIRONMENT[name] for name in ("PATH", "PYTHONPATH")}
    return [sys.executable, "-m", "dflash_moe", *words], {**image, **variables}


def answer(head: subprocess.Popen[str]) -> Any:
    line = first_line(head)
    assert line, head.communicate("", timeout=READY_S)[1]
    return json.loads(line)


def test_pods_register_under_their_names_come_back_and_say_goodbye(
    pods: Pods, spec: ModelSpec, key_file: Path, tmp_path: Path
) -> None:
    names = [f"{SET['metadata']['name']}-{index}" for index in range(SET["spec"]["replicas"])]
    keys = mounted(tmp_path, key_file)
    mounts = {"/keys": str(keys), "/models/qwen3": spec.path, "dflash-head": HEAD_ADDRESS}
    running: list[subprocess.Popen[str]] = []

    def start(index: int) -> subprocess.Popen[str]:
        command, env = container_of(names[index], mounts)
        running.append(within(pods.pods[index], *command, env=env))
        assert first_line(running[-1]) == f"worker {names[index]} registers at tcp://{HEAD_ADDRESS}:{PORT}"
        return running[-1]

    try:
        first, second = start(0), start(1)
        program = str(Path(__file__).with_name("head_program.py"))
        head = within(pods.head, sys.executable, program, spec.path, str(key_file), env=dict(ENVIRONMENT))
        running.append(head)
        assert head.stdin is not None
        head.stdin.write(TOPOLOGY + "---\n")
        head.stdin.flush()
        # The threads that the page gives are no more than a wish here, where there are fewer cores.
        assert answer(head) == {names[0]: first.pid, names[1]: second.pid}
        head.stdin.write(names[1] + "\n")
        head.stdin.flush()
        second.kill()
        third = start(1)
        assert answer(head) == {names[0]: first.pid, names[1]: third.pid}
        head.stdin.close()
        for pod in (first, third):
            pod.terminate()
            assert pod.wait(READY_S) == 130
        assert all("told to stop" in reason for reason in answer(head).values())
        assert head.wait(READY_S) == 0
    finally:
        for process in running:
            process.kill()
            process.wait(READY_S)
            for pipe in (process.stdin, process.stdout, process.stderr):
                if pipe is not None and not pipe.closed:
                    pipe.close()


def test_the_pods_of_the_page_are_the_workers_of_its_topology() -> None:
    listed = [worker["name"] for worker in yaml.safe_load(TOPOLOGY)["workers"]]
    assert listed == [f"{SET['metadata']['name']}-{index}" for index in range(SET["spec"]["replicas"])]
