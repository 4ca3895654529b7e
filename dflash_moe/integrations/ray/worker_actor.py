"""The actor that is one worker's place in a cluster of Ray's: it starts the worker as its child,
and ends with it, whereupon Ray starts the actor anew.

Ray imports this module on each node, where `dflash_moe` is installed.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading

# A worker that was refused for good ends with the exit code of bad input. Its actor waits so long
# before it ends, since Ray starts actors anew at once and the answer would be the same.
REFUSED = 2
REFUSED_PAUSE_S = 30.0
# A worker that was told to end says goodbye to its host in milliseconds, also while it computes.
GOODBYE_S = 5.0
START_S = 30.0
# Ray leaves the children of a killed actor running, so that the kernel has to end this one. The
# request for that outlives exec, and is made after the fork, by a process of its own: code of ours
# between fork and exec could meet a lock that another thread of the actor held.
_TIED = (
    "import os, sys; from dflash_moe.workers.lifeline import tie_to_parent; "
    "tie_to_parent(int(sys.argv[1])); os.execv(sys.argv[2], sys.argv[2:])"
)


class WorkerActor:
    """Runs `dflash-moe worker` with `arguments`. `key_text`, where it is given, is what the key
    file of the worker says: the worker reads it from memory, and no file is written.
    """

    def __init__(self, name: str, arguments: tuple[str, ...], key_text: str | None) -> None:
        self._name = name
        self._arguments = arguments
        self._key_text = key_text
        self._child: subprocess.Popen[bytes] | None = None
        self._started = threading.Event()
        self._is_stopping = threading.Event()
        # The kernel's signal comes when the thread ends that has started the child, so that this is
        # a thread which lives as long as the actor.
        threading.Thread(target=self._live, name="worker", daemon=True).start()

    def place(self) -> tuple[str, str, int]:
        """Returns the id of Ray's node, its address, and the number of the worker's process there,
        0 where it was not started in START_S seconds.
        """
        import ray

        self._started.wait(START_S)
        pid = self._child.pid if self._child is not None else 0
        return ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address(), pid

    def stop(self) -> None:
        """Has the worker say goodbye and end; the actor stays until somebody ends it."""
        self._is_stopping.set()
        self._started.wait(START_S)
        if self._child is None:
            return
        self._child.terminate()
        try:
            self._child.wait(GOODBYE_S)
        except subprocess.TimeoutExpired:
            self._child.kill()

    def _live(self) -> None:
        code = self._start().wait()
        if not self._is_stopping.is_set():
            sys.stderr.write(f"worker {self._name} ended with exit code {code}, and Ray starts it anew\n")
            sys.stderr.flush()
        if self._is_stopping.wait(REFUSED_PAUSE_S if code == REFUSED else 0.0):
            return
        # Ray starts an actor anew whose process fails, and not one that leaves.
        os._exit(1)

    def _start(self) -> subprocess.Popen[bytes]:
        options, inherited = [], []
        if self._key_text is not None:
            inherited = [_key_in_memory(self._key_text)]
            options = ["--key-file", f"/proc/self/fd/{inherited[0]}"]
        worker = [sys.executable, "-m", "dflash_moe", "worker", *self._arguments, *options]
        try:
            # What the worker says goes where the actor's own output goes: into Ray's logs.
            self._child = subprocess.Popen(
                [sys.executable, "-c", _TIED, str(os.getpid()), *worker], stdin=subprocess.DEVNULL, pass_fds=inherited
            )
        finally:
            for descriptor in inherited:
                os.close(descriptor)
            self._started.set()
        return self._child


def _key_in_memory(text: str) -> int:
    descriptor = os.memfd_create("dflash_moe key", os.MFD_CLOEXEC)
    os.fchmod(descriptor, 0o600)
    with open(descriptor, "w", encoding="ascii", closefd=False) as file:
        file.write(text)
    return descriptor
