"""A program as `dflash-moe llama` starts it, with a library in Python that takes the workers over
and calls them: `python handover_program.py SCENE OUT`. It stands in for csrc/c_interface.

What the scene finds is written to OUT as JSON.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import json
import mmap
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from dflash_moe import _core
from dflash_moe.errors import DflashError, WorkerError
from dflash_moe.protocol.framing import Connection, PeerGone
from dflash_moe.protocol.handover import (
    HANDOVER_CODEC,
    HANDOVER_TOKEN_BYTES,
    HANDOVER_VERSION,
    Counted,
    OpenHandover,
    PathAnswered,
    PathOffered,
    PathTerms,
    PathWorn,
    PlanHead,
    PlannedLayer,
    PlannedShard,
    PlannedTensor,
    PlannedWorker,
    Ready,
    RefuseHandover,
    TensorSeen,
    WorkerGone,
)
from dflash_moe.protocol.messages import expand_experts

WAIT_S = 60.0
SEED = 5
NUM_TOKENS = 3


class Refused(Exception):
    """The supervisor's sentence."""


def token_fd() -> int:
    return int(os.environ["DFLASH_MOE_HANDOVER_TOKEN_FD"].partition(":")[0])


def token() -> bytes:
    descriptor = token_fd()
    with os.fdopen(descriptor, "rb") as pipe:
        return pipe.read(HANDOVER_TOKEN_BYTES)


def dial() -> Connection:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.connect(os.environ["DFLASH_MOE_HANDOVER"])
    return Connection(sock, HANDOVER_CODEC)


class Library:
    """The program's side of a hand-over, with one connection and one client of ours."""

    def __init__(self, secret: bytes) -> None:
        self.connection = dial()
        self.is_open = False
        self.say(OpenHandover(version=HANDOVER_VERSION, token=secret, layout=_core.layout_fingerprint()))
        self.head = self.hear(PlanHead)
        self.workers = [self.hear(PlannedWorker) for _ in range(self.head.num_workers)]
        self.layers = [self.hear(PlannedLayer) for _ in range(self.head.num_layers)]
        self.shards = [self.hear(PlannedShard) for _ in range(self.head.num_shards)]
        self.tensors = [self.hear(PlannedTensor) for _ in range(self.head.num_tensors)]
        self.generations: list[int] = []
        self.calls = 0
        self.client = self._new_client()
        while not isinstance(message := self.hear(), Ready):
            self.make_path(message)
        self._define_layers()
        self.is_open = True

    def _new_client(self) -> _core.Client:
        return _core.Client(
            spin_ns=self.head.spin_ns, call_timeout_s=self.head.call_timeout_ns * 1e-9,
            stall_timeout_s=self.head.stall_timeout_ns * 1e-9,
        )  # fmt: skip

    def _define_layers(self) -> None:
        for layer in self.layers:
            shards = [
                (shard.shard, shard.worker, shard.weights_fingerprint, expand_experts(shard.expert_ranges))
                for shard in self.shards
                if shard.layer == layer.layer
            ]
            self.client.define_layer(
                layer=layer.layer, name=layer.name, in_size=layer.in_size, out_size=layer.out_size,
                num_experts=layer.num_experts, shards=shards, cost_class=layer.cost_class,
            )  # fmt: skip

    def say(self, message: Any, descriptors: Any = ()) -> None:
        try:
            self.connection.send(message, deadline=time.monotonic() + WAIT_S, descriptors=descriptors)
        except PeerGone:
            # A supervisor that refuses has hung up; what it said is still to be heard.
            if self.is_open:
                raise

    def hear(self, wanted: Any = None) -> Any:
        message = self.connection.receive(deadline=time.monotonic() + WAIT_S, waiting_for="the supervisor")
        if isinstance(message, RefuseHandover):
            raise Refused(message.text)
        if isinstance(message, WorkerGone) and not self.is_open:
            self.connection.close()
            raise Refused(f"worker {self.workers[message.worker].name} was lost: {message.reason}")
        assert wanted is None or isinstance(message, wanted), message
        return message

    def make_path(self, terms: PathTerms) -> None:
        assert isinstance(terms, PathTerms), terms
        made = _core.PathTerms(
            _core.Geometry(terms.num_slots, terms.request_bytes, terms.reply_bytes), terms.generation,
            socket_buffer_bytes=terms.socket_buffer_bytes, user_timeout_ms=terms.user_timeout_ms, local_host=terms.local_host,
        )  # fmt: skip
        offer = _core.offer_path(terms.transport, made)
        count = len(offer.descriptors)
        offered = PathOffered(worker=terms.worker, generation=terms.generation, payload=offer.payload, num_descriptors=count)
        self.say(offered, offer.descriptors)
        answered = self.hear(PathAnswered)
        assert (answered.worker, answered.generation) == (terms.worker, terms.generation)
        descriptors = self.connection.take_descriptors(answered.num_descriptors)
        pulse = descriptors.pop() if answered.has_pulse else -1
        channel = offer.complete(answered.payload, descriptors)
        self.generations.append(terms.generation)
        if pulse < 0:
            self.client.renew_path(terms.worker, channel, terms.generation)
            return
        if self.client.workers() and self.head.num_workers == 1:
            self.client = self._new_client()
        planned = self.workers[terms.worker]
        number = self.client.add_worker(
            name=planned.name, channel=channel, generation=terms.generation, pulse_fd=pulse,
            slice_tokens=planned.slice_tokens, window=planned.window, request_dtype=planned.request_dtype,
            reply_dtype=planned.reply_dtype, is_measured=planned.is_measured,
        )  # fmt: skip
        assert number == terms.worker

    def wear(self, worker: int) -> None:
        self.client.retire_path(worker, "the test wears it")
        self.say(PathWorn(worker=worker, reason="the test wears it"))
        self.make_path(self.hear(PathTerms))

    def call(self, layer: PlannedLayer) -> np.ndarray:
        rows, ids, weights = inputs(layer.in_size, layer.num_experts, layer.top_k)
        output = np.zeros((NUM_TOKENS, layer.out_size), dtype=np.float32)
        batch = _core.TokenBatch(
            rows.ctypes.data, rows.strides[0], "f32", NUM_TOKENS, layer.top_k, ids.ctypes.data, False,
            weights.ctypes.data, "f32", output.ctypes.data, (rows, ids, weights, output),
        )  # fmt: skip
        self.client.run(layer.layer, batch)
        self.calls += 1
        return output

    def call_all(self) -> list[Any]:
        return [self.call(layer).tolist() for layer in self.layers]

    def report_tensors(self, reason: str = "") -> None:
        for tensor in self.tensors:
            self.say(TensorSeen(name=tensor.name, reason=reason))

    def count(self) -> None:
        self.say(
            Counted(
                calls=self.calls, failed_calls=0, messages=self.calls, rows=1, request_bytes=600, reply_bytes=400,
                floor_bytes=1000, call_ns=2_000_000_000, compute_ns=1_000_000_000,
            )
        )  # fmt: skip


def inputs(in_size: int, num_experts: int, top_k: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    random = np.random.default_rng(SEED)
    rows = random.standard_normal((NUM_TOKENS, in_size), dtype=np.float32)
    ids = np.stack([random.permutation(num_experts)[:top_k] for _ in range(NUM_TOKENS)]).astype(np.int32)
    return rows, ids, random.random((NUM_TOKENS, top_k), dtype=np.float32)


def compute() -> Any:
    library = Library(token())
    library.report_tensors()
    outputs = library.call_all()
    library.count()
    return {
        "outputs": outputs,
        "architecture": library.head.architecture,
        "threads": os.environ.get("LLAMA_ARG_THREADS"),
    }


def worn() -> Any:
    library = Library(token())
    before = library.call_all()
    for worker in range(library.head.num_workers):
        library.wear(worker)
        library.wear(worker)
    after = library.call_all()
    library.count()
    return {"equal": before == after, "generations": library.generations}


def refused(act: Any) -> str:
    try:
        act()
    except Refused as refusal:
        return str(refusal)
    return ""


def second() -> Any:
    secret = token()
    library = Library(secret)
    library.call_all()
    text = refused(lambda: Library(secret))
    # The first client is none the worse for it.
    library.call_all()
    library.count()
    return text


def wrong_token() -> Any:
    return refused(lambda: Library(bytes(HANDOVER_TOKEN_BYTES)))


def grandchild() -> Any:
    descriptor = token_fd()
    out = sys.argv[2] + ".child"
    subprocess.run([sys.executable, __file__, "dial", out], pass_fds=(descriptor,), check=True)
    return json.loads(Path(out).read_text())


def just_dial() -> Any:
    return refused(lambda: Library(token()))


def kept() -> Any:
    Library(token()).report_tensors("no kernel for it")
    wait_for_end()


def idle() -> Any:
    library = Library(token())
    library.call_all()
    library.count()
    ready()
    wait_for_end()


def interrupts() -> Any:
    """Counts how often a Ctrl-C reaches it, and goes on."""
    library = Library(token())
    library.call_all()
    library.count()
    ready()
    count = 0
    while signal.sigtimedwait([signal.SIGINT], WAIT_S if not count else 1.0):
        count += 1
    return count


def leaver() -> Any:
    """Takes the plan, and goes on without the workers."""
    connection = dial()
    greeting = OpenHandover(version=HANDOVER_VERSION, token=token(), layout=_core.layout_fingerprint())
    connection.send(greeting, deadline=time.monotonic() + WAIT_S)
    connection.receive(deadline=time.monotonic() + WAIT_S, waiting_for="the plan")
    connection.close()
    wait_for_end()


def silent() -> Any:
    with open(os.environ["TEST_MODEL"], "rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        ready()
        wait_for_end()
        mapped.close()


def local() -> Any:
    """Loads the model, computes by itself and ends well."""
    with open(os.environ["TEST_MODEL"], "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ):
        time.sleep(2.0)


def lost() -> Any:
    """Calls until a worker is lost, and tells what the supervisor says of it."""
    library = Library(token())
    library.report_tensors()
    library.call_all()
    ready()
    until = time.monotonic() + WAIT_S
    failure = ""
    while not failure and time.monotonic() < until:
        try:
            library.call_all()
        except WorkerError as error:
            failure = str(error)
    gone = library.hear(WorkerGone)
    library.count()
    return {"failure": failure, "worker": gone.worker, "reason": gone.reason}


def back() -> Any:
    """Goes on with a worker that was lost and came back."""
    library = Library(token())
    before = library.call_all()
    ready()
    gone = library.hear(WorkerGone)
    library.make_path(library.hear(PathTerms))
    library._define_layers()
    after = library.call_all()
    library.count()
    return {"equal": before == after, "reason": gone.reason, "generations": library.generations}


def hostile() -> Any:
    """Says what it must not, as the fourth argument asks, and waits for the answer."""
    library = Library(token())
    library.call_all()
    library.count()
    with open(os.devnull, "rb") as null:
        offered = PathOffered(worker=0, generation=(1 << 64) - 1, payload=b"", num_descriptors=1)
        said = {
            "worker": (PathWorn(worker=1000, reason="x"), ()),
            "generation": (offered, (null.fileno(),)),
            "descriptors": (PathWorn(worker=0, reason="x"), (null.fileno(),)),
            "missing": (offered, ()),
            "role": (Ready(), ()),
        }[sys.argv[3]]  # fmt: skip
        library.say(*said)
    return refused(library.hear)


def garbage() -> Any:
    """Sends bytes that are no message."""
    library = Library(token())
    library.connection.send_payload(b"\xc1", deadline=time.monotonic() + WAIT_S)
    return refused(library.hear)


def late() -> Any:
    """Asks for the workers when it is told to, and goes on without them."""
    ready()
    while not Path(sys.argv[2] + ".go").exists():
        time.sleep(0.01)
    text = refused(lambda: Library(token()))
    publish("", json.dumps(text))
    wait_for_end()


def broken() -> Any:
    """Goes on for a while after it broke the protocol."""
    library = Library(token())
    library.say(Ready())
    signal.sigtimedwait([signal.SIGTERM], 1.0)
    sys.exit(7)


def stopped() -> Any:
    """Wears the path of a worker that answers nothing any more."""
    library = Library(token())
    library.call_all()
    ready()
    while not Path(sys.argv[2] + ".stopped").exists():
        time.sleep(0.01)
    library.client.retire_path(0, "the test wears it")
    library.say(PathWorn(worker=0, reason="the test wears it"))
    num_tries = 0
    while isinstance(message := library.hear(), PathTerms):
        num_tries += 1
        made = _core.PathTerms(
            _core.Geometry(message.num_slots, message.request_bytes, message.reply_bytes), message.generation
        )
        offer = _core.offer_path(message.transport, made)
        count = len(offer.descriptors)
        offered = PathOffered(worker=0, generation=message.generation, payload=offer.payload, num_descriptors=count)
        library.say(offered, offer.descriptors)
    assert isinstance(message, WorkerGone), message
    return {"num_tries": num_tries, "reason": message.reason}


def orphan() -> Any:
    """Tells its process id and waits for the end of the supervisor."""
    library = Library(token())
    library.call_all()
    publish("", json.dumps(os.getpid()))
    ready()
    wait_for_end()


def ready() -> None:
    publish(".ready", "")


def publish(suffix: str, text: str) -> None:
    """Writes the output file, or one beside it. Who sees it exists sees all of it, even if this
    process is killed right now.
    """
    path = Path(sys.argv[2] + suffix)
    part = path.with_name(f"{path.name}.part")
    part.write_text(text)
    part.rename(path)


def wait_for_end() -> None:
    signal.sigtimedwait([signal.SIGTERM], WAIT_S)
    sys.exit(7)


SCENES = {
    "compute": compute, "worn": worn, "second": second, "wrong_token": wrong_token, "grandchild": grandchild,
    "dial": just_dial, "kept": kept, "idle": idle, "silent": silent, "local": local, "lost": lost, "back": back,
    "hostile": hostile, "orphan": orphan, "interrupts": interrupts, "leaver": leaver, "garbage": garbage,
    "broken": broken, "late": late, "stopped": stopped,
}  # fmt: skip

if __name__ == "__main__":
    if sys.argv[1] in ("kept", "idle", "silent", "orphan", "leaver", "late"):
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    if sys.argv[1] == "interrupts":
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        result = SCENES[sys.argv[1]]()
    except DflashError as error:
        sys.exit(f"{type(error).__name__}: {error}")
    publish("", json.dumps(result))
