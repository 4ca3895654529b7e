"""The check of the emulator against itself: two workers behind the same emulated link must come out
equal.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from pathlib import Path

from bench.lab.link_check import LinkParams, link_ratios, run_link_check
from dflash_moe.protocol.keys import write_key_file
from dflash_moe.testing.tiny import tiny_checkpoint
from dflash_moe.topology import Topology


def test_a_link_emulated_twice_takes_the_times_its_numbers_ask_for(tmp_path: Path) -> None:
    write_key_file(tmp_path / "key")
    real = Topology.parse(
        "version: 1\nworkers:\n  - {name: far, backend: cpu, threads: 1, address: tcp, emulate: {mbit_s: 8, delay_ms: 5}}\n"
    )
    params = LinkParams(mbit_s=8, delay_ms=5, tokens=(1, 64), slices=(1, 2), repeat=2, calls_per_round=1)
    result = run_link_check(params, tiny_checkpoint(tmp_path / "model"), real, tmp_path / "key")
    assert result.complete
    assert {(entry["tokens"], entry["num_slices"]) for entry in result.summary} == {(1, 1), (64, 1), (64, 2)}
    for row in result.rows:
        # 5 ms each way, and the rows at 1 MB/s each way; in two slices the ways overlap.
        transfer_s = row["tokens"] * 64 * 2 / 1e6
        assert row["median_s"] > 0.010 + transfer_s * (2 if row["num_slices"] == 1 else 1.4)


def test_ratios_pair_the_links_of_a_case() -> None:
    def row(link: str, seconds: float, tokens: int = 64) -> dict[str, object]:
        return {"link": link, "tokens": tokens, "num_slices": 2, "samples_s": [seconds]}

    rows = [row("real", 0.3), row("emulated", 0.2), row("real", 9.0, tokens=1)]
    assert link_ratios(rows) == [{"tokens": 64, "num_slices": 2, "ratio": 0.3 / 0.2}]
