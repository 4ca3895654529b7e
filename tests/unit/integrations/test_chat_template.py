"""Chat templates: where they are found, what a template of transformers may use, and that a hostile
one ends in a typed error, in its own process and within its limits.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest

pytest.importorskip("jinja2")

from dflash_moe.errors import CheckpointError, ConfigError, DflashError, UnsupportedError
from dflash_moe.integrations import limited_process, template_process
from dflash_moe.integrations.chat_template import (
    LEAST_TEXT_BYTES,
    ChatTemplate,
    TemplateRenderer,
    find_chat_template,
    most_text_bytes,
)
from dflash_moe.integrations.template_process import MAX_TEXT_BYTES

MESSAGES = [{"role": "user", "content": " Grüße "}]


def renderer(text: str) -> TemplateRenderer:
    return TemplateRenderer(ChatTemplate(text, "the template"), {"bos_token": "<s>", "eos_token": "</s>"})


def rendered(text: str, messages=MESSAGES, **variables) -> str:
    with renderer(text) as made:
        return made.render(messages, **variables)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m['content'] | trim }}{% endfor %}", "<s>user: Grüße"),
        ("  {% if true %}\n  a\n  {% endif %}\nb", "  a\nb"),
        ("{% if add_generation_prompt %}A:{% endif %}{{ tools is none }}", "A:True"),
        ("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "01"),
        ("{% for i in range(3) %}{% if i == 1 %}{% continue %}{% endif %}{{ i }}{% endfor %}", "02"),
        ("a{% generation %}b{% endgeneration %}c", "abc"),
        ("{{ {'b': '<é>', 'a': [1]} | tojson }}", '{"b": "<é>", "a": [1]}'),
        ("{{ {'b': 1, 'a': 2} | tojson(indent=1, sort_keys=true) }}", '{\n "a": 2,\n "b": 1\n}'),
        ("{{ strftime_now('%Y') | length }}", "4"),
        ("{% set n = namespace(a=1) %}{% for i in [1, 2] %}{% set n.a = n.a + i %}{% endfor %}{{ n.a }}", "4"),
        ("{% macro f(x) %}[{{ x }}]{% endmacro %}{{ f(messages[0].content.strip().split('ü')) }}", "[['Gr', 'ße']]"),
        ("{{ undefined_name }}{{ messages[0].nothing }}", ""),
    ],
)
def test_a_template_has_what_those_of_transformers_use(text, expected):
    assert rendered(text) == expected


def test_transformers_renders_the_same():
    tokenization = pytest.importorskip("transformers.utils.chat_template_utils")
    text = (
        "{%- if messages[0].role == 'system' %}\n    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}\n"
        "{%- endif %}\n{%- for m in messages %}\n    {%- if loop.first and m.role == 'system' %}{%- continue %}{%- endif %}\n"
        "    {{- '<|im_start|>' + m.role + '\\n' }}{% generation %}{{ m.content }}{% endgeneration %}{{ '<|im_end|>\\n' }}\n"
        "{%- endfor %}\n{%- if add_generation_prompt %}\n    {{- '<|im_start|>assistant\\n' }}\n{%- endif %}\n"
    )
    messages = [{"role": "system", "content": "Be\nbrief."}, {"role": "user", "content": " Hi "}]
    theirs, _ = tokenization.render_jinja_template([messages], chat_template=text, add_generation_prompt=True)
    assert rendered(text, messages) == theirs[0]


def test_a_conversation_that_the_template_refuses_is_bad_input():
    text = "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}fine"
    with renderer(text) as made:
        with pytest.raises(ConfigError, match="the template refuses this conversation: System role not supported; leave out"):
            made.render([{"role": "system", "content": "Be brief."}])
        assert made.render(MESSAGES) == "fine"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{% for a in b %}", "the template does not compile: line 1: Unexpected end of template"),
        ("a\n{% if %}", "does not compile: line 2:"),
        ("{% include '/etc/passwd' %}", "fails: line 1:"),
        ("{% import 'os' as os %}", "fails: line 1:"),
        ("a\nb{{ nobody.home.there }}", "fails: line 2: UndefinedError: 'nobody' is undefined"),
        ("{{ ''.__class__.__mro__ }}", "SecurityError: access to attribute '__class__' of 'str' object is unsafe"),
        ("{{ cycler.__init__.__globals__.os.popen('id').read() }}", "SecurityError"),
        ("{{ ('{0.__class__.__base__}').format(1).a.b }}", "fails"),
        ("{{ messages.append(1) }}", "SecurityError"),
        ("{{ messages[0].update(role='system') }}", "SecurityError"),
        ("{{ range(10 ** 9) | list }}", "Range too big"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
        ("{% block a %}{{ self.a() }}{% endblock %}", "RecursionError"),
        ("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "RecursionError"),
        (
            "{% set n = namespace(a=[]) %}{% for i in range(9999) %}{% set n.a = [n.a] %}{% endfor %}{{ n.a | tojson }}",
            "Recursion",
        ),
        ("{% for a in range(99999) %}{{ 'a' * 32 }}{% endfor %}", "was stopped: its text has more than 1,048,576 bytes"),
        ("{{ 'ü' * 600000 }}", "was stopped: its text has more than 1,048,576 bytes"),
        ("{{ ('x' * 10 ** 9) | length }}", "was stopped: rendering took over 256 MiB of memory"),
        ("{% set n = namespace(a='x') %}{% for i in range(60) %}{% set n.a = n.a + n.a %}{% endfor %}", "256 MiB"),
        ("{{ '%1000000000d' % 1 }}", "256 MiB"),
        ("{{ 'a'.ljust(10 ** 10) }}", "256 MiB"),
    ],
)
def test_a_broken_or_hostile_template_is_a_checkpoint_error(text, words):
    with renderer(text) as made:
        with pytest.raises(CheckpointError) as caught:
            made.render(MESSAGES)
        assert words in str(caught.value)
        assert str(caught.value).startswith("the template ")
        made.template = ChatTemplate("{{ messages | length }}", "another")
        assert made.render(MESSAGES) == "1"


@pytest.mark.parametrize(
    "text",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        # One operation in C, which no trace of Python code would ever see.
        "{{ (10 ** (10 ** 8)) | string }}",
    ],
)
def test_a_template_that_does_not_end_is_ended(text):
    with renderer(text) as made:
        with pytest.raises(CheckpointError, match="the template was stopped: rendering took over 1 s of processor time"):
            made.render(MESSAGES)
        assert made._process is None
        made.template = ChatTemplate("next", "another")
        assert made.render(MESSAGES) == "next"


def test_the_process_is_reused_and_ends_with_its_owner():
    made = renderer("{{ messages | length }}")
    made.render(MESSAGES)
    process = made._process._process
    made.render(MESSAGES * 2)
    assert made._process._process is process
    made.close()
    assert process.returncode is not None
    made.close()
    assert made.render(MESSAGES) == "1"
    made.close()


def test_the_process_inherits_no_descriptor_no_secret_and_no_right(monkeypatch):
    monkeypatch.setenv("SOME_TOKEN", "secret")
    ours = os.open(os.devnull, os.O_RDONLY)
    os.set_inheritable(ours, True)
    try:
        with renderer("a") as made:
            made.render(MESSAGES)
            place = f"/proc/{made._process._process.pid}"
            assert sorted(map(int, os.listdir(f"{place}/fd"))) == [0, 1, 2]
            with open(f"{place}/environ", encoding="utf-8") as stream:
                assert "SOME_TOKEN" not in stream.read()
            with open(f"{place}/limits", encoding="utf-8") as stream:
                limits = {line[:26].strip(): line[26:].split()[:2] for line in stream}
            assert limits["Max open files"] == ["0", "0"]
            assert limits["Max processes"] == ["0", "0"]
            assert limits["Max address space"] == [str(template_process.MEMORY_BYTES)] * 2
            pid = made._process._process.pid
            assert os.getpgid(pid) == pid
            # Niceness counts within a session alone. Python before 3.11 starts a new one.
            assert (os.getsid(pid) == os.getsid(0)) == (sys.version_info >= (3, 11))
    finally:
        os.close(ours)


def test_a_process_that_does_not_answer_is_given_up(monkeypatch):
    monkeypatch.setattr(limited_process, "PATIENCE_S", 0.3)
    with renderer("a") as made:
        made.render(MESSAGES)
        os.kill(made._process._process.pid, signal.SIGSTOP)
        with pytest.raises(CheckpointError, match="no answer came within 0.3 s"):
            made.render(MESSAGES)
        monkeypatch.undo()
        assert made.render(MESSAGES) == "a"


def test_an_interrupt_leaves_no_answer_for_the_next_one(monkeypatch):
    with renderer("{{ messages[0].content }}") as made:
        made.render(MESSAGES)

        def interrupted(*_arguments):
            raise KeyboardInterrupt

        monkeypatch.setattr(made._process, "_read_frame", interrupted)
        with pytest.raises(KeyboardInterrupt):
            made.render(MESSAGES)
        assert made.render([{"role": "user", "content": "second"}]) == "second"


def test_the_process_ends_when_its_parent_is_killed():
    program = (
        "import os, sys, time\n"
        "from dflash_moe.integrations.chat_template import ChatTemplate, TemplateRenderer\n"
        "made = TemplateRenderer(ChatTemplate('a', 'o'), {})\nmade.render([])\n"
        "print(made._process._process.pid, flush=True)\ntime.sleep(600)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    try:
        pid = int(parent.stdout.readline())
        assert _runs(pid)
    finally:
        parent.kill()
        parent.communicate(timeout=30)
    deadline = time.monotonic() + 30
    while _runs(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not _runs(pid)


def _runs(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8") as stream:
            return stream.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_threads_share_a_renderer():
    found: dict[int, str] = {}
    with renderer("{{ messages[0].content }}") as made:

        def run(number: int) -> None:
            found[number] = made.render([{"role": "user", "content": str(number)}])

        threads = [threading.Thread(target=run, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    assert found == {number: str(number) for number in range(8)}


def test_an_interpreter_that_does_not_start_is_an_error(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with pytest.raises(DflashError, match="cannot be started: No such file"):
        rendered("a")
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(DflashError, match="did not start"):
        rendered("a")


class Words:
    """A tokenizer of which only the vocabulary is asked for."""

    def __init__(self, *tokens: str) -> None:
        self._tokens = tokens

    def get_vocab(self) -> dict[str, int]:
        return {token: place for place, token in enumerate(self._tokens)}


@pytest.mark.parametrize(
    ("num_tokens", "longest", "expected"),
    [(1000, "abc", LEAST_TEXT_BYTES), (1 << 20, "abcü", 5 << 20), (1 << 20, "x" * 128, MAX_TEXT_BYTES)],
)
def test_a_text_may_be_as_long_as_the_context_needs_it_within_bounds(num_tokens, longest, expected):
    assert most_text_bytes(Words("a", longest, "b"), num_tokens) == expected


def test_the_longest_token_counts_of_a_bare_tokenizer_too():
    tokenizers = pytest.importorskip("tokenizers")
    bare = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "abcdefg": 1}, unk_token="a"))
    assert most_text_bytes(bare, 1 << 20) == 7 << 20


CONTENTS = "{% for m in messages %}{{ m.content }}{% endfor %}"


@pytest.mark.parametrize("letter", ["x", "ü", "日", "👩"])
def test_the_longest_text_of_all_has_memory_and_time(letter):
    count = MAX_TEXT_BYTES // len(letter.encode())
    with TemplateRenderer(ChatTemplate(CONTENTS, "it"), {}, max_text_bytes=MAX_TEXT_BYTES) as made:
        text = made.render([{"role": "user", "content": letter * count}])
    assert (len(text), set(text)) == (count, {letter})


def test_a_conversation_beyond_the_limit_is_bad_input_and_the_process_goes_on():
    long = [{"role": "user", "content": "x" * 1000}] * 1000
    with renderer(CONTENTS) as made:
        assert len(made.render(long)) == 1_000_000
        with pytest.raises(ConfigError, match=r"the conversation is too long: .* more than 1,048,576 bytes"):
            made.render(long + long)
        made.max_text_bytes = 2_000_000
        assert len(made.render(long + long)) == 2_000_000


def test_memory_of_the_parent_is_not_limited():
    rendered("a")
    assert resource.getrlimit(resource.RLIMIT_AS)[0] != template_process.MEMORY_BYTES


# -- where templates are found ---------------------------------------------------------------------


def test_of_several_templates_the_default_one_is_taken(tmp_path):
    tokenizer = SimpleNamespace(chat_template={"tool_use": "a", "default": "b"})
    assert find_chat_template(tmp_path, tokenizer).text == "b"
    tokenizer = SimpleNamespace(chat_template={"tool_use": "a", "rag": "b"})
    with pytest.raises(UnsupportedError, match=r"templates \(tool_use, rag\) none is named default"):
        find_chat_template(tmp_path, tokenizer)


@pytest.mark.parametrize("found", [None, ""])
def test_a_model_without_a_template_is_refused(tmp_path, found):
    with pytest.raises(UnsupportedError, match="has no chat template.*`dflash-moe generate`"):
        find_chat_template(tmp_path, SimpleNamespace(chat_template=found))


def test_what_is_no_text_is_no_template(tmp_path):
    with pytest.raises(CheckpointError, match=r"found \['a'\], expected a text"):
        find_chat_template(tmp_path, SimpleNamespace(chat_template=["a"]))


def test_a_gguf_file_has_its_template_in_the_metadata(tmp_path):
    gguf = pytest.importorskip("gguf")
    writer = gguf.GGUFWriter(str(tmp_path / "m.gguf"), "qwen3moe")
    writer.add_chat_template([{"name": "default", "template": "{{ 1 }}"}, {"name": "tool_use", "template": "{{ 2 }}"}])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    found = find_chat_template(tmp_path / "m.gguf", None)
    assert found.text == "{{ 1 }}"
    assert found.origin == f"tokenizer.chat_template of {tmp_path / 'm.gguf'}"
