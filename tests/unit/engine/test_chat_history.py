"""A conversation as token ids: what was computed stays the beginning of the next prompt, as the
model wrote it and not as its text would be tokenised.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import pytest

pytest.importorskip("transformers")

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from dflash_moe.engine.chat_history import ChatHistory, ContextWindow
from dflash_moe.engine.prompt_check import LengthLimit
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
    do; `refuses_system` says no to a system prompt.
    """

    def __init__(self, *, strips: bool = False, fails: bool = False) -> None:
        self.strips = strips
        self.fails = fails
        self.refuses_system = False

    def render(self, messages):
        if self.fails or (self.refuses_system and messages[0]["role"] == "system"):
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
    assert first.token_ids == ids_of(tokenizer, f"<|user|>the{END}<|model|>")
    answer = [*letters(tokenizer, "this is path"), tokenizer.eos_token_id]
    assert answer != ids_of(tokenizer, f"this is path{END}")
    history.answer(first, answer, "this is path")
    second = history.ask("that").token_ids
    seen = len(first.token_ids) + len(answer)
    assert second[:seen] == [*first.token_ids, *answer]
    assert second[seen:] == ids_of(tokenizer, f"<|user|>that{END}<|model|>")
    assert history.ask("that").not_kept == ""
    assert tokenizer.decode(second) == f"<|user|>the{END}<|model|>this is path{END}<|user|>that{END}<|model|>"


def test_an_answer_that_was_cut_short_is_kept_too(tokenizer):
    history = ChatHistory(Template(), tokenizer)
    first = history.ask("a")
    # Two of the three bytes of a character.
    cut = letters(tokenizer, "thus €")[:-1]
    history.answer(first, cut, "thus ")
    second = history.ask("b")
    assert second.token_ids[: len(first.token_ids)] == first.token_ids
    assert second.not_kept
    history.answer(second, letters(tokenizer, "thus"), "thus")
    third = history.ask("c")
    assert third.token_ids[: len(second.token_ids) + 4] == [*second.token_ids, *letters(tokenizer, "thus")]
    assert third.not_kept == ""


def test_characters_of_several_tokens_are_no_boundary(tokenizer):
    history = ChatHistory(Template(), tokenizer)
    first = history.ask("€")
    answer = [*letters(tokenizer, "th€"), tokenizer.eos_token_id]
    history.answer(first, answer, "th€")
    second = history.ask("€€").token_ids
    assert second == [*first.token_ids, *answer, *ids_of(tokenizer, f"<|user|>€€{END}<|model|>")]


def test_a_template_that_changes_answers_is_told(tokenizer):
    history = ChatHistory(Template(strips=True), tokenizer)
    history.answer(history.ask("a"), [*letters(tokenizer, " th"), tokenizer.eos_token_id], " th")
    second = history.ask("b")
    assert second.token_ids == ids_of(tokenizer, f"<|user|>a{END}<|model|>th{END}<|user|>b{END}<|model|>")
    assert second.not_kept == "the template renders the latest answer otherwise than the model wrote it"
    history.reset()
    assert history.ask("a").not_kept == ""


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
    history.answer(history.ask("a"), letters(tokenizer, written), "shown")
    assert history.messages[-1]["content"] == content


def test_reset_keeps_the_system_prompt_alone(tokenizer):
    history = ChatHistory(Template(), tokenizer, "sys")
    history.answer(history.ask("a"), letters(tokenizer, "b"), "b")
    assert history.num_turns == 1
    assert [message["role"] for message in history.messages] == ["system", "user", "assistant"]
    history.reset()
    assert history.messages == [{"role": "system", "content": "sys"}]
    assert history.num_tokens == history.num_turns == 0
    assert history.ask("c").token_ids == ids_of(tokenizer, f"<|user|>sys{END}<|user|>c{END}<|model|>")


def test_a_question_without_an_answer_leaves_no_trace(tokenizer):
    template = Template()
    history = ChatHistory(template, tokenizer)
    first = history.ask("a")
    answer = [*letters(tokenizer, "th"), tokenizer.eos_token_id]
    history.answer(first, answer, "th")
    template.fails = True
    with pytest.raises(ConfigError):
        history.ask("lost")
    template.fails = False
    with pytest.raises(ConfigError, match="no Unicode text"):
        history.ask("half \ud800")
    history.ask("never answered")
    assert history.num_turns == 1
    again = history.ask("b").token_ids
    assert again == [*first.token_ids, *answer, *ids_of(tokenizer, f"<|user|>b{END}<|model|>")]


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
    history.answer(first, [*letters(tokenizer, "th"), tokenizer.eos_token_id], "th")
    second = history.ask("b")
    assert second.token_ids == ids_of(tokenizer, f"<|user|>a{END}<|model|>th{END}<|user|>b{END}<|model|>")
    assert second.not_kept == "no token ends where the latest answer does"
    history.reset()
    assert history.ask("a") == first
    history.answer(first, [*ids_of(tokenizer, "th"), tokenizer.eos_token_id], "th")
    assert history.ask("b").not_kept == ""


# -- changes of a conversation ---------------------------------------------------------------------


def talk(history, tokenizer, *questions) -> None:
    """Asks questions, each of which is answered by four tokens."""
    for question in questions:
        history.answer(history.ask(question), [*letters(tokenizer, "xyz"), tokenizer.eos_token_id], "xyz")


def test_undo_takes_back_a_turn_and_keeps_the_ids_of_those_before(tokenizer):
    history = ChatHistory(Template(), tokenizer)
    assert history.undo() is None
    talk(history, tokenizer, "a", "b")
    before = history.ask("c")
    talk(history, tokenizer, "c")
    assert history.undo() == "c"
    assert history.ask("c") == before
    assert before.not_kept == ""
    assert (history.undo(), history.undo(), history.undo()) == ("b", "a", None)
    assert history.ask("a").token_ids == ids_of(tokenizer, f"<|user|>a{END}<|model|>")


def test_another_system_prompt_is_tokenised_anew_once(tokenizer):
    template = Template()
    history = ChatHistory(template, tokenizer)
    talk(history, tokenizer, "a")
    history.set_system("sys")
    assert history.system == "sys"
    prompt = history.ask("b")
    assert prompt.not_kept == "the system prompt was changed"
    assert prompt.token_ids == ids_of(tokenizer, f"<|user|>sys{END}<|user|>a{END}<|model|>xyz{END}<|user|>b{END}<|model|>")
    talk(history, tokenizer, "b")
    assert history.ask("c").not_kept == ""
    template.refuses_system = True
    with pytest.raises(ConfigError, match="refused"):
        history.set_system("other")
    assert history.system == "sys"
    history.set_system(None)
    assert history.messages[0] == {"role": "user", "content": "a"}


def said(*contents: str, system: str | None = None) -> list[dict[str, str]]:
    """Messages in turn, after the system's where there is one."""
    turns = [{"role": ("user", "assistant")[place % 2], "content": text} for place, text in enumerate(contents)]
    return turns if system is None else [{"role": "system", "content": system}, *turns]


@pytest.mark.parametrize("messages", [[], said("a", "xyz"), said("a", "xyz", "b", "", system="sys"), said(system="sys")])
def test_a_loaded_conversation_goes_on_as_the_one_that_was_saved(tokenizer, messages):
    history = ChatHistory(Template(), tokenizer, "former")
    talk(history, tokenizer, "former")
    history.load(messages)
    assert history.messages == messages
    wanted = "".join(
        f"<|user|>{m['content']}{END}" if m["role"] != "assistant" else f"<|model|>{m['content']}{END}" for m in messages
    )
    prompt = history.ask("c")
    assert prompt.token_ids == ids_of(tokenizer, f"{wanted}<|user|>c{END}<|model|>")


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        (said("a"), "message 1, the last one, is of user"),
        (said("a", "b", "c", system="sys"), "message 4, the last one"),
        (said("a", "b")[1:], "message 1 is of assistant, expected user"),
        ([*said("a", "b"), *said(system="sys")], "message 3 is of system, expected user"),
    ],
)
def test_messages_that_are_no_conversation_are_refused(tokenizer, messages, words):
    history = ChatHistory(Template(), tokenizer)
    talk(history, tokenizer, "a")
    with pytest.raises(ConfigError, match=words):
        history.load(messages)
    assert history.num_turns == 1


# -- what does not fit -----------------------------------------------------------------------------


def window(num_tokens: int, answer_tokens: int = 4, *, is_shifting: bool = True) -> ContextWindow:
    return ContextWindow(LengthLimit(num_tokens, "which a test allows"), answer_tokens, is_shifting)


def test_the_oldest_turns_are_left_out_and_the_system_prompt_stays(tokenizer):
    history = ChatHistory(Template(), tokenizer, "s")
    # Three tokens of the system prompt, and eight of each turn.
    talk(history, tokenizer, *"abcdefgh")
    whole = history.ask("i")
    assert len(whole.token_ids) == 3 + 8 * 8 + 4
    assert history.ask("i", window(len(whole.token_ids) + 4)) == whole
    prompt = history.ask("i", window(len(whole.token_ids) + 3))
    # Half of 74 tokens: three turns.
    assert prompt.num_left_out == 5
    turns = "".join(f"<|user|>{question}{END}<|model|>xyz{END}" for question in "fgh")
    assert prompt.token_ids == ids_of(tokenizer, f"<|user|>s{END}{turns}<|user|>i{END}<|model|>")
    assert prompt.not_kept == "the oldest turns are left out"
    assert history.num_left_out == 0, "an unanswered question changes nothing"
    history.answer(prompt, [*letters(tokenizer, "xyz"), tokenizer.eos_token_id], "xyz")
    assert history.num_left_out == 5
    assert len(history.messages) == 1 + 2 * 9, "all that was said can still be saved"
    following = history.ask("j", window(len(whole.token_ids) + 3))
    assert (following.num_left_out, following.not_kept) == (5, "")
    assert following.token_ids[: len(prompt.token_ids)] == prompt.token_ids
    history.undo()
    assert history.num_left_out == 0


def test_a_question_keeps_its_place_where_nothing_older_is_left(tokenizer):
    history = ChatHistory(Template(), tokenizer)
    talk(history, tokenizer, "a")
    prompt = history.ask("q" * 20, window(30))
    assert prompt.num_left_out == 1
    assert len(prompt.token_ids) == 23
    # Less room for the answer than was asked for is better than no answer.
    assert history.ask("q" * 26, window(30)).num_left_out == 1


@pytest.mark.parametrize("is_shifting", [True, False])
@pytest.mark.parametrize(
    ("system", "words"), [(None, "the message alone makes"), ("s", "message and system prompt alone make")]
)
def test_a_message_that_is_too_long_by_itself_is_refused_without_a_false_remedy(tokenizer, is_shifting, system, words):
    history = ChatHistory(Template(), tokenizer, system)
    talk(history, tokenizer, "a")
    with pytest.raises(ConfigError, match=f"{words} a prompt of .* tokens, .* may have 30, which a test allows; shorten it$"):
        history.ask("q" * 40, window(30, is_shifting=is_shifting))
    assert history.num_turns == 1


def test_without_shifting_the_conversation_is_refused_once_nothing_fits(tokenizer):
    history = ChatHistory(Template(), tokenizer)
    talk(history, tokenizer, "a", "b")
    assert history.ask("c", window(21, is_shifting=False)).num_left_out == 0
    with pytest.raises(ConfigError, match=r"the conversation has 20 tokens, .* may have 20, .*; without --no-shift its oldest"):
        history.ask("c", window(20, is_shifting=False))
