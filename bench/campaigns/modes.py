"""The table of the modes in the recorded settings: two equal workers, one four times slower, one
behind 200 Mbit/s and 2 ms.

    python -m bench.campaigns.modes [--rounds 7] [--settings equal,weak_worker,slow_link] \
        [--out bench/results]

Runs `dflash-moe bench prefill` once per setting, as a user would, and prints how `auto` did against
the better fixed mode, with its prediction. Files: modes_<setting>.json, .png and _timeline.png.
Mode stream has fewer rounds of the long prompt (the JSON says how many). Exit code of the first
command that failed.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

from bench.campaigns.harness import ROOT, model_line, model_of
from dflash_moe.bench.results import read_result

SETTINGS = ("equal", "weak_worker", "slow_link")
# A prompt token takes so many milliseconds (stream, batched) on two cores of 2.5 GHz with AVX-512.
# This is for the estimate only.
MS_PER_TOKEN = {"equal": (3.4, 1.5), "weak_worker": (9.0, 4.5), "slow_link": (5.5, 3.0)}
# A setting takes this long to start: imports, spec, loading 0.9 GB, twice where there is a row
# `local`, and drawing.
START_S = 40


def main() -> int:
    """Does what the module text says, and returns the exit status."""
    arguments = _arguments()
    settings = arguments.settings.split(",")
    if unknown := [name for name in settings if name not in SETTINGS]:
        raise SystemExit(f"--settings {unknown[0]}: not one of {', '.join(SETTINGS)}")
    minutes = (
        sum(estimate_s(name, arguments.prompt_tokens, arguments.rounds, arguments.stream_rounds) for name in settings) / 60
    )
    print(f"{len(settings)} settings, {arguments.rounds} rounds: about {minutes:.0f} minutes on two cores", flush=True)
    model = model_of(arguments)
    for name in settings:
        code = _measure(name, model, arguments)
        if code:
            return code
        _report(name, arguments.out / f"modes_{name}.json")
    return 0


def estimate_s(setting: str, prompt_tokens: str, rounds: int, stream_rounds: int) -> float:
    """Estimates the seconds of one setting: a warm-up round, the rounds, the recorded prefills, and
    the start.
    """
    stream_s, batched_s = (ms / 1e3 for ms in MS_PER_TOKEN[setting])
    lengths = [int(length) for length in prompt_tokens.split(",")]
    # Batched and auto take about the same time, and so does local, which stands beside equal
    # workers.
    fixed_modes = 3 if setting == "equal" else 2
    measured = sum(length * (stream_s * (stream_rounds + 1) + fixed_modes * batched_s * (rounds + 1)) for length in lengths)
    return START_S + measured + max(lengths) * (stream_s + 2 * batched_s)


def _measure(name: str, model: Path, arguments: argparse.Namespace) -> int:
    command = [
        sys.executable, "-m", "dflash_moe", "bench", "prefill",
        "--model", model, "--topology", ROOT / "bench" / "settings" / name / "topology.yaml",
        "--prompt-tokens", arguments.prompt_tokens, "--new-tokens", 8, "--modes", "stream,batched,auto",
        "--repeat", arguments.rounds, "--stream-repeat", arguments.stream_rounds, "--timeline",
        "--local" if name == "equal" else "--no-local",
        "--json", arguments.out / f"modes_{name}.json", "--plot", arguments.out / f"modes_{name}.png",
    ]  # fmt: skip
    print(f"\n== {name}", flush=True)
    return subprocess.run([str(part) for part in command], check=False).returncode


def _report(name: str, path: Path) -> None:
    for entry in read_result(path, case="prefill")["summary"]:
        deviations = [
            f"{worker} {found['deviation']:.0%}"
            for worker, found in entry["predictions"].items()
            if found["deviation"] is not None
        ]
        print(
            f"{name}: {entry['prompt_tokens']:,} tokens: {entry['better_fixed']} / auto = {entry['median_ratio']:.3f} over "
            f"{entry['rounds']} rounds; prediction off by {', '.join(deviations) or 'nothing measured'}; "
            f"bits {'equal' if entry['same_bits'] else 'DIFFER'}",
            flush=True,
        )


def _arguments() -> argparse.Namespace:
    parser = model_line(__doc__)
    parser.add_argument("--rounds", type=int, default=7, help="measured rounds [7]")
    parser.add_argument("--stream-rounds", type=int, default=3, help="of mode stream over prompts above 1,024 tokens [3]")
    parser.add_argument("--settings", default=",".join(SETTINGS), help="comma-separated [all three]")
    parser.add_argument("--prompt-tokens", default="64,512,4248", help="comma-separated [64,512,4248]")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
