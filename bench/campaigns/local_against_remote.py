"""Two workers of one thread each over shared memory, against all experts in the host process with
two threads.

    python bench/campaigns/local_against_remote.py [--rounds 9] [--out bench/results]

Prefill of 2,048 tokens and decode, each interleaved by round; prints the speed of remote as a share
of local's, the median over rounds. Files: local_against_remote_prefill.json and ..._decode.json,
with plots.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench.lab.reference_model import reference_model
from dflash_moe.bench.results import read_result

ROOT = Path(__file__).resolve().parents[2]
CASES = ("prefill", "decode")
MODES = "batched,auto"
# One case takes so many seconds on two cores of 2.5 GHz with AVX-512. This is for the estimate
# only.
PREFILL_S, DECODE_S, START_S = 3.1, 2.4, 40


def main() -> int:
    """Does what the module text says, and returns the exit status."""
    arguments = _arguments()
    per_round = 3 * (PREFILL_S * arguments.prompt_tokens / 2048 + DECODE_S * arguments.new_tokens / 32)
    seconds = 2 * START_S + per_round * (arguments.rounds + 1)
    print(f"{arguments.rounds} rounds of prefill and decode: about {seconds / 60:.0f} minutes on two cores", flush=True)
    model = arguments.model or reference_model(arguments.cache, say=lambda line: print(line, flush=True))
    for case in CASES:
        out = arguments.out / f"local_against_remote_{case}.json"
        own = ["--prompt-tokens", arguments.prompt_tokens if case == "prefill" else 32]
        own += ["--new-tokens", 0 if case == "prefill" else arguments.new_tokens]
        command = [
            sys.executable, "-m", "dflash_moe", "bench", case, "--model", model,
            "--topology", ROOT / "bench" / "settings" / "equal" / "topology.yaml",
            "--modes", MODES, "--local", "--repeat", arguments.rounds, *own, "--json", out, "--plot", out.with_suffix(".png"),
        ]  # fmt: skip
        print(f"\n== {case}", flush=True)
        code = subprocess.run([str(part) for part in command], check=False).returncode
        if code:
            return code
        for mode, share in speed_shares(read_result(out, case=case)).items():
            print(f"{case}: {mode} over two workers runs at {share:.3f} x the speed of all local", flush=True)
    return 0


def speed_shares(found: Mapping[str, Any]) -> dict[str, float]:
    """Returns for each remote mode the median over rounds of the time of local divided by its own,
    where the time of a round is the median of its samples.
    """
    rounds = {row["name"]: _rounds(row) for row in found["rows"]}
    return {
        mode: statistics.median(local / remote for local, remote in zip(rounds["local"], own, strict=True))
        for mode, own in rounds.items()
        if mode != "local"
    }


def _rounds(row: Mapping[str, Any]) -> list[float]:
    step = row["samples_per_round"]
    return [statistics.median(row["samples_s"][at : at + step]) for at in range(0, len(row["samples_s"]), step)]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Remote workers against all experts local.")
    parser.add_argument("--rounds", type=int, default=9, help="measured rounds [9]")
    parser.add_argument("--prompt-tokens", type=int, default=2048, help="of the prefill [2048]")
    parser.add_argument("--new-tokens", type=int, default=32, help="of the decode, in every round [32]")
    parser.add_argument("--model", type=Path, help="another checkpoint [made in --cache]")
    parser.add_argument("--cache", type=Path, help="where the model is kept [~/.cache/dflash_moe]")
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "results", help="folder of the results [bench/results]")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
