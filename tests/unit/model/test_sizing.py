"""What a GGUF file says of its sizes is what the model's own code says, for every architecture that
is read without it; and neither torch nor transformers is imported for that.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from dflash_moe.model import sizing
from dflash_moe.model.checkpoint import Checkpoint
from dflash_moe.model.gguf_architectures.reading import ARCHITECTURES

gguf = pytest.importorskip("gguf", reason="the gguf package is an extra of the tests")
pytestmark = pytest.mark.transformers

GOLDENS = Path(__file__).parents[2] / "golden" / "gguf"
NAMES = sorted(path.name.removesuffix(".gguf.xz") for path in GOLDENS.glob("*.gguf.xz"))


def both(path):
    """What the file says, and what the model's own code says."""
    checkpoint = Checkpoint.open(path)
    quick = sizing.model_sizes(checkpoint)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sizing, "_record", lambda _checkpoint: None)
        return quick, sizing.model_sizes(checkpoint)


def facts(sizes):
    """All that a plan uses, which is everything but how layers and tensors are called."""
    layers = [
        (one.index, one.num_experts, one.top_k, one.weight_dtype, one.expert_bytes, one.ffn.kernel_spec())
        for one in sizes.layers
    ]
    return layers, sizes.dtype, sizes.host


@pytest.mark.parametrize("name", NAMES)
def test_the_file_alone_says_what_the_models_own_code_says(name, tmp_path):
    from bench.models.gguf_goldens import unpack

    path = unpack(GOLDENS, name, tmp_path / f"{name}.gguf")
    quick, slow = both(path)
    assert facts(quick) == facts(slow)


@pytest.mark.parametrize(("family", "host"), [("qwen3_moe", "q4_k"), ("qwen2_moe", "q6_k"), ("gpt_oss", "q8_0")])
def test_quantised_matrices_count_as_they_are_kept(family, host, tmp_path):
    from bench.models.gguf_files import write_gguf
    from dflash_moe.model.make import MakeOptions, make_checkpoint

    made = MakeOptions(family, num_layers=2, hidden_size=256, num_experts=4, top_k=2, moe_intermediate_size=256, dtype="f32")
    make_checkpoint(made, tmp_path / "source")
    quick, slow = both(write_gguf(tmp_path / "source", tmp_path / "m.gguf", "q4_k", down="q6_k", host=host))
    assert facts(quick) == facts(slow)
    dense = quick.host.dense
    assert dense.packed_values > 10 * dense.other_values
    assert dense.packed_bytes < dense.kept_bytes(2) < dense.torch_bytes(2) == 2 * (dense.packed_values + dense.other_values)


def test_matrices_that_the_loader_turns_do_not_count_as_stored(tmp_path):
    """The queries and keys of this architecture are dequantised."""
    from bench.models.gguf_goldens import unpack

    checkpoint = Checkpoint.open(unpack(GOLDENS, "llama", tmp_path / "m.gguf"))
    turned = [name for name in checkpoint.tensors if name.split(".")[-2] in ARCHITECTURES["llama"].remade]
    assert {name.split(".")[2] for name in turned} == {"attn_q", "attn_k"}


def test_neither_torch_nor_transformers_is_imported(tmp_path):
    from bench.models.gguf_goldens import unpack

    path = unpack(GOLDENS, "qwen3moe", tmp_path / "m.gguf")
    program = (
        "import json, sys\n"
        "from dflash_moe.cli.main import run\n"
        "code = run(['plan', '-m', sys.argv[1]])\n"
        "print(json.dumps([code, *({'torch', 'transformers', 'tokenizers'} & sys.modules.keys())]))\n"
    )
    done = subprocess.run([sys.executable, "-c", program, str(path)], capture_output=True, text=True, timeout=120, check=True)
    assert json.loads(done.stdout.splitlines()[-1]) == [0]
