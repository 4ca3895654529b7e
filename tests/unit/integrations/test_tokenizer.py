"""Tokenizers of strangers: what a GGUF file lacks is named, and whatever the library raises over
damaged files, panics of Rust code included, is a typed error.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import pytest

pytest.importorskip("transformers")

from dflash_moe.errors import ConfigError, UnsupportedError
from dflash_moe.integrations.generation import TextStream
from dflash_moe.integrations.tokenizer import decode, encode, encode_with_ends, load_tokenizer

gguf = pytest.importorskip("gguf", reason="the gguf package is an extra of the tests")


def gguf_file(path, *, model="gpt2", tokens=("a", "b", "ab"), merges=("a b",), eos=2):
    """A GGUF file of nothing but a tokenizer, without what is None."""
    writer = gguf.GGUFWriter(str(path), "qwen3moe")
    if model is not None:
        writer.add_tokenizer_model(model)
    if tokens is not None:
        writer.add_token_list(list(tokens))
    if merges is not None:
        writer.add_token_merges(list(merges))
    if eos is not None:
        writer.add_eos_token_id(eos)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_a_whole_tokenizer_is_built(tmp_path):
    tokenizer = load_tokenizer(gguf_file(tmp_path / "m.gguf"))
    assert encode(tokenizer, "ab") == [2]
    assert encode_with_ends(tokenizer, "aba") == ([2, 0], [2, 3])


@pytest.mark.parametrize("architecture", ["qwen3_moe", "mixtral", "gpt_oss"])
def test_a_checkpoint_without_files_of_a_tokenizer_has_none(tmp_path, architecture):
    # For some architectures transformers would make one of the special tokens alone.
    (tmp_path / "config.json").write_text(f'{{"model_type": "{architecture}"}}')
    with pytest.raises(UnsupportedError, match=r"it has no tokenizer, such as tokenizer\.json"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("lacks", "words"),
    [
        (
            {"merges": None},
            r"its gpt2 tokenizer has no merges \(metadata tokenizer\.ggml\.merges is missing\); the file was not",
        ),
        ({"tokens": None}, "its gpt2 tokenizer has no tokens"),
        ({"model": None}, r"it has no tokenizer \(metadata tokenizer\.ggml\.model is missing\)"),
        ({"model": "t5"}, "its t5 tokenizer has no scores"),
        ({"model": "strange"}, "its tokenizer cannot be built from the metadata: .*'strange'"),
        ({"merges": ("zz qq",)}, "its tokenizer cannot be built from the metadata: .*out of vocabulary"),
        ({"eos": 3}, r"tokenizer\.ggml\.eos_token_id is 3, and the tokenizer has 3 tokens"),
    ],
)
def test_what_a_gguf_tokenizer_lacks_is_named(tmp_path, lacks, words):
    with pytest.raises(UnsupportedError, match=words) as caught:
        load_tokenizer(gguf_file(tmp_path / "m.gguf", **lacks))
    assert str(caught.value).startswith(f"{tmp_path / 'm.gguf'}: ")
    assert "download another copy, or use the safetensors checkpoint" in str(caught.value)


class PanicException(BaseException):
    """Named as what a panic of a Rust extension arrives as."""


class Broken:
    """A tokenizer that raises this, whatever it is asked."""

    is_fast = True
    all_special_ids = ()

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def __call__(self, *_arguments, **_options):
        raise self.error

    decode = __call__


CALLS = [
    lambda tokenizer: encode(tokenizer, "a"),
    lambda tokenizer: encode_with_ends(tokenizer, "a"),
    lambda tokenizer: decode(tokenizer, [1]),
    lambda tokenizer: TextStream(tokenizer).push(1),
]


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("error", [PanicException("index out of bounds"), KeyError("unk"), OverflowError("id")])
def test_a_tokenizer_that_fails_is_unsupported(call, error):
    with pytest.raises(UnsupportedError, match=r"the model's tokenizer .*; its files are damaged: .*(index|unk|id)"):
        call(Broken(error))


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(1)])
def test_interrupts_pass(call, error):
    with pytest.raises(type(error)):
        call(Broken(error))


def test_a_panic_while_loading_is_unsupported(tmp_path, monkeypatch):
    from transformers import AutoTokenizer

    def panic(*_arguments, **_options):
        raise PanicException("called `Result::unwrap()` on an `Err` value")

    monkeypatch.setattr(AutoTokenizer, "from_pretrained", panic)
    for name in ("model.safetensors", "tokenizer.json"):
        (tmp_path / name).touch()
    with pytest.raises(UnsupportedError, match="its tokenizer cannot be read: called `Result::unwrap"):
        load_tokenizer(tmp_path)


def test_text_that_is_no_unicode_is_bad_input(tmp_path):
    with pytest.raises(ConfigError, match="character 1 is no Unicode text"):
        encode(load_tokenizer(gguf_file(tmp_path / "m.gguf")), "a\udcff")
