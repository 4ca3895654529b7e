"""Sixteen streams of our server beside the largest requests that it takes, which come one after
another without a pause: what that does to the gaps between tokens.

    python -m bench.campaigns.serving_interference [--rounds 3] [--models DIR] [--json FILE]

`alone` has the streams by themselves, `bodies` has bodies of 8 MiB beside them, valid JSON in three
shapes (a text, a list of numbers, a long conversation) which is more than the model can read,
`tokenize` has texts of a megabyte for /tokenize, and `schemas` has forms of which each takes all of
the time, the memory or the stack that a grammar may have. `forms` has streams by themselves that
keep to a schema. The model is that of serving_against_peers.py
in 16 bits, the server has two threads, and client and company share its cores. A round during which
others kept the machine busy is measured again, twice at most. Needs two cores, and 6 minutes.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import random
import string
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench.campaigns.engine_against_peers import Lines
from bench.campaigns.harness import command_line
from bench.lab.reference_model import default_cache
from bench.peers.programs import free_port
from bench.peers.sides import Plan
from bench.peers.targets import disturbed, shown_line
from bench.serving.servers import Server, command_of, running
from bench.serving.streams import StreamsCase, prompts_of
from bench.serving.targets import FORMS, at_least, at_most, interference
from dflash_moe.bench.harness import Recorder, run_rounds
from dflash_moe.server.server_settings import MAX_BODY_BYTES

NUM_STREAMS = 16
TEXT_BYTES = 1_000_000
# A message of a conversation is as short as people's are.
MESSAGE_BYTES = 60
# What these are answered with: bodies ask for more than the model has room for, and grammars are
# stopped or, where the machine is too busy, given up.
ANSWERS = {"bodies": ("400",), "tokenize": ("200",), "schemas": ("400", "503")}
# Tests hold the server against the same three.
WORST_FORMS: tuple[Mapping[str, Any], ...] = (
    {"guided_json": {"type": "integer", "multipleOf": 9_999_991}},
    {"guided_regex": "a?" * 30_000 + "a"},
    {
        "guided_json": {
            "$defs": {**{str(at): {"items": {"$ref": f"#/$defs/{at + 1}"}} for at in range(1300)}, "1300": {"type": "string"}},
            "$ref": "#/$defs/0",
        }
    },
)
# Longer than an answer, so that every stream has as many tokens as a free one.
SCHEMA = {
    "type": "array",
    "minItems": 100,
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 20},
            "kind": {"enum": ["fruit", "vegetable", "grain"]},
            "count": {"type": "integer"},
            "tags": {"type": "array", "items": {"type": "string", "maxLength": 8}, "maxItems": 3},
        },
        "required": ["name", "kind", "count", "tags"],
        "additionalProperties": False,
    },
}


def main() -> int:
    """Does what the module text says, and returns the exit status."""
    given = _arguments()
    cores = sorted(os.sched_getaffinity(0))[:2]
    # The client and whatever it starts share the cores of the server.
    os.sched_setaffinity(0, cores)
    prompt_tokens, new_tokens = (16, 8) if given.tiny else (64, 128)
    with tempfile.TemporaryDirectory() as scratch:
        plan = Plan(given.models.resolve(), Path(scratch), (cores[0], cores[1]), is_tiny=given.tiny)
        recorder = Recorder(given.json, Lines())
        params = {"rounds": given.rounds, "streams": NUM_STREAMS, "prompt_tokens": prompt_tokens, "new_tokens": new_tokens}
        result = recorder.begin("serving_interference", params)
        port = free_port()
        command, environment = command_of(plan, "ours", "16bit", NUM_STREAMS, port)
        with recorder.recording(), running(command, port, environment) as server:
            prompts = prompts_of(server, prompt_tokens, new_tokens)
            more = {"command": server.command}
            formed = dataclasses.replace(prompts, fields={"guided_json": SCHEMA})
            cases = [
                StreamsCase(name, server, prompts, NUM_STREAMS, NUM_STREAMS, more, lambda _number, files=files: files)
                if files
                else StreamsCase(name, server, prompts, NUM_STREAMS, NUM_STREAMS, more)
                for name, files in _company(server, prompts.model, plan.scratch).items()
            ]
            cases.append(StreamsCase(FORMS, server, formed, NUM_STREAMS, NUM_STREAMS, more))
            run_rounds(recorder, cases, rounds=given.rounds, warmup=1)
            result.summary = [*interference(result.rows), *_answers(result.rows)]
    for line in result.summary:
        print(shown_line(line))
    if names := disturbed(result.rows):
        print(f"others kept the machine busy during {len(names)} rows, which say little: {', '.join(names)}")
    return 0


def _company(server: Server, model: str, folder: Path) -> dict[str, list[Path]]:
    """Writes the requests that streams have beside them, and returns their files by the row."""
    drawn = random.Random(0)
    letters = "".join(drawn.choices(string.ascii_lowercase + " ", k=MAX_BODY_BYTES))
    numbers = [drawn.randrange(256) for _ in range(MAX_BODY_BYTES // 5)]
    messages = [{"role": "user", "content": letters[:MESSAGE_BYTES]}] * (MAX_BODY_BYTES // (MESSAGE_BYTES + 40))
    bodies = [
        ("/v1/completions", {"model": model, "prompt": letters[: MAX_BODY_BYTES - 100]}),
        ("/v1/completions", {"model": model, "prompt": numbers}),
        ("/v1/chat/completions", {"model": model, "messages": messages}),
    ]
    texts = [("/tokenize", {"prompt": letters[:TEXT_BYTES]})]
    forms = [("/v1/completions", {"model": model, "prompt": "a", "max_tokens": 1, **form}) for form in WORST_FORMS]
    found: dict[str, list[Path]] = {"alone": []}
    for name, wanted in (("bodies", bodies), ("tokenize", texts), ("schemas", forms)):
        found[name] = [folder / f"{name}{place}" for place in range(len(wanted))]
        for path, (route, body) in zip(found[name], wanted, strict=True):
            path.write_bytes(_request(server, route, body))
    return found


def _request(server: Server, route: str, body: Mapping[str, Any]) -> bytes:
    raw = json.dumps(body, separators=(",", ":")).encode()
    if len(raw) > MAX_BODY_BYTES:
        raise SystemExit(f"a body of {len(raw)} bytes is more than the server reads, {MAX_BODY_BYTES}")
    head = f"POST {route} HTTP/1.1\r\nhost: 127.0.0.1:{server.endpoint.port}\r\nconnection: close\r\n"
    return f"{head}content-type: application/json\r\ncontent-length: {len(raw)}\r\n\r\n".encode() + raw


def _answers(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the lines that say whether company was answered as it must be, and at all."""
    lines = []
    for row in (row for row in rows if "beside" in row):
        wanted = ANSWERS[row["name"]]
        count = sum(row["beside"].get(status, 0) for status in wanted)
        others = sum(row["beside"].values()) - count
        lines.append(at_most(f"answers other than {' or '.join(wanted)} beside streams: {row['name']}", others, 0))
        lines.append(at_least(f"answers beside streams: {row['name']}", count, 1))
    return lines


def _arguments() -> argparse.Namespace:
    parser = command_line(__doc__, "serving_interference")
    parser.add_argument("--rounds", type=int, default=3, help="measured rounds [%(default)s]")
    parser.add_argument("--tiny", action="store_true", help="tiny model and sizes, to try the campaign out")
    parser.add_argument("--models", type=Path, default=default_cache(), help="where models are kept [~/.cache/dflash_moe]")
    given = parser.parse_args()
    if len(os.sched_getaffinity(0)) < 2:
        parser.error("two cores are needed, for the two threads of the server")
    return given


if __name__ == "__main__":
    sys.exit(main())
