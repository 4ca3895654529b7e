"""A conversation as token ids: what was computed stays the beginning of the next prompt, as the
model wrote it and not as its text would be tokenised.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import pytest

pytest.importorskip("transformers")

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from dflash_moe.engine.chat_history import ChatHistory
from dflash_moe.errors import ConfigError

END = "<|end|>"


def byte_level_tokenizer() -> PreTrainedTokenizerFast:
    """A token for each byte, one for "th", and special tokens."""
    symbols = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {symbol: number for number, symbol in enumerate([*symbols, "th"])}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[("t", "h")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    made = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=END)
    made.add_special_tokens({"additional_special_tokens": ["<|user|>", "<|model|>"]})
    return made


class Template:
    """Renders as chat models do. `strips` drops the spaces around an answer, as some templates
    do.
    """

    def __init__(self, *, strips: bool = False, fails: bool = False) -> None:
        self.strips = strips
        self.fails = fails

    def render(self, messages):
        if self.fails:
            raise ConfigError("refused")
        parts = []
        for message in messages:
            content = message["content"]
            if message["role"] == "assistant":
                parts.append(f"<|model|>{content.strip() if self.strips else content}{END}")
            else:
                parts.append(f"<|user|>{content}{END}")
        return "".join(parts) + "<|model|>"


@pytest.fixture(scope="module")
def tokenizer():
    return byte_level_tokenizer()


def ids_of(tokenizer, text):
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def letters(tokenizer, text):
    """The ids of a text by its bytes, as a model may write it: never with the token "th"."""
    return [token for character in text for token in ids_of(tokenizer, character)]


def test_an_answers_ids_are_kept_as_they_were_generated(tokenizer):
    history = ChatHistory(Template(), tokenizer)
    first = history.ask("the")
    assert first == ids_of(tokenizer, f"<|user|>the{END}<|model|>")
    answer = [*letters(tokenizer, "this is path"), tokenizer.eos_token_id]
    assert answer != ids_of(tokenizer, f"this is path{END}")
    history.answer(answer, "this is path")
    second = history.ask("that")
    assert second[: len(first) + len(answer)] == [*first, *answer]
    assert second[len(first) + len(answer) :] == ids_of(tokenizer, f"<|user|>that{END}<|model|>")
    assert history.not_kept == ""
    assert tokenizer.decode(second) == f"<|user|>the{END}<|model|>this is path{END}<|user|>that{END}<|model|>"


def test_an_answer_that_was_cut_short_is_kept_too(tokenizer):
    history = ChatHistory(Template(), tokenizer)
    first = history.ask("a")
    # Two of the three bytes of a character.
    cut = letters(tokenizer, "thus €")[:-1]
    history.answer(cut, "thus ")
    second = history.ask("b")
    assert second[: len(first)] == first
    assert history.not_kept
    history.answer(letters(tokenizer, "thus"), "thus")
    third = history.ask("c")
    assert third[: len(second) + 4] == [*second, *letters(tokenizer, "thus")]
    assert history.not_kept == ""


def test_characters_of_several_tokens_are_no_boundary(tokenizer):
    history = ChatHistory(Template(), tokenizer)
    first = history.ask("€")
    answer = [*letters(tokenizer, "th€"), tokenizer.eos_token_id]
    history.answer(answer, "th€")
    second = history.ask("€€")
    assert second == [*first, *answer, *ids_of(tokenizer, f"<|user|>€€{END}<|model|>")]


def test_a_template_that_changes_answers_is_told(tokenizer):
    history = ChatHistory(Template(strips=True), tokenizer)
    history.ask("a")
    history.answer([*letters(tokenizer, " th"), tokenizer.eos_token_id], " th")
    second = history.ask("b")
    assert second == ids_of(tokenizer, f"<|user|>a{END}<|model|>th{END}<|user|>b{END}<|model|>")
    assert history.not_kept == "the template renders the latest answer otherwise than the model wrote it"
    history.reset()
    assert history.not_kept == ""


@pytest.mark.parametrize(
    ("written", "content"),
    [
        ("<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Yes!<|return|>", "Yes!"),
        ("<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Yes", "Yes"),
        ("<|channel|>analysis<|message|>Hm", ""),
        ("No channels", "shown"),
    ],
)
def test_of_an_answer_in_channels_the_final_message_is_told(tokenizer, written, content):
    history = ChatHistory(Template(), tokenizer)
    history.ask("a")
    history.answer(letters(tokenizer, written), "shown")
    assert history.messages[-1]["content"] == content


def test_reset_keeps_the_system_prompt_alone(tokenizer):
    history = ChatHistory(Template(), tokenizer, "sys")
    history.ask("a")
    history.answer(letters(tokenizer, "b"), "b")
    assert history.num_turns == 1
    assert [message["role"] for message in history.messages] == ["system", "user", "assistant"]
    history.reset()
    assert history.messages == [{"role": "system", "content": "sys"}]
    assert history.num_tokens == history.num_turns == 0
    assert history.ask("c") == ids_of(tokenizer, f"<|user|>sys{END}<|user|>c{END}<|model|>")


def test_a_question_that_fails_or_is_taken_back_leaves_no_trace(tokenizer):
    template = Template()
    history = ChatHistory(template, tokenizer)
    first = history.ask("a")
    history.answer([*letters(tokenizer, "th"), tokenizer.eos_token_id], "th")
    template.fails = True
    with pytest.raises(ConfigError):
        history.ask("lost")
    template.fails = False
    with pytest.raises(ConfigError, match="no Unicode text"):
        history.ask("half \ud800")
    history.ask("taken back")
    history.take_back()
    assert history.num_turns == 1
    again = history.ask("b")
    assert again == [*first, *letters(tokenizer, "th"), tokenizer.eos_token_id, *ids_of(tokenizer, f"<|user|>b{END}<|model|>")]


def test_a_tokenizer_without_offsets_is_tokenised_anew(tokenizer):
    class Slow:
        is_fast = False

        def __call__(self, text, **options):
            assert not options.pop("return_offsets_mapping")
            return tokenizer(text, **options)

        def decode(self, *given, **options):
            return tokenizer.decode(*given, **options)

    history = ChatHistory(Template(), Slow())
    first = history.ask("a")
    history.answer([*letters(tokenizer, "th"), tokenizer.eos_token_id], "th")
    assert history.ask("b") == ids_of(tokenizer, f"<|user|>a{END}<|model|>th{END}<|user|>b{END}<|model|>")
    assert history.not_kept == "no token ends where the latest answer does"
    history.reset()
    assert history.ask("a") == first
    history.answer([*ids_of(tokenizer, "th"), tokenizer.eos_token_id], "th")
    history.ask("b")
    assert history.not_kept == ""
