"""The chat template of a checkpoint: where it is found, and the process that renders it with limits
of time, memory and output.

A template is a program by whoever made the model. It runs in jinja2's sandbox, in a process that
can open nothing (template_process.py). That process is started once, used for every rendering and
replaced when it had to be killed.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_moe.errors import CheckpointError, ConfigError, DflashError, UnsupportedError, printable, shown
from dflash_moe.integrations import template_process
from dflash_moe.integrations.limited_process import Ended, LimitedProcess
from dflash_moe.integrations.template_process import MAX_TEXT_BYTES, MEMORY_BYTES, RENDER_S
from dflash_moe.model.checkpoint_files import find_gguf
from dflash_moe.model.formats.gguf_header import read_gguf_header

GGUF_KEY = "tokenizer.chat_template"
# Of several templates, the one with this name is meant where nobody chose.
DEFAULT = "default"
TOOL_USE = "tool_use"
# So much text is taken of any model, so that a conversation that is a little too long for a small
# one is counted in tokens, which says more.
LEAST_TEXT_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class ChatTemplate:
    """A template's text and where it was found, for messages."""

    text: str
    origin: str


def find_chat_template(path: Path, tokenizer: Any) -> ChatTemplate:
    """Returns the template of the checkpoint at `path`, whose tokenizer was loaded: that of a GGUF
    file's metadata, or what transformers found beside the tokenizer. Of several, the default one.

    Raises UnsupportedError where there is none, CheckpointError for something else in its place.
    """
    parts = find_gguf(path)
    if parts:
        found: Any = read_gguf_header(parts[0], 0).metadata.get(GGUF_KEY)
        origin = f"{GGUF_KEY} of {parts[0]}"
    else:
        found, origin = getattr(tokenizer, "chat_template", None), f"the chat template of {path}"
    if isinstance(found, Mapping):
        if DEFAULT not in found:
            names = ", ".join(map(str, found)) or "none"
            raise UnsupportedError(f"{origin}: of its templates ({names}) none is named {DEFAULT}, which a conversation takes")
        found = found[DEFAULT]
    if found is None or found == "":
        raise UnsupportedError(
            f"{path}: the model has no chat template, so it was not made for conversations; "
            "use `dflash-moe generate`, or a checkpoint of its instruct variant"
        )
    if not isinstance(found, str):
        raise CheckpointError(f"{origin}: found {shown(found)}, expected a text")
    return ChatTemplate(found, origin)


def find_tool_template(path: Path, tokenizer: Any) -> ChatTemplate | None:
    """Returns the template for conversations with tools, of a checkpoint that has another one for
    them.
    """
    parts = find_gguf(path)
    if parts:
        found: Any = read_gguf_header(parts[0], 0).metadata.get(f"{GGUF_KEY}.{TOOL_USE}")
    else:
        templates = getattr(tokenizer, "chat_template", None)
        found = templates.get(TOOL_USE) if isinstance(templates, Mapping) else None
    return ChatTemplate(found, f"the chat template {TOOL_USE} of {path}") if isinstance(found, str) and found else None


def special_tokens(tokenizer: Any) -> dict[str, str]:
    """Returns the tokens that templates name, such as `bos_token`, as texts by name."""
    return {name: str(token) for name, token in tokenizer.special_tokens_map.items() if not isinstance(token, list | tuple)}


def most_text_bytes(tokenizer: Any, num_tokens: int) -> int:
    """Returns how many bytes of UTF-8 a text may have of which a tokenizer makes `num_tokens`
    tokens and drops nothing: each is as long as the longest in its vocabulary, where none is spelt
    with fewer bytes than it stands for. At least it is LEAST_TEXT_BYTES, and at most what the
    process that renders has memory for. The tokenizer is one of transformers or a bare
    `tokenizers.Tokenizer`.
    """
    longest = max((len(token.encode("utf-8", "surrogatepass")) for token in tokenizer.get_vocab()), default=1)
    return min(max(num_tokens * longest, LEAST_TEXT_BYTES), MAX_TEXT_BYTES)


class TemplateRenderer:
    """Renders one template. Any thread may call; one rendering runs at a time. It owns a child
    process; close it, or use it as a context manager.

    `max_text_bytes` bounds a conversation's text, as `most_text_bytes` has it of the model's
    context.
    """

    def __init__(
        self, template: ChatTemplate, special_tokens: Mapping[str, str], *, max_text_bytes: int = LEAST_TEXT_BYTES
    ) -> None:
        """`special_tokens` are variables of the template by name, such as `bos_token`."""
        self.template = template
        self.max_text_bytes = max_text_bytes
        self._special_tokens = dict(special_tokens)
        self._process: LimitedProcess | None = None
        self._lock = threading.Lock()

    def render(self, messages: Sequence[Mapping[str, Any]], **variables: Any) -> str:
        """Returns the text of a conversation, with what begins the next answer after it. A message
        has `role` and `content`; `variables` are further ones of the template, of JSON's types.

        Errors: CheckpointError naming the template for one that does not compile, fails, or passes
        a limit; ConfigError where it refuses these messages, or they are longer than its text may
        be.
        """
        max_text_bytes = self.max_text_bytes
        wanted = {
            **self._special_tokens, "tools": None, "documents": None, "add_generation_prompt": True, **variables,
            "messages": list(messages),
        }  # fmt: skip
        request = json.dumps({"template": self.template.text, "variables": wanted, "max_text_bytes": max_text_bytes}).encode(
            "ascii"
        )
        with self._lock:
            if self._process is None:
                self._process = _started()
            try:
                # JSON in ASCII spells a byte of text with at most six; an error is shorter than the
                # rest.
                answer = _read(self._process.ask(request, 6 * max_text_bytes + (1 << 16), _text_limit(max_text_bytes)))
            except Ended as end:
                self._end()
                raise self._passed(end.limit) from None
            except BaseException:
                # An interrupt leaves a rendering behind, whose answer must not become the next one.
                self._end()
                raise
        if answer.get("error") == template_process.OUTPUT and len(request) > max_text_bytes:
            raise ConfigError(
                f"the conversation is too long: it and its template have more than {max_text_bytes:,} bytes, and the model's "
                "context takes no more; begin a new one, or leave out its oldest turns"
            )
        return self._text_of(answer, max_text_bytes)

    def close(self) -> None:
        """Ends the process. It may be called twice; a later rendering starts another."""
        with self._lock:
            self._end()

    def _end(self) -> None:
        if self._process is not None:
            self._process.close()
            self._process = None

    def _text_of(self, answer: Mapping[str, Any], max_text_bytes: int) -> str:
        kind = answer.get("error")
        if kind is None:
            return str(answer.get("text", ""))
        message = printable(" ".join(str(answer.get("message", "")).split()))
        origin, line = self.template.origin, answer.get("line")
        at = f"line {line}: " if line else ""
        if kind == template_process.REFUSED:
            raise ConfigError(
                f"{origin} refuses this conversation: {message}; "
                "leave out what it names, such as the system prompt, or begin a new conversation"
            )
        if kind == template_process.SYNTAX:
            raise CheckpointError(f"{origin} does not compile: {at}{message}; download it again, or ask its maker for a fix")
        if kind == template_process.FAILED:
            raise CheckpointError(f"{origin} fails: {at}{message}; download it again, or ask its maker for a fix")
        limits = {template_process.MEMORY: _MEMORY_LIMIT, template_process.OUTPUT: _text_limit(max_text_bytes)}
        raise self._passed(limits.get(kind, _NO_ANSWER))

    def _passed(self, limit: str) -> CheckpointError:
        return CheckpointError(
            f"{self.template.origin} was stopped: {limit}; begin a new conversation if this one is long, "
            "and otherwise do not trust the file: use another copy of the model, or `dflash-moe generate`"
        )

    def __enter__(self) -> TemplateRenderer:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()


def _started() -> LimitedProcess:
    program = [str(Path(template_process.__file__).resolve())]
    try:
        return LimitedProcess(program, time_limit=_TIME_LIMIT, memory_limit=_MEMORY_LIMIT)
    except OSError as error:
        raise DflashError(f"the process that renders chat templates cannot be started: {error.strerror}") from None
    except Ended:
        raise DflashError(
            f"the process that renders chat templates did not start ({sys.executable}); is jinja2 installed? "
            "`pip install jinja2`"
        ) from None


def _read(answer: bytes) -> dict[str, Any]:
    try:
        found = json.loads(answer)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict) or not (found.keys() & {"text", "error"}):
        raise Ended(_NO_ANSWER)
    return found


_NO_ANSWER = "its process answered what it never should"
_TIME_LIMIT = f"rendering took over {RENDER_S:g} s of processor time"
_MEMORY_LIMIT = f"rendering took over {MEMORY_BYTES >> 20} MiB of memory"


def _text_limit(max_text_bytes: int) -> str:
    return f"its text has more than {max_text_bytes:,} bytes"
