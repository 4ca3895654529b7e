"""Checks `workers[].emulate` against a real link: two network namespaces joined by a delay line,
rates shaped by the kernel.

    python -m bench.campaigns.emulated_link [--mbit-s 200] [--delay-ms 2] [--rounds 5] \
        [--json bench/results/emulated_link.json]

A worker runs in one namespace and the host in the other. Between them lie two TUN devices, whose
packets a process of this script carries across after the delay, and whose rate the kernel shapes
(tc tbf). The same calls go to a second worker beside the host, over loopback TCP and `emulate:` of
the same numbers. It needs root, /dev/net/tun, and ip and tc (iproute2).
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import argparse
import collections
import fcntl
import multiprocessing
import os
import select
import shutil
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bench.campaigns.harness import command_line
from bench.lab.link_check import LinkParams, run_link_check
from dflash_moe.bench.harness import Recorder
from dflash_moe.cli.bench.progress import reporting
from dflash_moe.cli.main import report
from dflash_moe.protocol.keys import write_key_file
from dflash_moe.testing.tiny import tiny_checkpoint
from dflash_moe.topology import Topology

HOST, WORKER, PORT = "10.77.0.1", "10.77.0.2", 7171
# The namespaces and the TUN devices in them have these names.
ENDS = {"dflash-host": HOST, "dflash-worker": WORKER}
# Large packets give the delay line fewer of them to carry.
MTU = 9000
TUNSETIFF, IFF_TUN_NO_PI = 0x400454CA, 0x1001
SHAPE = {"hidden_size": 1024, "moe_intermediate_size": 384, "num_experts": 32, "top_k": 8, "num_layers": 4, "dtype": "bf16"}


def main() -> int:
    """Does what the module text says, and returns the exit status."""
    arguments = _arguments()
    if arguments.inside:
        return measure(arguments)
    if os.geteuid() != 0 or not shutil.which("tc") or not Path("/dev/net/tun").exists():
        raise SystemExit("emulated_link needs root, /dev/net/tun, ip and tc (Debian: apt install iproute2)")
    with tempfile.TemporaryDirectory(prefix="dflash-link-") as folder, shaped_link(arguments.mbit_s, arguments.delay_ms):
        place = Path(folder)
        tiny_checkpoint(place / "model", **SHAPE)  # type: ignore[arg-type]
        write_key_file(place / "key")
        (place / "topology.yaml").write_text(
            f"version: 1\nhost: {{threads: 1}}\nworkers:\n"
            f'  - {{name: far, backend: cpu, threads: 1, address: "tcp://{WORKER}:{PORT}"}}\n',
            encoding="utf-8",
        )
        program = [sys.executable, "-m", "dflash_moe", "worker", "--topology", place / "topology.yaml", "--name", "far"]
        program += ["--model", place / "model", "--key-file", place / "key"]
        worker = subprocess.Popen(_within("dflash-worker", program))
        try:
            inside = [sys.executable, "-m", "bench.campaigns.emulated_link", "--inside", place, "--json", arguments.json]
            inside += ["--rounds", arguments.rounds, "--mbit-s", arguments.mbit_s, "--delay-ms", arguments.delay_ms]
            return subprocess.run(_within("dflash-host", inside), check=False).returncode
        finally:
            worker.terminate()
            worker.wait(10)


def measure(arguments: argparse.Namespace) -> int:
    """Measures from the host's side, inside its namespace, and returns the exit status."""
    place: Path = arguments.inside
    params = LinkParams(mbit_s=arguments.mbit_s, delay_ms=arguments.delay_ms, repeat=arguments.rounds)
    spec = tiny_checkpoint(place / "host_model", **SHAPE)  # type: ignore[arg-type]  # the same seed, the same bytes
    try:
        with reporting() as reporter:
            result = run_link_check(
                params, spec, Topology.load(place / "topology.yaml"), place / "key", recorder=Recorder(arguments.json, reporter)
            )
    except Exception as error:  # noqa: BLE001 - as the command line does: one sentence and an exit code
        return report(error, is_debug=False)
    for entry in result.summary:
        print(f"{entry['tokens']:>5} tokens in {entry['num_slices']}: real / emulated = {entry['ratio']:.3f}")
    return 0


@contextmanager
def shaped_link(mbit_s: float, delay_ms: float) -> Iterator[None]:
    """Makes both namespaces with their devices, and the process that carries packets between them,
    for the block. All are gone at its end.
    """
    devices = []
    try:
        for name, address in ENDS.items():
            device = os.open("/dev/net/tun", os.O_RDWR)
            devices.append(device)
            fcntl.ioctl(device, TUNSETIFF, struct.pack("16sH", name.encode(), IFF_TUN_NO_PI))
            _run("ip", "netns", "add", name)
            _run("ip", "link", "set", name, "netns", name)
            _run("ip", "-n", name, "link", "set", "lo", "up")
            _run("ip", "-n", name, "addr", "add", f"{address}/24", "dev", name)
            _run("ip", "-n", name, "link", "set", name, "mtu", str(MTU), "up")
            # The burst is what leaves at once, which is one packet. The queue holds more than TCP
            # keeps under way.
            rate = ["rate", f"{mbit_s}mbit", "burst", "10k", "limit", "64mb"]
            _run("tc", "-n", name, "qdisc", "add", "dev", name, "root", "tbf", *rate)
        ends = (devices[0], devices[1], delay_ms / 1e3)
        carrier = multiprocessing.get_context("fork").Process(target=carry, args=ends, daemon=True)
        carrier.start()
        yield
        carrier.kill()
        carrier.join()
    finally:
        for device in devices:
            os.close(device)
        for name in ENDS:
            subprocess.run(["ip", "netns", "del", name], check=False, stderr=subprocess.DEVNULL)


def carry(one: int, other: int, delay_s: float) -> None:
    """Takes every packet to the other side `delay_s` after it came. Ends when it is killed."""
    # Each entry is (when, to, packet), in the order of arrival.
    waiting: collections.deque[tuple[float, int, bytes]] = collections.deque()
    across = {one: other, other: one}
    while True:
        now = time.monotonic()
        while waiting and waiting[0][0] <= now:
            _, target, packet = waiting.popleft()
            os.write(target, packet)
        timeout = max(0.0, waiting[0][0] - now) if waiting else None
        for device in select.select([one, other], [], [], timeout)[0]:
            waiting.append((time.monotonic() + delay_s, across[device], os.read(device, MTU + 64)))


def _within(namespace: str, program: list[object]) -> list[str]:
    return ["ip", "netns", "exec", namespace, *(str(part) for part in program)]


def _run(*command: str) -> None:
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}: {done.stderr.strip() or done.stdout.strip()}")


def _arguments() -> argparse.Namespace:
    parser = command_line(__doc__, "emulated_link")
    parser.add_argument("--mbit-s", type=float, default=200.0, help="rate of both directions [200]")
    parser.add_argument("--delay-ms", type=float, default=2.0, help="one way [2]")
    parser.add_argument("--rounds", type=int, default=5, help="measured rounds [5]")
    parser.add_argument("--inside", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
