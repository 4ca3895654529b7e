"""Two network namespaces as two machines, and one cable between them that can be cut, in both
directions or in one. It needs root and `ip`. (lossy_cable.py has another cable for them.)

A direction is cut by the sender's neighbour table: frames to an address that nobody has are dropped
by the other end without a word, as a network does. So no packet filter is needed.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import os
import shutil
import subprocess

HOST_ADDRESS, WORKER_ADDRESS = "192.0.2.1", "192.0.2.2"
HOST_LINK, WORKER_LINK = "dm0", "dm1"
NOBODY = "02:00:00:00:00:01"
COMMAND_S = 30.0
# The ways in which the link is cut: to the worker, to the host, both, and the cable itself.
WAYS = ("requests", "replies", "both", "cable")


class TwoMachines:
    """The namespaces `host` and `worker`, which are gone after `close`."""

    def __init__(self, names: tuple[str, str] | None = None) -> None:
        self.host, self.worker = names or (f"dflash{os.getpid()}h", f"dflash{os.getpid()}w")

    def make(self, *, has_link: bool = True) -> str:
        """Returns why they cannot be made, empty where they were. Without `has_link` nothing joins
        them yet.
        """
        if shutil.which("ip") is None:
            return "there is no `ip` (package iproute2)"
        link = [f"-n {self.host} link add {HOST_LINK} type veth peer name {WORKER_LINK} netns {self.worker}"]
        link += [command for end in self.ends() for command in _plugged(*end)]
        for command in (
            f"netns add {self.host}", f"netns add {self.worker}",
            f"-n {self.host} link set lo up", f"-n {self.worker} link set lo up",
            *(link if has_link else []),
        ):  # fmt: skip
            if reason := _ip(command):
                return reason
        return ""

    def ends(self) -> tuple[tuple[str, str, str], tuple[str, str, str]]:
        """Returns the two ends of the cable, the host's first: namespace, name of the link there,
        and its address.
        """
        return (self.host, HOST_LINK, HOST_ADDRESS), (self.worker, WORKER_LINK, WORKER_ADDRESS)

    def plug_in(self, device: str, end: tuple[str, str, str]) -> None:
        """Makes a network device of this process's namespace the link at an end. Raises OSError
        with what `ip` said.
        """
        namespace, link, _ = end
        for command in (f"link set {device} netns {namespace} name {link}", *_plugged(*end)):
            self._do(command)

    def cut(self, way: str) -> None:
        """Cuts the link in one of WAYS. Raises OSError with what `ip` said."""
        if way in ("requests", "both"):
            self._do(f"-n {self.host} neigh replace {WORKER_ADDRESS} lladdr {NOBODY} dev {HOST_LINK} nud permanent")
        if way in ("replies", "both"):
            self._do(f"-n {self.worker} neigh replace {HOST_ADDRESS} lladdr {NOBODY} dev {WORKER_LINK} nud permanent")
        if way == "cable":
            self._do(f"-n {self.worker} link set {WORKER_LINK} down")

    def heal(self, way: str) -> None:
        """Undoes `cut`. Raises OSError with what `ip` said."""
        if way in ("requests", "both"):
            self._do(f"-n {self.host} neigh del {WORKER_ADDRESS} dev {HOST_LINK}")
        if way in ("replies", "both"):
            self._do(f"-n {self.worker} neigh del {HOST_ADDRESS} dev {WORKER_LINK}")
        if way == "cable":
            self._do(f"-n {self.worker} link set {WORKER_LINK} up")

    def within(self, namespace: str) -> list[str]:
        """Returns the words before a command that runs in one of the two."""
        return ["ip", "netns", "exec", namespace]

    def close(self) -> None:
        """Takes both away; never raises."""
        if shutil.which("ip") is not None:
            for name in (self.host, self.worker):
                _ip(f"netns del {name}")

    def _do(self, command: str) -> None:
        if reason := _ip(command):
            raise OSError(reason)


def _plugged(namespace: str, link: str, address: str) -> tuple[str, str]:
    return f"-n {namespace} addr add {address}/30 dev {link}", f"-n {namespace} link set {link} up"


def _ip(command: str) -> str:
    done = subprocess.run(["ip", *command.split()], capture_output=True, text=True, timeout=COMMAND_S, check=False)
    return "" if done.returncode == 0 else f"`ip {command}`: {done.stderr.strip()}"


def why_not() -> str:
    """Returns why two machines cannot be made here, empty where they can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    made = TwoMachines()
    try:
        return made.make()
    finally:
        made.close()
