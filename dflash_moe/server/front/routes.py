"""The routes that answer with tokens, text or the model's name: what each makes of a body.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from dflash_moe.engine.sampling.sampling_params import SamplingParams
from dflash_moe.errors import ConfigError
from dflash_moe.server.front import anthropic_request, responses_request
from dflash_moe.server.front.answer import Answer, Engine
from dflash_moe.server.front.anthropic_reply import AnthropicReply
from dflash_moe.server.front.api_error import ApiError, brief, from_error
from dflash_moe.server.front.chat_request import ChatRequest, chat_request
from dflash_moe.server.front.message_pieces import Messages
from dflash_moe.server.front.prompts import Conversation, Prompts
from dflash_moe.server.front.readers import new_reader
from dflash_moe.server.front.replies import ChatReply, CompletionReply, Heading, Reply
from dflash_moe.server.front.request_fields import Body, flag
from dflash_moe.server.front.responses_reply import ResponsesReply
from dflash_moe.server.front.sampling_fields import sampling_params
from dflash_moe.server.front.structured_output import StructuredOutput
from dflash_moe.server.front.text_threads import SMALL_SIZE
from dflash_moe.server.front.translation import as_chat

ANY_NAME = "*"
_MAX_NAME = 1024
# Makes what writes an answer: of the model's name, the messages to be and the parameters.
NewReply = Callable[[str, Messages, SamplingParams], Reply]


class Asked:
    """A request that was accepted: its answer, and how that is written."""

    def __init__(self, answer: Answer, reply: Reply, *, is_streamed: bool) -> None:
        self.answer = answer
        self.reply = reply
        self.is_streamed = is_streamed

    def has_ended(self) -> None:
        """The answer is whole and was read."""


class AskedChat(Asked):
    """A conversation, whose answers are remembered for the next turn."""

    def __init__(
        self, answer: Answer, reply: Reply, *, is_streamed: bool, prompts: Prompts, conversation: Conversation, salt: bytes
    ) -> None:
        super().__init__(answer, reply, is_streamed=is_streamed)
        self._prompts = prompts
        self._conversation = conversation
        self._salt = salt

    def has_ended(self) -> None:
        """As `Asked.has_ended`."""
        for text in self.answer.texts:
            # What stood behind a stop string is not in the conversation that comes back.
            if text.token_ids and not text.is_stopped:
                self._prompts.remember(self._salt, self._conversation, text.token_ids)


class Routes:
    """The routes of one model."""

    def __init__(self, engine: Engine, facts: Mapping[str, Any], names: Sequence[str]) -> None:
        """`names` are those of the model, the first one its own; "*" takes any."""
        self._engine = engine
        self._facts = facts
        self._names = list(names)
        self._created = int(time.time())
        self.prompts = Prompts(facts)
        self._structured = StructuredOutput(facts)

    def models(self) -> dict[str, Any]:
        """Returns the answer of /v1/models."""
        return {"object": "list", "data": [self._model(name) for name in self._names if name != ANY_NAME]}

    def model(self, name: str) -> dict[str, Any]:
        """Returns the answer of /v1/models/NAME. Raises ApiError for a name that there is not."""
        return self._model(self._name_of({"model": name}))

    def _model(self, name: str) -> dict[str, Any]:
        return {
            "id": name, "object": "model", "created": self._created, "owned_by": "dflash_moe", "root": self._names[0],
            "parent": None, "max_model_len": self.prompts.max_model_len,
        }  # fmt: skip

    def _name_of(self, body: Mapping[str, Any]) -> str:
        name = body.get("model")
        if name is None:
            return self._names[0]
        if not isinstance(name, str):
            raise ApiError(400, f"model={brief(name)} is not allowed; allowed: a text", param="model")
        if len(name) > _MAX_NAME:
            # Each event of a stream repeats it.
            raise ApiError(400, f"model={brief(name)} has {len(name)} characters; allowed: at most {_MAX_NAME}", param="model")
        if name not in self._names and ANY_NAME not in self._names:
            known = ", ".join(self._names)
            text = (
                f"the model {brief(name)} does not exist here; there is {known} (--alias NAME adds one, --alias '*' takes any)"
            )
            raise ApiError(404, text, param="model", code="model_not_found")
        return name

    # -- tokens out of tokens ----------------------------------------------------------------------
    async def messages(self, body: Body, salt: bytes) -> Asked:
        """Begins the answer to a conversation in the form of Anthropic's API."""
        chat = await self._translated(body, anthropic_request.chat_body)

        def reply(name: str, messages: Messages, _params: SamplingParams) -> Reply:
            return AnthropicReply(self._heading("msg", name), messages)

        with as_chat(chat, anthropic_request.NAMES):
            return await self.chat(chat, salt, reply)

    async def count_tokens(self, body: Body, salt: bytes) -> dict[str, Any]:
        """Returns how many tokens a conversation in the form of Anthropic's API has."""
        chat = await self._translated(body, partial(anthropic_request.chat_body, is_answered=False))
        with as_chat(chat, anthropic_request.NAMES):
            self._name_of(chat)
            request = await self._chat_request(chat)
            asked = await self.prompts.of_messages(request.messages, request.variables, salt=salt)
            return {"input_tokens": len(asked.token_ids)}

    async def responses(self, body: Body, salt: bytes) -> Asked:
        """Begins the answer to a conversation in the form of OpenAI's Responses API."""
        chat = await self._translated(body, responses_request.chat_body)

        def reply(name: str, messages: Messages, params: SamplingParams) -> Reply:
            heading = self._heading("resp", name)
            return ResponsesReply(heading, messages, self.prompts.tokenizer, params, chat, body.get("instructions"))

        with as_chat(chat, responses_request.NAMES):
            return await self.chat(chat, salt, reply)

    async def _translated(self, body: Body, translate: Callable[[Body], dict[str, Any]]) -> Body:
        return Body(await self.prompts.in_thread(body.size, lambda: translate(body)), body.size)

    async def _chat_request(self, body: Body) -> ChatRequest:
        if body.size <= SMALL_SIZE:
            return chat_request(body, self.prompts.form)
        return await self.prompts.in_thread(body.size, lambda: chat_request(body, self.prompts.form))

    async def chat(self, body: Body, salt: bytes, new_reply: NewReply | None = None) -> Asked:
        """Begins the answer to a conversation. `new_reply` makes what writes it in another form
        than OpenAI's chat, of the model's name, the messages to be and the parameters.
        """
        name = self._name_of(body)
        request = await self._chat_request(body)
        # Its tokens must not depend on what else was answered before.
        is_fresh = body.get("seed") is not None
        asked = await self.prompts.of_messages(request.messages, request.variables, salt=salt, is_fresh=is_fresh)
        max_tokens = body.get("max_completion_tokens")
        params = self._params(
            body, [asked.token_ids], body.get("max_tokens") if max_tokens is None else max_tokens, is_chat=True
        )
        is_streamed, has_usage = _stream(body)
        form = self.prompts.form_for(request.schemas)
        messages = Messages(
            lambda: new_reader(
                form, request.schemas, is_thinking=form.begins_thought(asked.text), is_single=request.is_single
            ), is_single=request.is_single, has_reasoning=request.has_reasoning,
        )  # fmt: skip
        if new_reply is None:
            reply: Reply = ChatReply(
                self._heading("chatcmpl", name), self.prompts.tokenizer, messages,
                has_logprobs=params.logprobs is not None, has_usage=has_usage,
            )  # fmt: skip
        else:
            reply = new_reply(name, messages, params)
        grammar = await self._structured.of_chat(body, request, self.prompts.form, asked.text)
        tokenizer = self.prompts.tokenizer.keeping(form.marks)
        answer = Answer(self._engine, tokenizer, [asked.token_ids], params, salt=salt, grammar=grammar)
        messages.end = answer.end
        return AskedChat(answer, reply, is_streamed=is_streamed, prompts=self.prompts, conversation=asked, salt=salt)

    async def completion(self, body: Mapping[str, Any], salt: bytes) -> Asked:
        """Begins the completion of one or several texts."""
        name = self._name_of(body)
        if body.get("prompt") is None:
            raise ApiError(400, "prompt is missing: a text, a list of token ids, or a list of these", param="prompt")
        prompts = await self.prompts.of_field(body["prompt"], add_special_tokens=flag(body, "add_special_tokens", default=True))
        params = self._params(body, prompts, body.get("max_tokens"), is_chat=False)
        is_streamed, has_usage = _stream(body)
        texts = await self._echoed(body, prompts, params)
        reply = CompletionReply(
            self._heading("cmpl", name), self.prompts.tokenizer, has_logprobs=params.logprobs is not None, has_usage=has_usage,
            echo=lambda place: texts[place // params.n],
        )  # fmt: skip
        # Each prompt has a room of its own.
        has_most = body.get("max_tokens") is not None
        rooms = [] if has_most else [self.prompts.check_length(len(one), None) for one in prompts]
        grammar = await self._structured.of_text(body)
        answer = Answer(self._engine, self.prompts.tokenizer, prompts, params, salt=salt, rooms=rooms, grammar=grammar)
        return Asked(answer, reply, is_streamed=is_streamed)

    def _params(
        self, body: Mapping[str, Any], prompts: Sequence[Sequence[int]], max_tokens: object, *, is_chat: bool
    ) -> SamplingParams:
        # What is wrong with a value is said before what is too many.
        params = sampling_params(body, self._facts["sampling"], max_tokens=self.prompts.max_model_len, is_chat=is_chat)
        try:
            params.check_ids(self.prompts.vocab_size)
        except ConfigError as error:
            raise from_error(error, str(error).partition(":")[0]) from None
        # The front holds a text for each choice, of which the engine would not take so many.
        max_queue = self._facts["max_queue"]
        if len(prompts) * params.n > max_queue:
            raise ApiError(
                400, f"n={params.n} with {len(prompts)} prompts is not allowed; allowed: at most {max_queue} choices in one "
                "request (engine.max_queue)", param="n",
            )  # fmt: skip
        room = self.prompts.check_length(max(map(len, prompts)), max_tokens)
        return params if max_tokens is not None else dataclasses.replace(params, max_tokens=room)

    async def _echoed(self, body: Mapping[str, Any], prompts: list[list[int]], params: SamplingParams) -> list[str]:
        """Returns what stands before each prompt's completions: nothing, or the prompt."""
        if not flag(body, "echo"):
            return [""] * len(prompts)
        if params.logprobs is not None:
            text = "echo: with logprobs it is not honoured; leave one of them out"
            raise ApiError(400, text, param="echo", code="unsupported_parameter")
        given = [body["prompt"]] if isinstance(body["prompt"], str) else body["prompt"]
        if isinstance(given[0], str):
            return list(given)
        return [await self.prompts.text_of(one, "prompt") for one in prompts]

    def _heading(self, prefix: str, name: str) -> Heading:
        return Heading(prefix, name, self._facts["fingerprint"])

    # -- text and tokens ---------------------------------------------------------------------------
    async def tokenize(self, body: Body, salt: bytes) -> dict[str, Any]:
        """Returns the answer of /tokenize: of `prompt` or `messages` as vLLM has it, of `content`
        as llama-server has.
        """
        self._name_of(body)
        given = [name for name in ("prompt", "messages", "content") if body.get(name) is not None]
        if len(given) != 1:
            raise ApiError(400, "give one of prompt, messages and content", param=given[-1] if given else "prompt")
        if given == ["messages"]:
            request = await self._chat_request(body)
            token_ids = (await self.prompts.of_messages(request.messages, request.variables, salt=salt)).token_ids
        else:
            text = body[given[0]]
            if not isinstance(text, str):
                raise ApiError(400, f"{given[0]}={brief(text)} is not allowed; allowed: a text", param=given[0])
            # llama-server adds none by itself.
            is_added = flag(body, "add_special_tokens", default=True) if given == ["prompt"] else flag(body, "add_special")
            token_ids = await self.prompts.of_text(text, add_special_tokens=is_added, param=given[0], has_limit=False)
        return {"count": len(token_ids), "max_model_len": self.prompts.max_model_len, "tokens": token_ids, "token_strs": None}

    async def detokenize(self, body: Mapping[str, Any], _salt: bytes) -> dict[str, Any]:
        """Returns the answer of /detokenize: the text under vLLM's name and llama-server's."""
        self._name_of(body)
        text = await self.prompts.text_of(body.get("tokens"), "tokens")
        return {"prompt": text, "content": text}


def _stream(body: Mapping[str, Any]) -> tuple[bool, bool]:
    """Returns whether an answer is streamed, and whether its usage ends it."""
    is_streamed = flag(body, "stream")
    options = body.get("stream_options")
    if options is None:
        return is_streamed, False
    if not is_streamed or not isinstance(options, dict):
        text = f"stream_options={brief(options)} is not allowed; allowed: an object, with stream: true"
        raise ApiError(400, text, param="stream_options")
    return is_streamed, flag(options, "include_usage")
