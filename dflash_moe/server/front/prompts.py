"""Makes token ids of what a request asks with: texts, conversations, or ids. What takes long runs
in threads that give way to everything else on the machine.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from dflash_moe.engine.chat_prompts import conversation
from dflash_moe.engine.seen_text import seen_with
from dflash_moe.errors import DflashError, UnsupportedError
from dflash_moe.integrations.chat_template import ChatTemplate, TemplateRenderer
from dflash_moe.integrations.tokenizer import decode, encode_with_ends
from dflash_moe.integrations.tokenizer import encode as encode_text
from dflash_moe.server.front import api_error, frames
from dflash_moe.server.front.api_error import ApiError, brief
from dflash_moe.server.front.call_forms import ChatForm, chat_form
from dflash_moe.server.front.remembered import RememberedAnswers
from dflash_moe.server.front.text_threads import TextThreads
from dflash_moe.server.front.tokens import FrontTokenizer

# A text of so many characters is tokenised in about 5 ms, which may delay other requests' tokens.
# Longer ones go to a thread.
INLINE_CHARACTERS = 4096
# A longer text is judged by its beginning, of so many characters for each token that the context
# has, and some more: no prompt takes seconds to be refused.
_CHARACTERS_PER_TOKEN = 16
_MORE_CHARACTERS = 1 << 16
MAX_PROMPTS = 256

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Conversation:
    """A conversation as ids, and as the text that the template made of it."""

    token_ids: list[int]
    text: str


class Prompts:
    """The prompts of one model. It owns threads and the process that renders templates, as long as
    this process lives.
    """

    def __init__(self, facts: Mapping[str, Any]) -> None:
        """`facts` are those of `server.model_facts`."""
        self.tokenizer = FrontTokenizer(facts["tokenizer"])
        self.max_model_len: int = facts["max_model_len"]
        self.vocab_size: int = facts["vocab_size"]
        self._remembered = RememberedAnswers()
        self._no_template: str = facts["no_template"]
        template = ChatTemplate(facts["template"], facts["template_origin"])
        self.form = chat_form(facts["chat_form"])
        self._renderer = TemplateRenderer(template, facts["special_tokens"], max_text_bytes=facts["max_text_bytes"])
        # Some models have another template for conversations with tools.
        self._tool_renderer = self._renderer
        if facts["tool_template"]:
            template = ChatTemplate(facts["tool_template"], facts["template_origin"])
            self._tool_renderer = TemplateRenderer(template, facts["special_tokens"], max_text_bytes=facts["max_text_bytes"])
        self._threads = TextThreads()

    async def of_field(self, prompt: object, *, add_special_tokens: bool = True) -> list[list[int]]:
        """Returns the ids of the field `prompt`: a text, ids, or a list of texts or of lists of
        ids. Raises ApiError for anything else.
        """
        num_ids = 0
        if isinstance(prompt, list):
            # Before anything looks at all of them.
            for one in (prompt, *prompt[: MAX_PROMPTS + 1]):
                if isinstance(one, list) and len(one) > self.max_model_len and isinstance(one[0], int):
                    raise self._too_long(str(len(one)), str(len(one) + 1), 1)
                num_ids += len(one) if isinstance(one, list) else 0
        # Many ids are looked at in a thread.
        listed = await self._run(num_ids, lambda: self._listed(prompt), "prompt")
        found = []
        size = sum(len(one) for one in listed)
        for one in listed:
            if isinstance(one, str):
                found.append(await self.of_text(one, add_special_tokens=add_special_tokens, size=size))
            else:
                found.append(one)
            if not found[-1]:
                raise ApiError(400, "prompt: it has no tokens; at least 1 is needed", param="prompt")
        return found

    def _listed(self, prompt: object) -> list[str | list[int]]:
        """Returns texts and lists of ids that the model has. Raises ApiError and ConfigError for
        anything else.
        """
        listed = [prompt] if _is_one(prompt) else prompt
        if isinstance(listed, list) and len(listed) > MAX_PROMPTS:
            raise ApiError(400, f"prompt: {len(listed)} prompts in one request; allowed: at most {MAX_PROMPTS}", param="prompt")
        if not isinstance(listed, list) or not listed or not all(map(_is_one, listed)):
            text = f"prompt {brief(prompt)}: expected a text, a list of token ids, or a list of these, at least one"
            raise ApiError(400, text, param="prompt")
        for one in listed:
            if not isinstance(one, str):
                self.tokenizer.check(one, self.vocab_size)
        return listed

    async def of_text(
        self, text: str, *, add_special_tokens: bool = True, param: str = "prompt", has_limit: bool = True,
        size: int = 0,
    ) -> list[int]:  # fmt: skip
        """Returns the ids of a text, which is one of several that have `size` characters. Raises
        ApiError for one that is no Unicode, and where it is to be a prompt for one that is far too
        long.
        """

        def encoded(part: str) -> list[int]:
            if add_special_tokens:
                return encode_text(self.tokenizer, part)
            return encode_with_ends(self.tokenizer, part)[0]

        whole = self._encoded if has_limit else lambda text, encoded: encoded(text)
        return await self._run(max(size, len(text)), lambda: whole(text, encoded), param)

    async def of_messages(
        self, messages: object, variables: Mapping[str, Any], *, salt: bytes = b"", is_fresh: bool = True
    ) -> Conversation:
        """Returns a conversation with what begins the next answer. Where it goes on from an answer
        that this key got, its ids begin with the same ones, unless it is to be tokenised afresh.
        Raises ApiError for what is no conversation, or what the template refuses.
        """
        if self._no_template:
            # The reason names a file of this machine; the server says it when it starts.
            text = "this model takes no conversations, for want of a chat template; /v1/completions completes texts"
            raise ApiError(400, text, param="messages", code="no_chat_template")
        if not isinstance(messages, list) or not messages or not all(isinstance(one, dict) for one in messages):
            text = f'messages {brief(messages)}: expected a list such as [{{"role": "user", "content": "Hello"}}]'
            raise ApiError(400, text, param="messages")

        def rendered() -> str:
            given, more = conversation(messages, variables)
            contents = sum(len(one["content"]) for one in given if isinstance(one.get("content"), str))
            if contents > self._renderer.max_text_bytes:
                # No token is long enough for fewer of them.
                raise self._too_long(f"at least {self.max_model_len + 1}", f"at least {self.max_model_len + 2}", 1)
            return (self._tool_renderer if more.get("tools") else self._renderer).render(given, **more)

        # Always in a thread: the process that renders is waited for.
        text = await self._run(INLINE_CHARACTERS + 1, rendered, "messages")
        seen = None if is_fresh else self._remembered.find(salt, text)

        def encoded(part: str) -> list[int]:
            if seen is not None and part is text:
                return seen.continued(self.tokenizer, part)[0]
            return encode_with_ends(self.tokenizer, part)[0]

        token_ids = await self._run(len(text), lambda: self._encoded(text, encoded), "messages")
        if not token_ids:
            raise ApiError(400, "messages: the template makes a prompt without tokens of them", param="messages")
        return Conversation(token_ids, text)

    def form_for(self, schemas: Mapping[str, Any]) -> ChatForm:
        """Returns how answers are read of a conversation with these tools."""
        return self.form if schemas or self.form.is_harmony else dataclasses.replace(self.form, calls=None)

    def remember(self, salt: bytes, asked: Conversation, answer_ids: Sequence[int]) -> None:
        """Notes an answer as the model wrote it, for the next turn."""
        self._remembered.add(salt, seen_with(self.tokenizer, asked.token_ids, asked.text, answer_ids))

    async def text_of(self, token_ids: object, param: str) -> str:
        """Returns the text of ids, special tokens included. Raises ApiError for what is no list of
        ids.
        """
        if not isinstance(token_ids, list):
            raise ApiError(400, f"{param} {brief(token_ids)}: expected a list of token ids", param=param)

        def decoded() -> str:
            self.tokenizer.check(token_ids, self.vocab_size)
            return decode(self.tokenizer, token_ids, skip_special_tokens=False)

        return await self._run(len(token_ids), decoded, param)

    def check_length(self, num_prompt: int, max_tokens: object) -> int:
        """Returns how many tokens an answer may have: `max_tokens`, or where that is None what has
        room. Raises ApiError where that is too many; a prompt is never cut.
        """
        wanted = max_tokens if isinstance(max_tokens, int) and not isinstance(max_tokens, bool) else 1
        if max_tokens is None and num_prompt < self.max_model_len:
            return self.max_model_len - num_prompt
        if num_prompt + wanted > self.max_model_len:
            raise self._too_long(f"{num_prompt:d}", f"{num_prompt + wanted:d}", wanted)
        return wanted

    def _too_long(self, num_prompt: str, whole: str, wanted: int) -> ApiError:
        return ApiError(
            400,
            f"This model's maximum context length is {self.max_model_len} tokens. However, you requested {whole} tokens "
            f"({num_prompt} in the prompt, {wanted} in the completion); shorten the prompt or max_tokens: nothing is cut.",
            param="max_tokens" if num_prompt.isdigit() and int(num_prompt) < self.max_model_len else "prompt",
            code=frames.TOO_LONG,
        )  # fmt: skip

    def _encoded(self, text: str, encoded: Callable[[str], list[int]]) -> list[int]:
        enough = _CHARACTERS_PER_TOKEN * self.max_model_len + _MORE_CHARACTERS
        if len(text) > enough:
            num_tokens = len(encoded(text[:enough]))
            # The end of the beginning may have had other tokens in the whole.
            if num_tokens - 256 > self.max_model_len:
                raise self._too_long(f"at least {num_tokens}", f"at least {num_tokens + 1}", 1)
        return encoded(text)

    async def _run(self, size: int, function: Callable[[], T], param: str) -> T:
        """Returns what a function returns, which runs in a thread where `size` is large."""
        try:
            if size <= INLINE_CHARACTERS:
                return function()
            return await self._threads.run(size, function)
        except UnsupportedError as error:
            raise ApiError(500, str(error), code=error.code) from None
        except DflashError as error:
            raise api_error.from_error(error, param) from None

    async def in_thread(self, size: int, function: Callable[[], T]) -> T:
        """Returns what a function returns that takes long over so many characters."""
        return await self._threads.run(size, function)


def _is_one(prompt: object) -> bool:
    """Says whether this is one prompt: a text, or ids."""
    return isinstance(prompt, str) or (
        isinstance(prompt, list) and all(isinstance(one, int) for one in prompt) and bool(prompt)
    )
