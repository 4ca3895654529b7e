"""Tests against llama.cpp itself: `make llama-check LLAMA_CPP=DIR LLAMA_BUILD=DIR`. Without these
variables nothing here is collected, because llama.cpp is no part of this project's environment.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dflash_moe.bench.results import BenchResult
from tests.llama.programs import Llama

collect_ignore_glob = [] if os.environ.get("LLAMA_BUILD") and os.environ.get("LLAMA_CPP") else ["test_*.py"]
ROOT = Path(__file__).parents[2]
DEMO_MODEL = ROOT / "bench" / "demo_model" / "dflash_moe_demo" / "model"


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Llama:
    """The programs of the user's llama.cpp, and logits.c compiled against it."""
    return Llama.prepare(Path(os.environ["LLAMA_CPP"]), Path(os.environ["LLAMA_BUILD"]), tmp_path_factory.mktemp("llama"), ROOT)


@pytest.fixture(scope="session")
def architectures(llama: Llama, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with llama.cpp's own tiny model of every architecture it has."""
    folder = tmp_path_factory.mktemp("architectures")
    subprocess.run([llama.program("test-llama-archs"), "-o", folder], check=True, capture_output=True, timeout=300)
    return folder


@pytest.fixture(scope="session")
def demo_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The shipped model with experts and all else in F16."""
    from bench.models.gguf_files import write_gguf

    return write_gguf(DEMO_MODEL, tmp_path_factory.mktemp("demo") / "demo-f16.gguf", "f16", host="f16")


@pytest.fixture(scope="session")
def record() -> Iterator[list[dict[str, Any]]]:
    """Rows that become the JSON named by LLAMA_CHECK_OUT."""
    rows: list[dict[str, Any]] = []
    result = BenchResult("llama_check", {"llama_cpp": os.environ["LLAMA_CPP"].rstrip("/").rsplit("/", 1)[-1]})
    yield rows
    if path := os.environ.get("LLAMA_CHECK_OUT"):
        result.rows, result.complete = rows, True
        result.write(Path(path))
