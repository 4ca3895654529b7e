"""Fuzzes the control plane: `fuzz_control_messages.py SECONDS [SEED]`. Any bytes decode to a
message or to a ProtocolError. (Those of a hand-over have fuzz_handover.cc.)

Mutates real messages as bytes and as msgpack trees, and feeds the result to the codec and, framed,
to a connection. A message that decodes must encode and decode to itself. A finding is printed, kept
in build/fuzz/findings, and ends with exit status 1.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import dataclasses
import hashlib
import random
import socket
import struct
import sys
import time
from pathlib import Path
from typing import Any

import msgpack

from dflash_moe.errors import ProtocolError, WorkerTimeout
from dflash_moe.protocol.framing import Connection, PeerGone
from dflash_moe.protocol.messages import CODEC
from dflash_moe.protocol.schema import (
    Binary,
    Codec,
    FieldSchema,
    Flag,
    Float,
    ListOf,
    Message,
    Table,
    Text,
    Tree,
    Uint,
)

FINDINGS = Path(__file__).resolve().parents[2] / "build/fuzz/findings"
_EDGES: tuple[Any, ...] = (
    0, 1, -1, 255, 2**16, 2**32, 2**63, 2**64 - 1, -(2**63), 0.0, -0.0, float("nan"), float("inf"), True, False, None, "", b"",
    "x" * 5000, b"\0" * 5000, [], [[[[[[[]]]]]]], {}, {0: {0: {0: {0: {0: {}}}}}}, [0] * 3000,
    "\ud800".encode("utf-8", "surrogatepass"), msgpack.ExtType(5, b"x"), msgpack.Timestamp(0, 0),
)  # fmt: skip


def seeds() -> list[bytes]:
    """One valid message of every type."""
    return [CODEC.encode(_example(schema)) for schema in CODEC.schemas.values()]


def _example(schema: Any) -> Message:
    return schema.cls(**{item.name: _example_value(item) for item in schema.fields})


def _example_value(item: FieldSchema) -> Any:
    if item.default is not dataclasses.MISSING:
        return item.default
    kind = item.kind
    tree = {"a": [1, {2: "b"}]}
    values: dict[type, Any] = {
        Uint: 1,
        Float: 1.0,
        Flag: True,
        Text: "f32",
        ListOf: (),
        Table: {"a": 1},
        Tree: tree,
    }
    return bytes(1 if kind.may_be_shorter else kind.num_bytes) if isinstance(kind, Binary) else values[type(kind)]


def mutate(data: bytes, random_: random.Random) -> bytes:
    """Flips, cuts, repeats or replaces bytes, or exchanges a value of the decoded tree."""
    choice = random_.randrange(6)
    if choice == 0:
        return _mutate_tree(data, random_)
    changed = bytearray(data)
    for _ in range(random_.randrange(1, 4)):
        at = random_.randrange(len(changed) + 1)
        if choice == 1 and at < len(changed):
            changed[at] ^= 1 << random_.randrange(8)
        elif choice == 2 and at < len(changed):
            changed[at] = random_.randrange(256)
        elif choice == 3:
            del changed[at : at + random_.randrange(1, 9)]
        elif choice == 4:
            changed[at:at] = random_.randbytes(random_.randrange(1, 9))
        else:
            end = at + random_.randrange(1, 17)
            changed[at:at] = changed[at:end] * random_.randrange(1, 5)
    return bytes(changed)


def _mutate_tree(data: bytes, random_: random.Random) -> bytes:
    try:
        tree = msgpack.unpackb(data, strict_map_key=False)
    except (ValueError, TypeError, msgpack.UnpackException):
        return data
    if isinstance(tree, dict) and tree:
        key = random_.choice([*tree, random_.randrange(40), "text"])
        tree[key] = random_.choice(_EDGES)
    try:
        return msgpack.packb(tree)
    except (ValueError, TypeError, OverflowError):
        return data


def examine(data: bytes) -> str | None:
    """What is wrong with how the codec and the framing take `data`; None when nothing is."""
    return _examine_message(CODEC, data) or _examine_frame(data)


def _examine_message(codec: Codec, data: bytes) -> str | None:
    try:
        message = codec.decode(data)
    except ProtocolError:
        message = None
    except Exception as error:  # noqa: BLE001 - any other exception is the finding
        return f"decode raised {type(error).__name__}: {error}"
    if message is not None:
        again = codec.decode(codec.encode(message))
        # The texts are compared, because nan differs from itself.
        if repr(again) != repr(message):
            return f"round trip changed {message!r} to {again!r}"
    return None


def _examine_frame(data: bytes) -> str | None:
    ours, theirs = socket.socketpair()
    connection = Connection(ours)
    try:
        theirs.sendall(struct.pack("<I", len(data)) + data if len(data) % 3 else data)
        theirs.close()
        connection.receive(deadline=time.monotonic() + 1, waiting_for="a fuzzed message")
    except (ProtocolError, PeerGone, WorkerTimeout):
        pass
    except Exception as error:  # noqa: BLE001 - any other exception is the finding
        return f"receive raised {type(error).__name__}: {error}"
    finally:
        theirs.close()
        connection.close()
    return None


def run(limit_s: float, seed: int) -> int:
    """Fuzzes for `limit_s` seconds; returns the exit status."""
    random_ = random.Random(seed)
    corpus = seeds()
    num_executed = 0
    end = time.monotonic() + limit_s
    while time.monotonic() < end:
        data = mutate(random_.choice(corpus), random_)
        num_executed += 1
        problem = examine(data)
        if problem:
            FINDINGS.mkdir(parents=True, exist_ok=True)
            path = FINDINGS / f"control-{hashlib.sha256(data).hexdigest()[:16]}"
            path.write_bytes(data)
            print(f"{problem}\nseed {seed}, input {num_executed}, kept in {path.name}", file=sys.stderr)
            return 1
        if len(data) < 4096 and len(corpus) < 4096 and random_.random() < 0.05:
            corpus.append(data)
    print(f"{num_executed} control messages, seed {seed}, no finding")
    return 0


if __name__ == "__main__":
    sys.exit(run(float(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else time.time_ns() % 2**32))
