"""What happens to a server and its callers: too many requests, callers that vanish, callers that
read nothing, a front that is killed, workers that are killed.

    python -m bench.campaigns.serving_faults [--parts overload,vanish,slow,fronts,workers]
        [--requests 1000] [--vanishing 200] [--rounds 5] [--kills 50] [--seed 0]
        [--events FILE] [--json bench/results/serving_faults.json]

The demo's model behind `dflash-moe serve`, whose engine is looked into from outside
(bench/serving/watched_server.py). `overload` sends requests twice as often as they can be answered:
each is answered or gets 429, and memory does not grow. `vanish` hangs up in the middle of answers:
blocks, threads and descriptors are as before. `slow` has streams beside as many that nobody reads,
and beside as many that are read. `fronts` kills the front under load; a server starts anew every
four kills, because five within a minute end it. `workers` kills one of two holders of all experts
under load. Texts are compared with those of `dm.LLM`. Exit status 1 where a count is not as it must
be; times are shown against their goals and decide nothing, since they are the machine's.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from bench.campaigns.faults.load import wait_until
from bench.campaigns.harness import Broken, breaking_line
from bench.peers.programs import free_port
from bench.requests.verdict import MOST_GROWN_BYTES
from bench.serving.callers import Callers
from bench.serving.crowds import Standing, overloaded, silent_readers, standing, vanish
from bench.serving.servers import Server, our_command, running
from bench.serving.streams import prompts_of
from bench.serving.watched import look
from dflash_moe.bench.streaming.load import Schedule, run_load
from dflash_moe.config.settings import MAX_DEATHS

ALONE = "host: {threads: 2, experts: {memory: 100%}}\nworkers: [{name: w0, backend: cpu}]\n"
TWO_HOLDERS = (
    "host: {threads: 1}\nplacement: {replicas: 2}\n"
    f"failure: {{restart: {{backoff_ms: [20, 100], deaths: {MAX_DEATHS}}}}}\n"
    "workers: [{name: w0, backend: cpu, threads: 1}, {name: w1, backend: cpu, threads: 1}]\n"
)
# Requests that are computed at once, and that wait, in `overload`.
RUNNING, WAITING = 8, 8
STREAMS = 8
# A front ends with its server at the fifth end within a minute.
KILLS_OF_A_SERVER = 4
# Between two kills, so that the load is under way again.
PAUSE_S = (0.2, 0.8)
BACK_S = 60.0
LOOK_S = 0.02
GOALS = {"ready_max_s": 3.0}
PROMPTS = ("def main", "import os", "class Queue", "for name in", "return a list", "The interpreter", "while True", "x = [")
NEW_TOKENS = 48


@dataclass(slots=True)
class Given:
    """What the parts share: sizes, where files go, what is drawn, and what comes of it."""

    options: argparse.Namespace
    folder: Path
    found: Broken
    drawn: random.Random


def main() -> int:
    """Does what the module text says, and returns the exit status."""
    given = _arguments()
    sizes = {name: getattr(given, name) for name in ("requests", "vanishing", "rounds", "kills", "seed")}
    found = Broken.begin("serving_faults", parts=given.parts, **sizes)
    with tempfile.TemporaryDirectory() as scratch:
        run = Given(given, Path(scratch), found, random.Random(given.seed))
        for part in given.parts.split(","):
            PARTS[part](run)
    return found.end(given)


@contextmanager
def _served(given: Given, topology: str, engine: str) -> Iterator[tuple[Server, Path]]:
    """Runs a server of the demo's model, and gives it with the file that it writes when asked."""
    path, out, port = given.folder / "topology.yaml", given.folder / "watched.json", free_port()
    path.write_text(f"version: 1\n{topology}engine: {{{engine}}}\n")
    with running(our_command("demo", path, port, (out,)), port) as server:
        yield server, out


def _overload(given: Given) -> None:
    engine = f"kv_memory: 16MiB, max_requests: {RUNNING}, max_queue: {WAITING}"
    with _served(given, ALONE, engine) as (server, _):
        prompts = prompts_of(server, 32, 16)
        requests = [prompts.request("overload", number) for number in range(given.options.requests)]
        # As many as are computed at once, and in all as many as come afterwards: what is kept of
        # the latest requests, answers and blocks is full then.
        calm = run_load(server.endpoint, requests, Schedule(concurrency=RUNNING), BACK_S)
        per_s = len(calm.completed) / calm.wall_s
        fresh = [prompts.request("overloaded", number) for number in range(given.options.requests)]
        load, trace = overloaded(server, fresh, Schedule(1 / (2 * per_s)), BACK_S)
    refused = sum(one.is_refused for one in load.streamed)
    row = {
        "name": "overload", "requests": len(fresh), "answered": len(load.completed), "refused": refused,
        "lost": len(fresh) - len(load.completed) - refused, "requests_per_s": 2 * per_s,
        "grown_bytes": trace.grown_bytes(), "anonymous_bytes": trace.anonymous_bytes,
        "grew_too_much": int(trace.grown_bytes() > MOST_GROWN_BYTES), "none_refused": int(refused == 0),
        "first_error": next((one.error for one in load.streamed if one.error and not one.is_refused), ""),
    }  # fmt: skip
    shown = (
        f"overload: {row['requests']} requests at twice the capacity: {row['answered']} answered, {refused} refused, "
        f"{row['lost']} lost; memory grew by {row['grown_bytes'] / 2**20:.1f} MiB"
    )
    given.found.row(row, shown, zero=("lost", "grew_too_much", "none_refused"))


def _vanish(given: Given) -> None:
    with _served(given, ALONE, "kv_memory: 64MiB, max_requests: 64") as (server, out):
        prompts = prompts_of(server, 32, 400)

        def wave(name: str) -> tuple[int, Standing]:
            requests = [prompts.request(name, number) for number in range(given.options.vanishing)]
            begun = vanish(server, requests, BACK_S)
            wait_until(lambda: not (now := look(server, out)["engine"])["running"] + now["waiting"], BACK_S, every_s=LOOK_S)
            return begun, standing(server, look(server, out)["engine"])

        # The first wave makes whatever stays for good: threads, memory, the prefix cache.
        _, before = wave("first")
        begun, after = wave("second")
    more = {name: max(0, value - getattr(before, name)) for name, value in after.fields().items()}
    row = {"name": "vanish", "callers": begun, "unbegun": given.options.vanishing - begun, **more}
    shown = f"vanish: {begun} callers hung up in the middle of an answer; more than before: {more}"
    given.found.row(row, shown, zero=("unbegun", *more))


def _slow(given: Given) -> None:
    speeds: dict[str, list[float]] = {"read": [], "unread": []}
    with _served(given, ALONE, "kv_memory: 64MiB, max_requests: 64") as (server, _):
        prompts, long = prompts_of(server, 32, 64), prompts_of(server, 32, 400)
        for number in range(given.options.rounds + 1):
            for kind in speeds:
                beside = [long.request(kind, number, place, "beside") for place in range(STREAMS)]
                requests = [prompts.request(kind, number, place) for place in range(STREAMS)]
                with silent_readers(server, beside, is_read=kind == "read"):
                    load = run_load(server.endpoint, requests, Schedule(concurrency=STREAMS), BACK_S)
                # The first round warms up.
                if number:
                    speeds[kind].append(load.tokens / load.wall_s)
    pairs = zip(speeds["unread"], speeds["read"], strict=True)
    cost = 1 - statistics.median(unread / read for unread, read in pairs)
    row = {"name": "slow", "streams": STREAMS, "tokens_per_s": speeds, "cost": cost}
    given.found.row(row, f"slow: readers that take nothing cost others {cost:.1%}", zero=(), goals={"cost": 0.05})


def _fronts(given: Given) -> None:
    texts, callers, ready = _right_texts(ALONE), list[Callers](), list[float]()
    while len(ready) < given.options.kills:
        with _served(given, ALONE, "kv_memory: 64MiB") as (server, _), _callers(server, texts) as load:
            callers.append(load)
            for _ in range(min(KILLS_OF_A_SERVER, given.options.kills - len(ready))):
                time.sleep(given.drawn.uniform(*PAUSE_S))
                ready.append(_killed(given, server, "front", lambda: server.status("/ready") == 200))
    # Whoever asks while the front is away has lost the request.
    _judge(given, "fronts", callers, ready, zero=("wrong", "not_back"))


def _workers(given: Given) -> None:
    texts, ready = _right_texts(TWO_HOLDERS), list[float]()
    with _served(given, TWO_HOLDERS, "kv_memory: 64MiB") as (server, out), _callers(server, texts) as load:
        for number in range(given.options.kills):
            time.sleep(given.drawn.uniform(*PAUSE_S))
            name = f"w{number % 2}"
            deaths = look(server, out)["workers"][name][1]

            def is_back(name: str = name, deaths: int = deaths) -> bool:
                state, now = look(server, out)["workers"][name]
                return state == "ready" and now > deaths

            ready.append(_killed(given, server, f"worker {name}", is_back))
        # Answers that were under way at the last kill are waited for.
    _judge(given, "workers", [load], ready, zero=("wrong", "cut", "refused", "not_back"))


def _killed(given: Given, server: Server, what: str, is_back: Callable[[], bool]) -> float:
    """Kills a process of the server and returns the seconds until all is well; more than BACK_S
    where it never was.
    """
    program, *words = what.split()
    lines = ((pid, f"{line} ") for pid, line in server.tree().items())
    (victim,) = (pid for pid, line in lines if all(one in line for one in (f" dflash_moe {program} ", *words)))
    os.kill(victim, signal.SIGKILL)
    began = time.monotonic()
    wait_until(lambda: not Path(f"/proc/{victim}").exists(), BACK_S)
    is_well = wait_until(is_back, BACK_S, every_s=LOOK_S)
    took_s = time.monotonic() - began if is_well else BACK_S + 1
    given.found.events.append({"killed": what, "ready_s": took_s})
    return took_s


def _judge(given: Given, name: str, callers: list[Callers], ready: list[float], zero: tuple[str, ...]) -> None:
    counts = {key: sum(getattr(one, key) for one in callers) for key in ("whole", "cut", "wrong", "refused")}
    row = {
        "name": name, "kills": len(ready), **counts, "not_back": sum(one > BACK_S for one in ready),
        "ready_p50_s": statistics.median(ready), "ready_max_s": max(ready),
        "surprises": [line for one in callers for line in one.surprises][:20],
    }  # fmt: skip
    shown = (
        f"{name}: {row['kills']} kills, {counts['whole']} whole answers, {counts['cut']} cut off, {counts['refused']} refused, "
        f"{counts['wrong']} wrong; ready again after {row['ready_p50_s']:.2f} s, at most {row['ready_max_s']:.2f} s"
    )
    given.found.row(row, shown, zero=zero, goals=GOALS)
    given.found.is_clean = given.found.is_clean and counts["whole"] > 0


def _callers(server: Server, texts: dict[str, str]) -> Callers:
    return Callers(server, texts, NEW_TOKENS, len(PROMPTS) // 2)


def _right_texts(topology: str) -> dict[str, str]:
    """Returns what the engine alone makes of the prompts, over a topology of the same classes."""
    import dflash_moe as dm
    from dflash_moe.cli.model_path import DEMO
    from dflash_moe.cli.options import model_directory

    params = dm.SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
    with dm.LLM(model_directory(DEMO), dm.Topology.parse(f"version: 1\n{topology}")) as llm:
        return {prompt: found.text for prompt, found in zip(PROMPTS, llm.generate(list(PROMPTS), params), strict=True)}


PARTS: dict[str, Callable[[Given], None]] = {
    "overload": _overload, "vanish": _vanish, "slow": _slow, "fronts": _fronts, "workers": _workers,
}  # fmt: skip


def _arguments() -> argparse.Namespace:
    parser = breaking_line(__doc__, "serving_faults")
    parser.add_argument("--parts", default=",".join(PARTS), help="[%(default)s]")
    parser.add_argument("--requests", type=int, default=1000, help="at twice the capacity [%(default)s]")
    parser.add_argument("--vanishing", type=int, default=200, help="callers that hang up [%(default)s]")
    parser.add_argument("--rounds", type=int, default=5, help="of streams beside slow readers [%(default)s]")
    parser.add_argument("--kills", type=int, default=50, help="of fronts, and of workers [%(default)s]")
    given = parser.parse_args()
    if unknown := set(given.parts.split(",")) - set(PARTS):
        parser.error(f"--parts {', '.join(sorted(unknown))}: there are {', '.join(PARTS)}")
    return given


if __name__ == "__main__":
    raise SystemExit(main())
