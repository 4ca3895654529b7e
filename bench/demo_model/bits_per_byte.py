"""Bits per byte of the shipped model on held-out text, by wire dtype, with its experts on two
workers over shared memory.

    python bench/demo_model/bits_per_byte.py [--out bench/results/bits_per_byte.json]

Beside the remote rows stands the model's own eager implementation. The text is what training held
out: the corpus must have the committed hash, so this runs under the Python release that corpus.py
names.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
from corpus import LICENCE, checked_corpus
from held_out import NUM_WINDOWS, SEQUENCE_TOKENS, HeldOutText, held_out_text, window_bits
from transformers import AutoTokenizer

from dflash_moe.bench.results import BenchResult
from dflash_moe.errors import DflashError
from dflash_moe.experts.expert_runtime import ExpertRuntime
from dflash_moe.integrations.host_weights import TORCH_DTYPES
from dflash_moe.integrations.transformers import load_model
from dflash_moe.model.architecture import find_model_class, load_config
from dflash_moe.model.checkpoint import Checkpoint
from dflash_moe.model.progress import quiet_progress
from dflash_moe.topology import Topology

MODEL = Path(__file__).resolve().parent / "dflash_moe_demo" / "model"
RESULT = Path(__file__).resolve().parents[1] / "results" / "bits_per_byte.json"
NUM_WORKERS = 2
# With f32 only the wire narrows numbers, and bf16 is what the checkpoint says.
HOST_DTYPES = ("f32", "bf16")
WIRE_DTYPES = ("f32", "f16", "bf16")
COUNTED = ("calls", "request_bytes", "reply_bytes", "floor_bytes")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RESULT, help="result file (bench/results/bits_per_byte.json)")
    parser.add_argument("--windows", type=int, default=NUM_WINDOWS, help=f"of held-out text; fewer for a trial [{NUM_WINDOWS}]")
    arguments = parser.parse_args()
    try:
        result = measure(arguments.windows)
    except DflashError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    result.write(arguments.out)
    return 0


def measure(num_windows: int) -> BenchResult:
    """Measures all rows. Raises DflashError when a remote row did not make exactly the calls that
    it must have made.
    """
    corpus = checked_corpus()
    text = held_out_text(AutoTokenizer.from_pretrained(MODEL), corpus.held_out, num_windows)
    result = BenchResult(
        "bits_per_byte",
        {
            "corpus_sha256": corpus.sha256,
            "corpus_licence": LICENCE,
            "held_out_sha256": text.sha256,
            "held_out_bytes": text.num_bytes,
            "held_out_documents": len(corpus.held_out),
            "windows": num_windows,
            "window_tokens": SEQUENCE_TOKENS,
            "workers": NUM_WORKERS,
            "transport": "shared",
        },
    )
    topology = Topology.local(num_workers=NUM_WORKERS, threads=1)
    with ExpertRuntime.start(topology, model=MODEL, transport="shared", mode="batched") as runtime:
        result.params["checkpoint_fingerprint"] = runtime.spec.fingerprint
        for host_dtype in HOST_DTYPES:
            _keep(result, "eager", host_dtype, None, text, window_bits(eager_model(host_dtype), text))
            model = load_model(MODEL, runtime, dtype=TORCH_DTYPES[host_dtype])
            for wire_dtype in WIRE_DTYPES:
                _measure_remote(result, runtime, model, host_dtype, wire_dtype, text)
    result.complete = True
    return result


def eager_model(dtype: str) -> Any:
    """Loads the shipped model with the eager experts of transformers."""
    model_class = find_model_class(load_config(Checkpoint.open(MODEL)))
    with quiet_progress():
        model = model_class.from_pretrained(
            MODEL, local_files_only=True, experts_implementation="eager", dtype=TORCH_DTYPES[dtype]
        )
    return model.eval()


def _measure_remote(
    result: BenchResult, runtime: ExpertRuntime, model: Any, host_dtype: str, wire_dtype: str, text: HeldOutText
) -> None:
    runtime.set_mode("batched", dtype=wire_dtype, reply_dtype=wire_dtype)
    before = runtime.stats()["totals"]
    bits = window_bits(model, text)
    after = runtime.stats()["totals"]
    counts = {key: int(after[key]) - int(before[key]) for key in COUNTED}
    # Every window has tokens for either worker in every layer.
    expected = result.params["windows"] * len(runtime.layers) * NUM_WORKERS
    if counts["calls"] != expected:
        raise DflashError(f"{host_dtype} over {wire_dtype}: {counts['calls']} remote calls, expected {expected}")
    _keep(result, "remote", host_dtype, wire_dtype, text, bits, **counts)


def _keep(
    result: BenchResult, experts: str, host_dtype: str, wire: str | None, text: HeldOutText, bits: list[float], **counts: int
) -> None:
    row = {"name": f"{experts}_{host_dtype}" + (f"_wire_{wire}" if wire else ""), "experts": experts, "host_dtype": host_dtype}
    row |= {"wire_dtype": wire, "bits_per_byte": sum(bits) / text.num_bytes, "samples_bits": bits, **counts}
    result.rows.append(row)
    print(f"{row['name']}: {row['bits_per_byte']:.6f} bits per byte", flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main())
