"""Whatever stands in a checkpoint's config.json, index or names ends in a model or in an error of
ours: never in an exception of transformers, torch or Python, and never in gigabytes.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import itertools
import json
import os
import random
import shutil

import pytest

from bench.models.families import tiny_options
from dflash_moe.errors import CheckpointError, DflashError, UnsupportedError
from dflash_moe.integrations.tokenizer import load_tokenizer
from dflash_moe.model.checkpoint import Checkpoint
from dflash_moe.model.inspect import inspect_model
from dflash_moe.model.make import make_checkpoint
from dflash_moe.model.spec import model_spec
from dflash_moe.telemetry.memory import process_memory
from dflash_moe.testing.tiny import tiny_checkpoint

pytestmark = pytest.mark.transformers

# One value of every kind that JSON has, and the edges of each kind.
EDGES = (
    None, True, -1, 0, 1, 3, 10**6, 10**9, 10**30, -(10**30), 0.0, 1.5, 1e308, float("inf"), "", "x", "x" * 5000, "\ud800", [],
    [5], ["__version__"], ["x"] * 100, {}, {"a": {"b": []}},
)  # fmt: skip
LONG_NAME = "x" * 5000 + ".safetensors"


@pytest.fixture(scope="module")
def pristine(tmp_path_factory):
    """Checkpoints by architecture, made once."""
    found = {}

    def make(arch):
        if arch not in found:
            found[arch] = tmp_path_factory.mktemp(arch) / "model"
            make_checkpoint(tiny_options(arch), found[arch])
        return found[arch]

    return make


@pytest.fixture
def damaged(pristine, tmp_path):
    """A copy of a checkpoint whose config.json has other fields."""
    shutil.copytree(pristine("mixtral"), tmp_path / "model")

    def change(**fields):
        settings = json.loads((pristine("mixtral") / "config.json").read_text())
        (tmp_path / "model" / "config.json").write_text(json.dumps(settings | fields))
        return tmp_path / "model"

    return change


def refusal_of(directory):
    """What `model_spec` says; None where it finds the model. Fails on any other exception."""
    try:
        model_spec(directory)
    except DflashError as error:
        return str(error)
    return None


@pytest.mark.parametrize("field", ["num_local_experts", "num_hidden_layers"])
def test_a_billion_of_anything_is_refused_before_transformers_sees_the_configuration(damaged, monkeypatch, field):
    import transformers

    def reached(*_arguments, **_options):
        raise AssertionError("transformers was given the configuration")

    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", reached)
    before = process_memory().anonymous_bytes
    with pytest.raises(UnsupportedError, match=rf"config\.json: {field} is 1000000000; at most \d+"):
        model_spec(damaged(**{field: 10**9}))
    assert process_memory().anonymous_bytes - before < 16 << 20


def test_counts_of_an_inner_configuration_are_bounded_too(damaged):
    with pytest.raises(UnsupportedError, match=r"text_config\.num_experts is 1000000"):
        model_spec(damaged(text_config={"num_experts": 10**6}))


def test_more_experts_than_the_files_have_are_told_before_anything_is_made_of_them(damaged, monkeypatch):
    from dflash_moe.model import probe

    def reached(*_arguments):
        raise AssertionError("toy weights were made")

    monkeypatch.setattr(probe, "confirm", reached)
    with pytest.raises(
        CheckpointError, match=r"tensor 'model\.layers\.0\.block_sparse_moe\.experts\.59999\.w1\.weight' is missing"
    ):
        model_spec(damaged(num_local_experts=60_000))


def test_the_probe_makes_as_many_experts_as_it_uses(pristine, monkeypatch):
    from dflash_moe.model import probe

    made = []
    original = probe._toy_module

    def counted(*arguments):
        toy = original(*arguments)
        made.extend(value.shape[0] for value in toy._parameters.values())
        return toy

    monkeypatch.setattr(probe, "_toy_module", counted)
    num_experts = model_spec(pristine("mixtral")).layers[0].num_experts
    assert num_experts > probe._NUM_EXPERTS
    assert set(made) == {probe._NUM_EXPERTS}


@pytest.mark.parametrize("named", ["__version__", "pipeline", "AutoModelForCausalLM", "MixtralConfig", "logging"])
def test_what_is_no_model_class_is_refused_and_never_called(damaged, named):
    with pytest.raises(UnsupportedError, match=rf"MixtralConfig\.architectures: '{named}' is no model class"):
        model_spec(damaged(architectures=[named]))


@pytest.mark.parametrize("named", [[5], 5, [["MixtralForCausalLM"]], "MixtralForCausalLM", {"a": 1}])
def test_architectures_that_are_no_list_of_names_are_refused(damaged, named):
    directory = damaged(architectures=named)
    assert refusal_of(directory)
    assert inspect_model(directory).reason


def test_a_class_that_transformers_does_not_have_is_passed_over(damaged):
    assert model_spec(damaged(architectures=["OurOwnMixtral"])).layers


@pytest.mark.parametrize("found", [5, [], "fp8", {"quant_method": "fp8", "weight_block_size": 128}, {"quant_method": {}}])
def test_a_quantisation_of_no_known_form_is_refused(damaged, found):
    assert refusal_of(damaged(quantization_config=found))


def cases_of(settings):
    return sorted(itertools.product(settings, range(len(EDGES))))


def check_edges(directory, arch_settings, cases):
    for field, at in cases:
        text = json.dumps(arch_settings | {field: EDGES[at]})
        (directory / "config.json").write_text(text)
        reason = refusal_of(directory)
        assert reason is None or len(reason) < 1000, (field, EDGES[at])


def test_any_value_of_any_field_gives_a_model_or_an_error_of_ours(pristine, tmp_path):
    shutil.copytree(pristine("mixtral"), tmp_path / "model")
    settings = json.loads((pristine("mixtral") / "config.json").read_text())
    check_edges(tmp_path / "model", settings, random.Random(1).sample(cases_of(settings), 80))


@pytest.mark.long
@pytest.mark.parametrize("arch", ["mixtral", "gpt_oss", "deepseek_v3", "qwen3_moe"])
@pytest.mark.timeout(300)
def test_every_edge_of_every_field_gives_a_model_or_an_error_of_ours(pristine, tmp_path, arch):
    shutil.copytree(pristine(arch), tmp_path / "model")
    settings = json.loads((pristine(arch) / "config.json").read_text())
    check_edges(tmp_path / "model", settings, cases_of(settings))


@pytest.mark.parametrize("name", [LONG_NAME, "a\0b", "\ud800.safetensors", 5, None, ["a"], "../model.safetensors", ""])
def test_an_index_that_names_no_file_is_refused(tmp_path, name):
    tiny_checkpoint(tmp_path)
    index = {"weight_map": {"model.layers.0.mlp.experts.0.up_proj.weight": name}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="not a file name") as found:
        Checkpoint.open(tmp_path)
    assert len(str(found.value)) < 400


@pytest.mark.parametrize("text", ["5", "[]", '"x"', "{", "\xff", '{"weight_map": 5}', '{"weight_map": {}}', "[" * 5000])
def test_an_index_of_another_form_is_refused(tmp_path, text):
    tiny_checkpoint(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(text, encoding="latin-1")
    with pytest.raises(CheckpointError, match=r"model\.safetensors\.index\.json"):
        Checkpoint.open(tmp_path)


@pytest.mark.parametrize("path", ["x" * 5000, "a\0b", "/dev/null", "/proc/self/mem"])
def test_a_path_that_is_no_checkpoint_is_refused(path):
    with pytest.raises(CheckpointError):
        Checkpoint.open(path)


def test_a_dtype_that_is_no_name_is_refused(tmp_path):
    header = json.dumps({"a": {"dtype": "\ud800", "shape": [], "data_offsets": [0, 0]}}).encode()
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(CheckpointError, match="dtype is"):
        Checkpoint.open(tmp_path)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"model": 5}', '{"model": {"type": "BPE"}}'])
def test_a_damaged_tokenizer_is_refused(pristine, tmp_path, text):
    shutil.copytree(pristine("mixtral"), tmp_path / "model")
    (tmp_path / "model" / "tokenizer.json").write_text(text)
    with pytest.raises(UnsupportedError, match="its tokenizer cannot be read"):
        load_tokenizer(tmp_path / "model")


PANICS = {
    "normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"},
    "post_processor": {
        "type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "X", "type_id": 0}}], "pair": [], "special_tokens": {},
    },
}  # fmt: skip


@pytest.mark.parametrize("part", [*sorted(PANICS), "model"])
def test_a_tokenizer_that_makes_rust_panic_is_refused_without_its_backtrace(pristine, tmp_path, part, capfd):
    shutil.copytree(pristine("mixtral"), tmp_path / "model")
    path = tmp_path / "model" / "tokenizer.json"
    settings = json.loads(path.read_text())
    # Merges whose second half is shorter than the prefix that is to be taken off.
    vocabulary = {"a": 0, "\u00e9": 1, "b": 2}
    merges = {"type": "BPE", "vocab": vocabulary, "merges": [["a", "\u00e9"], ["a", "b"]], "continuing_subword_prefix": "##"}
    path.write_text(json.dumps({**settings, part: PANICS.get(part, merges)}))
    with pytest.raises(UnsupportedError, match=r"its tokenizer cannot be read: .*; tokenizer\.json, .* is damaged: download"):
        load_tokenizer(tmp_path / "model")
    assert "panicked" not in capfd.readouterr().err


def test_what_others_write_while_a_tokenizer_is_read_appears(pristine, tmp_path, monkeypatch, capfd):
    from transformers import AutoTokenizer

    read = AutoTokenizer.from_pretrained

    def speaking(*arguments, **options):
        os.write(2, b"a warning of the system\n")
        return read(*arguments, **options)

    monkeypatch.setattr(AutoTokenizer, "from_pretrained", speaking)
    load_tokenizer(pristine("mixtral"))
    assert "a warning of the system" in capfd.readouterr().err


def test_a_folder_without_a_tokenizer_is_named_and_not_taken_for_one_without_tokens(pristine, tmp_path):
    shutil.copytree(pristine("mixtral"), tmp_path / "model")
    (tmp_path / "model" / "tokenizer.json").unlink()
    with pytest.raises(UnsupportedError, match=r"it has no tokenizer, such as tokenizer\.json; download the whole folder"):
        load_tokenizer(tmp_path / "model")
