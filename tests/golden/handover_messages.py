"""The messages of a hand-over, every type once.

`python -m tests.golden.handover_messages` prints them as tests/golden/handover/messages.txt holds
them: the message's name and its bytes in hexadecimal. The codec of
csrc/wire/handover_messages.h is held to that file.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from dflash_moe import _core
from dflash_moe.protocol import handover as h

MESSAGES: tuple[h.HandoverMessage, ...] = (
    h.OpenHandover(version=h.HANDOVER_VERSION, token=bytes(range(h.HANDOVER_TOKEN_BYTES)), layout=0x12345678),
    h.RefuseHandover(text="another client is connected \u2013 close it"),
    h.PlanHead(
        num_workers=2, num_layers=1, num_shards=2, num_tensors=3, architecture="qwen3moe", fingerprint="ab" * 32,
        spin_ns=50_000, call_timeout_ns=30_000_000_000, stall_timeout_ns=2_000_000_000,
    ),
    h.PlannedWorker(
        name="far", slice_tokens=256, window=4, is_measured=True, request_dtype="bf16", reply_dtype="f32",
    ),
    h.PlannedLayer(
        layer=5, name="blk.5", in_size=1024, intermediate_size=384, out_size=1024, num_experts=128, top_k=8, cost_class=3,
        activation=1, gate=2, alpha=1.702, up_offset=-1.0, gate_max=7.0, up_limit=0.0, has_gate_up_bias=True,
        has_down_bias=False,
    ),
    h.PlannedShard(layer=5, shard=1, worker=1, weights_fingerprint=2**63 + 5, expert_ranges=(0, 64, 70, 1)),
    h.PlannedTensor(
        layer=5, name="blk.5.ffn_up_exps.weight", ggml_type=8, extents=(1024, 384, 128), num_bytes=53_477_376,
        file_offset=4_294_967_328, has_sample=True, sample=0xFFFFFFFE,
    ),
    h.PathTerms(
        worker=1, generation=12, transport="shared", num_slots=5, request_bytes=1_048_576, reply_bytes=524_288,
        socket_buffer_bytes=65_535, user_timeout_ms=65_536, local_host="10.0.0.1",
    ),
    h.PathOffered(worker=1, generation=12, payload=b"", num_descriptors=2),
    h.PathAnswered(worker=1, generation=12, payload=bytes(300), num_descriptors=2, has_pulse=True),
    h.Ready(),
    h.PathWorn(worker=0, reason="2 of its 3 slots wait for replies that are late"),
    h.WorkerGone(worker=0, reason=""),
    h.TensorSeen(name="blk.5.ffn_up_exps.weight", reason="r" * 256),
    h.Counted(
        calls=1, failed_calls=0, messages=127, rows=128, request_bytes=255, reply_bytes=256, floor_bytes=65_535, call_ns=2**32,
        compute_ns=2**64 - 1,
    ),
)  # fmt: skip


def lines() -> list[str]:
    """Returns the lines of the golden file, without their ends."""
    names = [name for name, _ in _core.handover_tables()]
    return [f"{name} {h.HANDOVER_CODEC.encode(message).hex()}" for name, message in zip(names, MESSAGES, strict=True)]


if __name__ == "__main__":
    print("\n".join(lines()))
