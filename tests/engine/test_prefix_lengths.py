"""Prompts of unlike length share the blocks that they begin with, in models whose rotary tables
differ between layers or depend on the length of a sequence; and who is told of that.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from dflash_moe import ExpertRuntime
from dflash_moe.forward.host_model import HostModel, open_host
from tests.engine_runs import Alone, Asked, asked, engine_run
from tests.host_models import ORIGINAL_MAX, checkpoint, topology

pytestmark = pytest.mark.transformers

_LONGROPE = {
    "rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": ORIGINAL_MAX, "factor": 4.0,
    "short_factor": [1.0 + 0.05 * place for place in range(12)], "long_factor": [1.5 + 0.5 * place for place in range(12)],
}  # fmt: skip
_PLAIN = {"rope_type": "default", "rope_theta": 10000.0}
_TYPES = ["sliding_attention", "full_attention"]
# Architecture, what its configuration has beside the tiny sizes, and whether long sequences are
# rotated otherwise than short ones.
CASES: dict[str, tuple[str, dict[str, Any], bool]] = {
    "types": ("mellum", {"layer_types": _TYPES, "rope_parameters": dict.fromkeys(_TYPES, _PLAIN)}, False),
    "lengths of a type": (
        "mellum", {"layer_types": _TYPES, "rope_parameters": dict(zip(_TYPES, (_PLAIN, _LONGROPE), strict=True))}, True,
    ),
    "lengths": ("phimoe", {}, True),
}  # fmt: skip


@pytest.fixture(scope="module", params=CASES, ids=lambda name: name.replace(" ", "_"))
def opened(request, tmp_path_factory) -> Iterator[tuple[HostModel, bool]]:
    arch, settings, depends = CASES[request.param]
    path: Path = tmp_path_factory.mktemp("model") / arch
    shutil.copytree(checkpoint(arch, "f32"), path)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, **settings}))
    with ExpertRuntime.start(topology("loopback"), model=path, kv_memory="16MiB") as runtime:
        host = open_host(path, runtime)
        assert host.packed is not None
        yield host, depends
        host.packed.micro_batches.close()


def beginning_alike(first: int, lengths: list[int]) -> list[Asked]:
    """Requests that may have so many tokens, of which the first 33 are the same in all."""
    shared = asked(30, 33).prompt
    found = []
    for number, length in enumerate(lengths, start=first):
        one = asked(number, 3 + number % 3, max_tokens=length - 36 - number % 3, temperature=0.0, stop_token_ids=())
        found.append(replace(one, prompt=(*shared, *one.prompt)))
    return found


def test_prompts_of_unlike_length_share_what_is_rotated_alike_and_nothing_else(opened):
    host, depends = opened
    short, long = beginning_alike(60, [42, 45, ORIGINAL_MAX]), beginning_alike(70, [ORIGINAL_MAX + 1, 60, 77])
    with engine_run(host, max_batch_tokens=64) as run:
        for one in (*short, *long):
            run.submit_all([one])
            run.collect()
        stats = run.assert_exact(Alone(host))
    # Two full blocks of 16 tokens; the first of each kind finds none.
    assert stats["cached_tokens"] == 32 * (4 if depends else 5)


def test_who_asks_across_the_original_length_is_warned_once(opened, caplog):
    host, depends = opened
    with engine_run(host) as run:
        run.submit_all(beginning_alike(80, [45, ORIGINAL_MAX]))
        run.collect()
        assert "max_tokens" not in caplog.text
        run.submit_all(beginning_alike(90, [ORIGINAL_MAX + 1, 70]))
        run.collect()
    said = [record.getMessage() for record in caplog.records if "depend on max_tokens" in record.getMessage()]
    assert len(said) == depends
    if depends:
        assert "request 3: its tokens depend on max_tokens" in said[0]
        assert f"a sequence of up to {ORIGINAL_MAX + 1} tokens" in said[0]
