"""Conversations as prompts: messages are checked, rendered by the checkpoint's own template in its
limited process, and tokenised. A conversation is told from other prompts here too.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dflash_moe.errors import ConfigError, RequestCancelled, shown
from dflash_moe.integrations.chat_template import TemplateRenderer, find_chat_template, most_text_bytes, special_tokens
from dflash_moe.integrations.tokenizer import encode_with_ends

Message = Mapping[str, Any]


def is_conversation(prompt: Any) -> bool:
    """Says whether a prompt is a list of messages."""
    return isinstance(prompt, Sequence) and bool(prompt) and all(isinstance(one, Mapping) for one in prompt)


def conversations(messages: Sequence[Message] | Sequence[Sequence[Message]]) -> list[Sequence[Message]]:
    """Returns a list of conversations for one or several. Raises ConfigError for anything else."""
    if is_conversation(messages):
        return [messages]  # type: ignore[list-item]
    found: list[Any] = list(messages) if isinstance(messages, Sequence) and not isinstance(messages, str | bytes) else []
    wrong = next((one for one in found if not is_conversation(one)), None)
    if not found or wrong is not None:
        raise ConfigError(
            f"messages {shown(messages if wrong is None else wrong)}: expected a list of messages such as "
            '[{"role": "user", "content": "Hello"}], or several of them'
        )
    return found


class ChatPrompts:
    """Makes prompts of conversations by the chat template of one model. Any thread may call. With
    the first conversation the template is looked for, and the process that renders it is started;
    `close` ends that process.
    """

    def __init__(self, path: Path, max_tokens: int) -> None:
        """`path` is the model's, whose requests have at most `max_tokens` tokens."""
        self._path, self._max_tokens = path, max_tokens
        self._renderer: TemplateRenderer | None = None
        self._is_closed = False
        self._lock = threading.Lock()

    def token_ids(self, tokenizer: Any, messages: Sequence[Message], variables: Mapping[str, Any] | None = None) -> list[int]:
        """Returns the ids of a conversation and of what begins the next answer. `variables` are
        further ones of the template.

        Errors: ConfigError for messages that are none or that the template refuses,
        UnsupportedError for a model without a template, CheckpointError for one that fails.
        """
        given, variables = conversation(messages, variables or {})
        return encode_with_ends(tokenizer, self._renderer_of(tokenizer).render(given, **variables))[0]

    def _renderer_of(self, tokenizer: Any) -> TemplateRenderer:
        with self._lock:
            if self._is_closed:
                raise RequestCancelled("the engine is closed; open another one")
            if self._renderer is None:
                template = find_chat_template(self._path, tokenizer)
                most = most_text_bytes(tokenizer, self._max_tokens)
                self._renderer = TemplateRenderer(template, special_tokens(tokenizer), max_text_bytes=most)
            return self._renderer

    def close(self) -> None:
        """Ends the process. It may be called twice."""
        with self._lock:
            self._is_closed = True
            renderer, self._renderer = self._renderer, None
        if renderer is not None:
            renderer.close()


def conversation(messages: Sequence[Message], variables: Mapping[str, Any]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Returns messages as templates expect them, and copies of further variables. Raises
    ConfigError for what no template can be given.
    """
    given = [_message(place, message) for place, message in enumerate(messages, start=1)]
    variables = dict(variables)
    try:
        json.dumps([given, variables])
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"the conversation holds something that no template can be given: {error}; pass texts, numbers, lists and "
            "dictionaries with texts as keys"
        ) from None
    taken = sorted({"messages", "template", "self"} & variables.keys())
    if taken:
        raise ConfigError(f"chat_template_kwargs: {taken[0]} is not allowed; it is given otherwise")
    return given, variables


def _message(place: int, message: Message) -> dict[str, Any]:
    """Returns a message as templates expect it: its content as one text, where it has parts."""
    found = dict(message)
    role = found.get("role")
    if not isinstance(role, str) or not role:
        raise ConfigError(f'message {place}: role {shown(role)}, expected a text such as "user"')
    content = found.get("content")
    if isinstance(content, Sequence) and not isinstance(content, str | bytes):
        found["content"] = "\n".join(_part(place, part) for part in content)
    elif not (content is None or isinstance(content, str)):
        raise ConfigError(f"message {place}: content {shown(content)}, expected a text")
    elif content is None and role in ("system", "user"):
        raise ConfigError(f"message {place}, of {role}, has no content; expected a text")
    return found


def _part(place: int, part: Any) -> str:
    text = part.get("text") if isinstance(part, Mapping) and part.get("type") == "text" else None
    if not isinstance(text, str):
        raise ConfigError(
            f'message {place}: a part of its content is {shown(part)}; only {{"type": "text", "text": ...}} is read'
        )
    return text
