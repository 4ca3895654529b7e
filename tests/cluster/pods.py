"""Pods of this machine: network namespaces from which a head can be dialled, and the head's own.
None of them can reach another pod, and the head knows of no pod's address.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import os
import shutil
import subprocess

HEAD_ADDRESS = "198.51.100.1"
PORT = 7170


class Pods:
    """The namespaces `head` and `pods`."""

    def __init__(self, count: int) -> None:
        self.head = f"dflash{os.getpid()}head"
        self.pods = [f"dflash{os.getpid()}pod{index}" for index in range(count)]

    def make(self) -> str:
        """Returns why they cannot be made, empty where they were."""
        if shutil.which("ip") is None:
            return "there is no `ip` (package iproute2)"
        head = self.head
        commands = [f"netns add {head}", f"-n {head} link set lo up", f"-n {head} addr add {HEAD_ADDRESS}/32 dev lo"]
        for index, pod in enumerate(self.pods):
            address = f"198.51.100.{10 + index}"
            commands += [
                f"netns add {pod}", f"-n {pod} link set lo up",
                f"-n {head} link add pod{index} type veth peer name eth0 netns {pod}",
                f"-n {head} link set pod{index} up", f"-n {pod} link set eth0 up",
                f"-n {pod} addr add {address}/32 dev eth0",
                f"-n {pod} route add {HEAD_ADDRESS}/32 dev eth0", f"-n {head} route add {address}/32 dev pod{index}",
            ]  # fmt: skip
        for command in commands:
            done = subprocess.run(["ip", *command.split()], capture_output=True, text=True, timeout=30, check=False)
            if done.returncode != 0:
                return f"`ip {command}`: {done.stderr.strip()}"
        return ""

    def close(self) -> None:
        if shutil.which("ip") is None:
            return
        for name in (self.head, *self.pods):
            subprocess.run(["ip", "netns", "del", name], capture_output=True, timeout=30, check=False)


def within(namespace: str, *command: str, env: dict[str, str]) -> subprocess.Popen[str]:
    pipe = subprocess.PIPE
    return subprocess.Popen(
        ["ip", "netns", "exec", namespace, *command], env=env, stdin=pipe, stdout=pipe, stderr=pipe, text=True
    )
