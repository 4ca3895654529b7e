"""What `generate` is asked to complete: one text, or JSON lines, each error with file, line and
field.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dflash_moe.cli.generate.prompt_files import given_prompts
from dflash_moe.engine.sampling.sampling_params import SamplingParams
from dflash_moe.errors import ConfigError

BASE = SamplingParams(temperature=0, max_tokens=9, seed=3)


def written(folder: Path, text: str, name: str = "p.jsonl") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def test_a_flag_is_one_text_with_the_parameters_of_the_flags():
    found = given_prompts("Once", None, BASE)
    assert ([(one.text, one.params) for one in found.prompts], found.are_lines) == ([("Once", BASE)], False)


def test_lines_are_strings_or_objects_whose_fields_win_over_the_flags(tmp_path):
    lines = [
        '"Once\\u2028upon"', "",
        '{"prompt": "a", "max_tokens": 2, "temperature": 0.5, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "seed": null, "n": 2}',
        '{"stop": ["x", "y"], "logit_bias": {"7": -1.5}, "stop_token_ids": [4], "ignore_eos": true, "prompt": "b"}',
    ]  # fmt: skip
    found = given_prompts(None, written(tmp_path, "\n".join(lines) + "\n"), BASE)
    assert found.are_lines
    first, second, third = found.prompts
    assert (first.text, first.params) == ("Once\u2028upon", BASE)
    assert second.params == SamplingParams(
        max_tokens=2, temperature=0.5, top_p=0.9, top_k=5, min_p=0.1, seed=None, n=2
    )  # fmt: skip
    assert third.params.logit_bias == {7: -1.5}
    assert (third.params.stop, third.params.stop_token_ids, third.params.ignore_eos) == (("x", "y"), (4,), True)
    assert third.params.max_tokens == BASE.max_tokens
    assert [one.origin.rpartition(":")[2] for one in found.prompts] == ["1", "3", "4"]


OBJECTS = '{"prompt": "a"}\n{"prompt": "b", "n": 2}\n'


@pytest.mark.parametrize(
    ("name", "text", "num_prompts"),
    [
        ("p.txt", OBJECTS, 1),
        ("p.TXT", OBJECTS, 1),
        ("p", OBJECTS, 2),
        ("p.json", OBJECTS, 2),
        ("p.JSONL", '"a"', 1),
        ("p.md", '{"prompt": "a"}\nand text', 1),
        ("p.md", '"a"\n"b"', 1),
        ("p.md", '{"a": "prompt"}', 1),
        ("p.md", "", 1),
        ("p.md", "[" * 100_000, 1),
    ],
)
def test_the_name_decides_and_else_whether_every_line_is_an_object_with_a_prompt(tmp_path, name, text, num_prompts):
    found = given_prompts(None, written(tmp_path, text, name), BASE)
    assert len(found.prompts) == num_prompts
    assert found.are_lines == (num_prompts == 2 or name == "p.JSONL")
    if not found.are_lines:
        assert found.prompts[0].text == text


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (
            '{"prompt": "a", "temprature": 1}',
            "unknown field 'temprature'; did you mean 'temperature'?; allowed: prompt, max_tok",
        ),
        ('{"prompt": "a", "max_new_tokens": 1}', "unknown field 'max_new_tokens'; did you mean 'max_tokens'?"),
        ('{"prompt": "a", "token_mask": 1}', "unknown field 'token_mask'"),
        ('{"prompt": "a", "top_p": 0}', "top_p=0 is not allowed; allowed: above 0 and at most 1"),
        ('{"prompt": "a", "temperature": NaN}', "temperature=nan is not allowed"),
        ('{"prompt": "a", "n": "2"}', "n='2' is not allowed; allowed: an integer 1..64"),
        ('{"prompt": "a", "logit_bias": {"x": 1}}', "logit_bias: token id='x' is not allowed"),
        ('{"prompt": "a", "stop": [""]}', "stop='' is not allowed"),
        ('{"prompt": "a", "n": 1, "n": 2}', "field 'n' is there twice"),
        ('{"n": 1}', '"prompt" is None; expected a text'),
        ('{"prompt": ["a"]}', "\"prompt\" is ['a']; expected a text"),
        ('""', "\"prompt\" is ''; expected a text of at least one character"),
        ('"\\ud800"', "prompt: character 0 is no Unicode text"),
        ("[1]", "[1] is no prompt; write a JSON string, or an object"),
        ("a", "not JSON (Expecting value: line 1 column 1 (char 0)); each line is a string or an object"),
        ("[" * 100_000, "not JSON"),
        ("1" * 5000, "not JSON"),
    ],
)
def test_an_error_names_file_line_and_field(tmp_path, line, said):
    path = written(tmp_path, f'{{"prompt": "good"}}\n\n{line}\n')
    with pytest.raises(ConfigError) as raised:
        given_prompts(None, path, BASE)
    assert str(raised.value).startswith(f"{path}:3: ")
    assert said in str(raised.value)
    assert len(str(raised.value)) < 500


@pytest.mark.parametrize("text", ["", "\n  \n"])
def test_a_file_of_no_lines_says_how_one_looks(tmp_path, text):
    with pytest.raises(ConfigError, match="it has no prompt; write one a line, such as") as raised:
        given_prompts(None, written(tmp_path, text), BASE)
    example = str(raised.value).partition("such as ")[2]
    assert given_prompts(None, written(tmp_path, example), BASE).prompts[0].text == json.loads(example)["prompt"]


@pytest.mark.parametrize(("prompt", "name"), [(None, None), ("a", "p.txt")])
def test_one_of_both_flags_is_given(tmp_path, prompt, name):
    with pytest.raises(ConfigError, match="--prompt TEXT or --prompt-file FILE, and not both"):
        given_prompts(prompt, name and written(tmp_path, "a", name), BASE)


def test_an_argument_that_is_no_utf8_is_refused():
    with pytest.raises(ConfigError, match="--prompt: character 1 is no Unicode text"):
        given_prompts("a\udcff", None, BASE)
