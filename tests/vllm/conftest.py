"""Tests within a vLLM: `make vllm-check`, which makes an environment with the pinned processor
build and runs these there. Without vLLM nothing here is collected.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from importlib import util
from pathlib import Path
from typing import Any

import pytest

from bench.lab.vllm_process import VllmProcess, running_vllm
from dflash_moe.model.make import MakeOptions, make_checkpoint

collect_ignore_glob = [] if util.find_spec("vllm") is not None else ["test_*.py"]

# What released checkpoints say of a router that chooses among groups, and vLLM needs to be told.
ALSO = {"glm4_moe": {"head_dim": 64, "n_group": 2, "topk_group": 1, "routed_scaling_factor": 2.5}}

Start = Callable[..., AbstractContextManager[VllmProcess]]


@pytest.fixture(scope="session")
def start() -> Start:
    """Starts this environment's vLLM: `running_vllm` without its first argument."""

    def run(*arguments: Any, **options: Any) -> AbstractContextManager[VllmProcess]:
        return running_vllm(sys.executable, *arguments, **options)

    return run


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Path]:
    """Makes a tiny checkpoint of an architecture in a dtype, once."""
    folder = tmp_path_factory.mktemp("models")

    def make(arch: str, dtype: str) -> Path:
        path = folder / f"{arch}-{dtype}"
        if not path.is_dir():
            # vLLM's attention on processors takes heads of 32 values and more.
            make_checkpoint(MakeOptions(arch, 2, 256, 8, 2, 64, dtype, seed=1), path)
            config = json.loads((path / "config.json").read_text(encoding="utf-8"))
            (path / "config.json").write_text(json.dumps(config | ALSO.get(arch, {})), encoding="utf-8")
        return path

    return make
