"""The control messages of one session: every type once, with every field that a minor version has.

`python -m tests.golden.control_messages` prints them as tests/golden/control/minor_N.json holds
them. A file of a former minor version is never written again.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import json
import sys

from dflash_moe.protocol import messages
from dflash_moe.protocol.messages import CODEC
from dflash_moe.protocol.schema import Message

LIMITS = {"max_rows": 4096, "max_slots": 256}
FFN = {0: 96, 1: 64, "gate": {"name": "layers.0.experts.{expert}.gate", "per_expert": True}, "bias": None}

# Each message with the fields that it had in minor version 0.
MINOR_0: dict[str, dict[str, object]] = {
    "Open": {
        "protocol_min": 2, "protocol_max": 2, "protocol_minor": 0, "role": 1, "session_id": bytes(range(16)), "generation": 0,
        "nonce": bytes(range(32)),
    },
    "Challenge": {"protocol": 2, "protocol_minor": 0, "nonce": bytes(range(32, 64))},
    "Proof": {"mac": bytes(range(64, 96))},
    "Accepted": {"mac": bytes(range(96, 128))},
    "Refusal": {"code": 64, "text": "worker far is busy"},
    "Hello": {
        "package_version": "0.1.0", "worker": "far", "numerics_class": "f32-canonical", "model_fingerprint": "ab" * 32,
        "wire_limits": LIMITS, "dtypes": ("f32", "f16", "bf16"), "capabilities": ("shared", "unix", "tcp"), "threads": 3,
        "spin_ns": 50_000, "slowdown": 1.5, "isa": "avx2", "cpus": (0, 2, 4), "backend": "sim", "device": 1,
        "simulate": "cuda", "weights_layout": "mapped",
    },
    "HelloReply": {
        "package_version": "0.1.0", "worker": "far", "numerics_class": "f32-canonical", "model_fingerprint": "ab" * 32,
        "wire_limits": LIMITS, "dtypes": ("f32", "f16", "bf16"), "capabilities": ("shared", "unix", "tcp"), "isa": "avx2",
        "threads": 3, "pid": 4711, "memory_available": 1 << 34, "memory_limit": 1 << 30,
        "numerics_offered": ("f32-canonical", "int8-groups"), "device": "sim:1 (a card)",
    },
    "LoadShard": {
        "layer": 1, "shard": 2, "name": "layers.1.experts", "ffn": FFN, "weight_dtype": "q4_k+q6_k",
        "expert_ranges": (0, 3, 7, 1), "weights_fingerprint": 0x1234_5678_9ABC_DEF0, "numerics": "f32-canonical",
    },
    "Progress": {"counter": 3, "resident_bytes": 1 << 20},
    "ShardLoaded": {"layer": 1, "shard": 2, "resident_bytes": 1 << 21},
    "Attach": {
        "generation": 9, "transport": "shared", "num_slots": 4, "request_bytes": 8192, "reply_bytes": 4096,
        "num_descriptors": 3, "has_pulse": True, "socket_buffer_bytes": 65536, "is_open": True,
    },
    "Listening": {"port": 7171},
    "Attached": {"generation": 9, "num_descriptors": 1},
    "StatsRequest": {},
    "Stats": {"counters": {"calls": 5, "resident_weight_bytes": 1 << 21}},
    "Bye": {"reason": "done"},
}  # fmt: skip
# Minor version 1 added these fields and messages.
MINOR_1: dict[str, dict[str, object]] = {
    "Hello": {"start_timeout_s": 60.0},
    "ShardLoaded": {"is_checked": True, "content_checksum": 0x0FED_CBA9_8765_4321},
    "Attach": {"offer": b"a host's address"},
    "Attached": {"answer": b"a worker's address"},
    "ChecksumRequest": {"layer": 1, "shard": 2},
    "Checksum": {"layer": 1, "shard": 2, "num_read": 4, "is_checked": True, "content_checksum": 0x0FED_CBA9_8765_4321},
}
# Minor version 2 added these.
MINOR_2: dict[str, dict[str, object]] = {
    "Hello": {"scrub_s": 3600.0},
    "HelloReply": {"kept_bytes": 1 << 29},
    "ComputeRow": {
        "layer": 1, "shard": 2, "local_expert_ids": (0, 3), "weights": b"\0\0\0?\0\0\x80>", "row": b"\x80?\0@",
        "row_dtype": "bf16", "reply_dtype": "f32",
    },
    "RowComputed": {"layer": 1, "shard": 2, "row": b"\0\0\x80?\0\0\0@"},
    "WeightsChanged": {"layer": 1, "shard": 2, "local_expert_id": 3, "failure": "model.safetensors: cannot be read"},
}  # fmt: skip
# Minor version 3 added words of Hello.weights_layout, and this field.
MINOR_3: dict[str, dict[str, object]] = {"Hello": {"slots_bytes": 1 << 33}}


def session(*minors: dict[str, dict[str, object]]) -> list[Message]:
    """Returns the messages that these versions have together, with all their fields."""
    fields: dict[str, dict[str, object]] = {}
    for minor in minors:
        for name, own in minor.items():
            fields[name] = {**fields.get(name, {}), **own}
    return [getattr(messages, name)(**own) for name, own in fields.items()]


def encoded(told: list[Message]) -> dict[str, str]:
    """Returns the bytes of each message in hexadecimal, by the name of its type."""
    return {type(message).__name__: CODEC.encode(message).hex() for message in told}


if __name__ == "__main__":
    minors = (MINOR_0, MINOR_1, MINOR_2, MINOR_3)
    json.dump(encoded(session(*minors[: messages.PROTOCOL_MINOR + 1])), sys.stdout, indent=1)
    sys.stdout.write("\n")
