"""What slices hide behind a link of 200 Mbit/s: whole calls against what `auto` makes of them, and
the share of the ideal gain.

    python -m bench.campaigns.slice_overlap [--rounds 9] [--tokens 1024] \
        [--json bench/results/slice_overlap.json]

Ideal: the longest of a whole call's stages (send, compute, receive) alone, from its recorded
timeline.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import argparse
import sys

from bench.campaigns.harness import command_line
from bench.lab.overlap import LAYERS, LEARNING_CALLS, OverlapParams, run_overlap
from dflash_moe.bench.harness import Recorder
from dflash_moe.cli.bench.progress import reporting
from dflash_moe.cli.main import report

# A whole call of 1,024 tokens takes so long at 200 Mbit/s. This is for the estimate only.
CALL_S = 0.35


def main() -> int:
    """Does what the module text says, and returns the exit status."""
    arguments = _arguments()
    params = OverlapParams(
        num_tokens=arguments.tokens,
        hidden_size=arguments.hidden_size,
        moe_intermediate_size=arguments.moe_intermediate_size,
        mbit_s=arguments.mbit_s,
        repeat=arguments.rounds,
    )
    calls = 2 * (arguments.rounds * (LAYERS + 1) + LEARNING_CALLS + LAYERS)
    seconds = 10 + calls * CALL_S * arguments.tokens / 1024 * 200 / arguments.mbit_s
    print(f"{arguments.rounds} rounds: about {seconds:.0f} s on two cores", flush=True)
    try:
        with reporting() as reporter:
            result = run_overlap(params, recorder=Recorder(arguments.json, reporter))
    except Exception as error:  # noqa: BLE001 - as the command line does: one sentence and an exit code
        return report(error, is_debug=False)
    (found,) = result.summary
    share = found["share_of_ideal_gain"]
    print(
        f"whole {found['whole_s'] * 1e3:.1f} ms, auto {found['auto_s'] * 1e3:.1f} ms in {found['num_slices']:g} slices, ideal "
        f"{found['ideal_s'] * 1e3:.1f} ms: {'no gain is possible' if share is None else f'{share:.0%} of the ideal gain'}"
    )
    return 0


def _arguments() -> argparse.Namespace:
    parser = command_line(__doc__, "slice_overlap")
    parser.add_argument("--rounds", type=int, default=9, help="measured rounds of 4 calls [9]")
    parser.add_argument("--tokens", type=int, default=1024, help="of a call [1024]")
    parser.add_argument("--hidden-size", type=int, default=1024, help="of a token [1024]")
    parser.add_argument("--moe-intermediate-size", type=int, default=384, help="of an expert [384]")
    parser.add_argument("--mbit-s", type=float, default=200.0, help="of the link [200]")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
