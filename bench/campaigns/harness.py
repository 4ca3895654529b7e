"""What all campaigns share: their command line, and for those that break something the events, the
result and the verdict.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.lab.reference_model import default_cache, reference_model
from dflash_moe.bench.results import BenchResult
from dflash_moe.cli import options

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "bench" / "results"


def command_line(text: str, name: str = "") -> argparse.ArgumentParser:
    """Returns a parser that shows `text`, with the option that says where the result of this name
    goes, or without a name the folder of several results.
    """
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    if name:
        file = f"{name}.json"
        parser.add_argument("--json", type=Path, default=RESULTS / file, help=f"result file [bench/results/{file}]")
    else:
        parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results [bench/results]")
    return parser


def model_line(text: str, name: str = "") -> argparse.ArgumentParser:
    """Returns the parser of a campaign over the reference model, or another one."""
    parser = command_line(text, name)
    parser.add_argument("--model", type=Path, help="another checkpoint [made in --cache]")
    parser.add_argument("--cache", type=Path, help="where the model is kept [~/.cache/dflash_moe]")
    return parser


def model_of(given: argparse.Namespace) -> Path:
    """Returns the checkpoint that was asked for. The reference model is made once, in a minute."""
    return given.model or reference_model(given.cache, say=lambda line: print(line, flush=True))


def peers_line(text: str, name: str) -> argparse.ArgumentParser:
    """Returns the parser of a campaign that measures llama.cpp and vLLM beside us, where they are
    there.
    """
    parser = command_line(text, name)
    parser.add_argument("--llama-bin", type=Path, help="folder of llama.cpp's programs [without it]")
    # The path of an environment's interpreter is kept as it is: the link says which environment.
    parser.add_argument("--vllm-python", type=Path, help="interpreter that has vLLM [without it]")
    parser.add_argument("--rounds", type=int, default=3, help="measured rounds [%(default)s]")
    parser.add_argument("--tiny", action="store_true", help="tiny models and sizes, to try the campaign out")
    parser.add_argument("--models", type=Path, default=default_cache(), help="where models are kept [~/.cache/dflash_moe]")
    return parser


def peers_of(parser: argparse.ArgumentParser, programs: Sequence[str]) -> argparse.Namespace:
    """Parses the command line of `peers_line`, and ends the process with a sentence where there are
    fewer than two cores, or a peer lacks what is used: `programs` are those of llama.cpp.
    """
    given = parser.parse_args()
    if len(os.sched_getaffinity(0)) < 2:
        parser.error("two cores are needed: each side has two threads")
    given.llama_bin = given.llama_bin and given.llama_bin.resolve()
    given.vllm_python = given.vllm_python and given.vllm_python.absolute()
    for program in programs:
        if given.llama_bin is not None and not (given.llama_bin / program).is_file():
            parser.error(f"--llama-bin {given.llama_bin}: has no {program}")
    if given.vllm_python is not None and not given.vllm_python.is_file():
        parser.error(f"--vllm-python {given.vllm_python}: no such interpreter")
    return given


def breaking_line(text: str, name: str) -> argparse.ArgumentParser:
    """Returns the parser of a campaign that breaks something at drawn moments."""
    parser = command_line(text, name)
    parser.add_argument("--seed", type=int, default=0, help="of all that is drawn [%(default)s]")
    parser.add_argument("--events", type=Path, help="where one JSON line for each event goes")
    return parser


@dataclass(slots=True)
class Broken:
    """What came of a campaign that breaks something: a row for each case, and all events."""

    result: BenchResult
    events: list[Mapping[str, Any]] = field(default_factory=list)
    is_clean: bool = True

    @classmethod
    def begin(cls, name: str, **params: Any) -> Broken:
        """Begins the result; the load of the machine stands in it."""
        return cls(BenchResult(name, params | {"load_before": os.getloadavg()[0]}))

    def row(self, row: dict[str, Any], shown: str, *, zero: Iterable[str], goals: Mapping[str, float] | None = None) -> None:
        """Adds a row and says it. What `zero` names must be 0; `goals` are the most that its times
        should be, and decide nothing, since they are the machine's.
        """
        self.result.rows.append(row)
        self.is_clean = self.is_clean and all(row[name] == 0 for name in zero)
        self.result.summary += [
            {"what": f"{row['name']}: {name}", "value": row[name], "at_most": most, "met": row[name] <= most}
            for name, most in {**dict.fromkeys(zero, 0.0), **(goals or {})}.items()
        ]
        options.say(shown)

    def end(self, given: argparse.Namespace) -> int:
        """Writes the result and the events, and returns the exit status."""
        self.result.params["load_after"] = os.getloadavg()[0]
        self.result.complete = True
        self.result.write(given.json)
        if given.events is not None:
            given.events.write_text("".join(json.dumps(event) + "\n" for event in self.events), encoding="utf-8")
        return 0 if self.is_clean else 1
