"""A runtime that starts again for the same checkpoint imports neither torch nor transformers, and a
model that does is not proven again.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bench.models.families import tiny_options
from dflash_moe.config import CacheSettings
from dflash_moe.experts.expert_runtime import ExpertRuntime
from dflash_moe.model import checkpoint_files
from dflash_moe.model.make import make_checkpoint
from dflash_moe.store.kept_spec import kept_model_spec
from dflash_moe.topology import Topology
from tests.expert_cases import call, tiny_spec
from tests.expert_cases import make_checkpoint as make_expert_checkpoint
from tests.fault.conftest import pids

pytestmark = pytest.mark.transformers

START = """
import sys
from dflash_moe.experts.expert_runtime import ExpertRuntime
from dflash_moe.topology import Topology

with ExpertRuntime.start(Topology.local(1), sys.argv[1], cache_path=sys.argv[2]) as runtime:
    print(runtime.spec.fingerprint, *sorted({"torch", "transformers"} & sys.modules.keys()))
"""


def test_a_second_start_imports_no_torch(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint_files, "SETTLED_NS", 0)
    make_checkpoint(tiny_options("qwen3_moe"), tmp_path / "model")
    spec = kept_model_spec(tmp_path / "model", cache=CacheSettings(tmp_path / "store"))
    found = subprocess.run(
        [sys.executable, "-c", START, str(tmp_path / "model"), str(tmp_path / "store")],
        check=True, timeout=120, capture_output=True, text=True,
    )  # fmt: skip
    assert found.stdout.split() == [spec.fingerprint]


@pytest.mark.parametrize("layout", ["packed", "mapped", "stored"])
def test_a_worker_starts_without_numpy(tmp_path, layout):
    """Its import would be a third of the start. What was imported is among what is mapped."""
    spec = tiny_spec(make_expert_checkpoint(tmp_path / "model"))
    topology = Topology.parse(f"version: 1\nworkers: [{{name: w0, threads: 1, weights_layout: {layout}}}]\n")
    with ExpertRuntime.start(topology, model=spec, cache_path=tmp_path / "store") as runtime:
        call(runtime)
        mapped = Path(f"/proc/{pids(runtime)['w0']}/maps").read_text()
    assert "_core." in mapped
    assert "numpy" not in mapped


PROVE = """
import json, sys
from pathlib import Path
from dflash_moe import LLM, SamplingParams
from dflash_moe.forward import host_model, take_layers
from dflash_moe.model import checkpoint_files
from dflash_moe.operators.layers import block_forms
from dflash_moe.topology import Topology

checkpoint_files.SETTLED_NS = 0
proven = []
for owner, name in ((block_forms, "exact_copy"), (take_layers, "_probe_logits"), (host_model, "find_dependence")):
    def noted(*arguments, _made=getattr(owner, name), _name=name):
        proven.append(_name)
        return _made(*arguments)
    setattr(owner, name, noted)
with LLM(sys.argv[1], Topology.local(1, threads=1), cache_path=sys.argv[2], kv_memory="16MiB") as llm:
    (completion,) = llm.generate([3, 1, 4, 1, 5], SamplingParams(max_tokens=8, temperature=0))
    print(json.dumps([proven, completion.token_ids, llm.host.report.to_json()]))
"""


def begin(tmp_path):
    arguments = [sys.executable, "-c", PROVE, str(tmp_path / "model"), str(tmp_path / "store")]
    return subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def end(process):
    out, errors = process.communicate(timeout=240)
    assert process.returncode == 0, errors
    return json.loads(out.splitlines()[-1])


def test_of_two_starts_at_once_one_proves_and_a_third_does_not(tmp_path):
    make_checkpoint(tiny_options("qwen3_moe"), tmp_path / "model")
    first, second = map(end, [begin(tmp_path), begin(tmp_path)])
    (file,) = (tmp_path / "store" / "proofs").iterdir()
    third = end(begin(tmp_path))
    # Whichever comes late may find what the other has proven.
    assert "find_dependence" in first[0] + second[0]
    assert third[0] == []
    assert first[1:] == second[1:] == third[1:]
    assert file.name.endswith(".json")
