"""What is typed at a chat: which words are commands and which are said to the model, and what each
command does to the conversation.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import json

import pytest

pytest.importorskip("torch")

from dflash_moe.cli.chat.commands import COMMANDS, obey
from dflash_moe.cli.chat.session import ChatSession
from dflash_moe.engine.chat_history import ChatHistory
from dflash_moe.engine.prompt_check import LengthLimit
from dflash_moe.engine.sampling.sampling_params import SamplingParams
from dflash_moe.engine.text import Chunk
from dflash_moe.errors import ConfigError, WorkerLost


class Tokenizer:
    """A token for each byte."""

    is_fast = False

    def __call__(self, text, **_options):
        return {"input_ids": list(text.encode())}

    def decode(self, token_ids, **_options):
        return bytes(token_ids).decode("utf-8", "replace")

    def get_vocab(self):
        return {}


class Template:
    def __init__(self):
        self.takes_system = True

    def render(self, messages):
        if messages[0]["role"] == "system" and not self.takes_system:
            raise ConfigError("the template refuses this conversation: no system")
        return "".join(f"[{message['role'][0]}]{message['content']}" for message in messages) + "[a]"


class Model:
    """In the place of an `LLM`: answers "1", "2" and so on, or does what `next` says."""

    def __init__(self, limit: int = 4096):
        self.tokenizer, self.engine = Tokenizer(), self
        self.length_limit = LengthLimit(limit, "for which there is room")
        self.prompts: list[str] = []
        self.params: list[SamplingParams] = []
        self.error: BaseException | None = None
        self.chunks_before_it = 0

    def room(self, num_prompt):
        return self.length_limit.num_tokens - num_prompt

    def stats(self):
        return {"cached_tokens": 0}

    def stream(self, token_ids, params):
        self.prompts.append(bytes(token_ids).decode())
        self.params.append(params)
        error, self.error = self.error, None
        for _ in range(self.chunks_before_it if error else 0):
            yield Chunk("half", tuple(b"half"))
        if error is not None:
            raise error
        text = str(len(self.prompts))
        yield Chunk(text, tuple(text.encode()), finish_reason="stop")


@pytest.fixture
def model():
    return Model()


@pytest.fixture
def session(model):
    return begun(model)


def begun(model, **options) -> ChatSession:
    params = SamplingParams(temperature=0.7, max_tokens=50, seed=5)
    return ChatSession(model, ChatHistory(Template(), model.tokenizer), params, **options)


def typed(session, *texts) -> None:
    for text in texts:
        assert obey(session, text), text


def said(session) -> list[str]:
    return [message["content"] for message in session.history.messages]


# -- commands and messages -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "hello", "/etc/passwd", "/etc/passwd what is it", "/usr is full, why?", "//reset", "/Reset", "/3", "a\n/quit",
        '"""/quit"""', '"""\n/reset\n"""',
    ],
)  # fmt: skip
def test_what_is_no_command_is_said_to_the_model(session, model, text):
    typed(session, text)
    expected = text.removeprefix('"""').removesuffix('"""').strip("\n")
    assert model.prompts == [f"[u]{expected}[a]"]


def test_nothing_typed_asks_nothing(session, model):
    typed(session, "", "  \n ", '""" """', '""""""')
    assert model.prompts == []


def test_a_block_in_quotes_keeps_its_lines_and_indents(session, model):
    typed(session, '"""\n  if a:\n    b\\\n"""')
    assert model.prompts == ["[u]  if a:\n    b\\[a]"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("/rest", "/rest is no command; did you mean '/reset'?; /help lists them"),
        ("/xyzzy", "/xyzzy is no command; /help lists them"),
        ("/sytem Be brief.", "/sytem is no command; did you mean '/system'?"),
        ("/reset now", '/reset takes nothing behind it; """/reset now""" says it to the model'),
        ("/file", "/file PATH: PATH is missing; it puts a file before the next question"),
        ("/save", "/save FILE: FILE is missing"),
        ("/retry", "/retry: nothing was asked yet"),
        ("/undo", "/undo: there is no question to forget"),
        ("/set warmth 1", "/set 'warmth': no such option; there are max_tokens, temperature, top_p, top_k, min_p, seed, stop"),
        ("/set temprature 1", "no such option; did you mean 'temperature'?"),
        ("/set temperature warm", "/set temperature='warm' is not allowed; allowed: a number 0..10000"),
        ("/set temperature=-1", r"/set temperature=-1.0 is not allowed; allowed: 0..10000"),
        ("/set top-k 1.5", "/set top_k='1.5' is not allowed; allowed: an integer"),
        ("/set top_p nan", "/set top_p='nan' is not allowed"),
        ("/set seed " + "9" * 5000, "/set seed="),
    ],
)
def test_a_command_that_cannot_be_done_says_so_in_a_sentence(session, model, text, words):
    before = session.params
    with pytest.raises(ConfigError) as refused:
        obey(session, text)
    assert words in str(refused.value)
    assert len(str(refused.value)) < 250
    assert "\n" not in str(refused.value)
    assert (model.prompts, session.params) == ([], before)


def test_quit_leaves_and_help_lists_every_command(session, capsys):
    assert not obey(session, " /quit ")
    typed(session, "/help")
    err = capsys.readouterr().err
    assert all(f"\n{name} " in f"\n{err}" for name in COMMANDS)
    assert "Alt-Enter" in err
    assert max(map(len, err.splitlines())) <= 100


# -- turns -----------------------------------------------------------------------------------------


def test_retry_asks_again_with_another_seed_and_replaces_the_answer(session, model):
    typed(session, "a", "b", "/retry", "/retry")
    assert said(session) == ["a", "1", "b", "4"]
    assert model.prompts[1] == model.prompts[2] == model.prompts[3] == "[u]a[a]1[u]b[a]"
    assert [params.seed for params in model.params] == [5, 5, 6, 7]
    typed(session, "c")
    assert model.params[-1].seed == 5


def test_retry_at_temperature_0_says_that_nothing_will_change(session, capsys):
    typed(session, "/set temperature 0", "a", "/retry")
    assert "at temperature 0 the same question has the same answer" in capsys.readouterr().err


def test_a_retry_that_brings_nothing_leaves_the_former_answer(session, model, capsys):
    typed(session, "a")
    for error in (KeyboardInterrupt(), WorkerLost("worker w0 is lost")):
        model.error = error
        if isinstance(error, KeyboardInterrupt):
            typed(session, "/retry")
        else:
            with pytest.raises(WorkerLost):
                obey(session, "/retry")
        assert said(session) == ["a", "1"]
    assert "stopped before the first token" in capsys.readouterr().err
    typed(session, "/undo")
    assert said(session) == []


def test_a_question_without_an_answer_is_asked_again_by_retry(session, model):
    typed(session, "a")
    model.error = WorkerLost("worker w0 is lost")
    with pytest.raises(WorkerLost):
        obey(session, "b")
    assert said(session) == ["a", "1"]
    typed(session, "/retry")
    assert said(session) == ["a", "1", "b", "3"]


def test_an_answer_that_was_stopped_stays_as_far_as_it_came(session, model, capsys):
    model.error, model.chunks_before_it = KeyboardInterrupt(), 2
    typed(session, "a")
    assert said(session) == ["a", "halfhalf"]
    assert capsys.readouterr().err == "stopped\n"


def test_undo_forgets_the_latest_turn(session, model, capsys):
    typed(session, "a", "b " * 60, "/undo")
    assert said(session) == ["a", "1"]
    assert capsys.readouterr().err == f"forgotten: {('b ' * 60)[:57]}...\n"
    typed(session, "c")
    assert model.prompts[-1] == "[u]a[a]1[u]c[a]"


def test_the_system_prompt_is_said_changed_and_taken_away(session, model, capsys):
    typed(session, "/system", "/system Be brief.", "/system", "a", '/system ""', "b")
    assert model.prompts == ["[s]Be brief.[u]a[a]", "[u]a[a]1[u]b[a]"]
    err = capsys.readouterr().err
    assert "there is no system prompt\n" in err
    assert "system prompt: Be brief.\n" in err


def test_a_template_that_takes_no_system_prompt_leaves_all_as_it_was(model):
    session = begun(model)
    session.history._renderer.takes_system = False
    with pytest.raises(ConfigError, match="no system"):
        obey(session, "/system Be brief.")
    assert session.history.system is None


@pytest.mark.parametrize(
    ("text", "name", "value"),
    [
        ("/set temperature 1.5", "temperature", 1.5),
        ("/set temperature=1e-1", "temperature", 0.1),
        ("/set --top-p 0.5", "top_p", 0.5),
        ("/set top_k 3", "top_k", 3),
        ("/set max-tokens 7", "max_tokens", 7),
        ("/set min_p 0.25", "min_p", 0.25),
        ("/set SEED 9", "seed", 9),
        ("/set stop the end", "stop", ("the end",)),
        ('/set stop ""', "stop", ()),
    ],
)
def test_set_changes_how_the_next_answer_is_sampled(session, model, text, name, value):
    typed(session, text, "a")
    assert getattr(model.params[-1], name) == value


def test_set_alone_lists_what_holds(session, capsys):
    typed(session, "/set", "/set top_p")
    err = capsys.readouterr().err
    assert "temperature  0.7\n" in err
    assert err.endswith("top_p is 1.0\n")


# -- files -----------------------------------------------------------------------------------------


def test_files_come_before_the_next_question_and_only_that(session, model, tmp_path, capsys):
    (tmp_path / "one.txt").write_text("1st\n")
    (tmp_path / "two.txt").write_bytes(b"caf\xe9")
    typed(session, f"/file {tmp_path}/one.txt", f'/file "{tmp_path}/two.txt"', "which?", "and?")
    question = "one.txt:\n\n1st\n\n\ntwo.txt:\n\ncaf\ufffd\n\nwhich?"
    assert model.prompts == [f"[u]{question}[a]", f"[u]{question}[a]1[u]and?[a]"]
    err = capsys.readouterr().err
    assert "one.txt: 4 characters, which come before your next question" in err
    assert "two.txt: not UTF-8 text in one place" in err


def test_a_conversation_is_saved_and_goes_on_elsewhere(session, model, tmp_path, capsys):
    path = tmp_path / "talk.json"
    with pytest.raises(ConfigError, match="/save: nothing was said yet"):
        obey(session, f"/save {path}")
    typed(session, "/system Be brief.", "a", f"/save {path}")
    other = begun(model)
    (tmp_path / "x").write_text("never asked")
    typed(other, "gone", f"/file {tmp_path}/x", f"/load {path}", "b")
    assert model.prompts[-1] == "[s]Be brief.[u]a[a]1[u]b[a]"
    assert "loaded: 1 turn, and the system prompt" in capsys.readouterr().err


def test_what_cannot_be_loaded_leaves_the_conversation(session, model, tmp_path):
    typed(session, "a")
    path = tmp_path / "talk.json"
    path.write_text(
        json.dumps({"format": "dflash-moe conversation", "version": 1, "messages": [{"role": "user", "content": "x"}]})
    )
    with pytest.raises(ConfigError, match=r"talk.json: message 1, the last one, is of user: each question needs an answer"):
        obey(session, f"/load {path}")
    session.history._renderer.takes_system = False
    path.write_text(
        json.dumps({"format": "dflash-moe conversation", "version": 1, "messages": [{"role": "system", "content": "x"}]})
    )
    with pytest.raises(ConfigError, match=r"talk.json: the template refuses"):
        obey(session, f"/load {path}")
    assert said(session) == ["a", "1"]


# -- plan, stats, reset, the context ---------------------------------------------------------------


def test_plan_says_again_what_was_said_at_the_start(model, capsys):
    typed(begun(model, plan=["one line", "another"]), "/plan")
    assert capsys.readouterr().err == "one line\nanother\n"
    typed(begun(model), "/plan")
    assert capsys.readouterr().err == "nothing was planned: the topology says where the model lies\n"


def test_stats_and_reset(session, model, capsys):
    typed(session, "/stats", "a", "/stats", "/reset", "b")
    err = capsys.readouterr().err
    assert "conversation: 0 turns, 0 tokens\n" in err
    assert "conversation: 1 turn, 8 tokens\n" in err
    assert "latest answer: 1 token, time to first token" in err
    assert model.prompts[-1] == "[u]b[a]"


def test_the_oldest_turns_are_left_out_and_that_is_said_once(capsys):
    session = begun(Model(limit=60))
    for number in range(12):
        typed(session, f"question {number}")
    typed(session, "/undo", "again", "/retry")
    assert capsys.readouterr().err.count("the oldest turns are left out") == 1
    typed(session, "/reset", *(f"question {number}" for number in range(12)))
    assert capsys.readouterr().err.count("the oldest turns are left out") == 1


def test_without_shifting_what_exceeds_the_context_is_refused():
    session = begun(Model(limit=60), is_shifting=False)
    with pytest.raises(ConfigError, match="without --no-shift its oldest turns are left out"):
        typed(session, *(f"question {number}" for number in range(12)))


def test_a_message_that_is_too_long_alone_says_how_long_it_may_be():
    session = begun(Model(limit=60))
    with pytest.raises(ConfigError, match=r"the message alone makes a prompt of 206 tokens.*may have 60, .*; shorten it$"):
        typed(session, "a", "x" * 200)
