"""Two workers of one thread each over shared memory, against all experts in the host process with
two threads.

    python -m bench.campaigns.local_against_remote [--rounds 9] [--out bench/results]

Prefill of 2,048 tokens and decode, each interleaved by round; prints the speed of remote as a share
of local's, the median over rounds. Files: local_against_remote_prefill.json and ..._decode.json,
with plots.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import argparse
import subprocess
import sys

from bench.campaigns.harness import ROOT, model_line, model_of
from bench.documents.tables import speed_shares
from dflash_moe.bench.results import read_result

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
    model = model_of(arguments)
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
        shares = speed_shares(read_result(out, case=case)["rows"])
        for mode, share in ((mode, share) for mode, share in shares.items() if mode != "local"):
            print(f"{case}: {mode} over two workers runs at {share:.3f} x the speed of all local", flush=True)
    return 0


def _arguments() -> argparse.Namespace:
    parser = model_line(__doc__)
    parser.add_argument("--rounds", type=int, default=9, help="measured rounds [9]")
    parser.add_argument("--prompt-tokens", type=int, default=2048, help="of the prefill [2048]")
    parser.add_argument("--new-tokens", type=int, default=32, help="of the decode, in every round [32]")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
