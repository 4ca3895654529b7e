"""Answers that keep to a form: its grammar, which is compiled before the engine is asked, with the
model's thoughts and calls of tools around it.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from dflash_moe.errors import DflashError
from dflash_moe.integrations.grammars import Grammars, Source
from dflash_moe.server.front import api_error, frames
from dflash_moe.server.front.answer_grammars import AnswerGrammar, NoGrammarError
from dflash_moe.server.front.api_error import ApiError
from dflash_moe.server.front.call_forms import ChatForm
from dflash_moe.server.front.chat_request import ChatRequest
from dflash_moe.server.front.structured_fields import source_of, source_text

# So many are compiled at once, by processes that give way to everything else on the machine. Each
# takes STEP_S of processor time at most.
_NUM_PROCESSES = 4
_NICENESS = 10
# Whoever asks has an answer within 2 s.
WAIT_S = 1.8
# Clients send the same few schemas again and again.
_MAX_KEPT = 64


def _strict_names(body: Mapping[str, Any], request: ChatRequest) -> list[str]:
    """Returns the names of tools whose calls must be by their schemas; the body was checked."""
    functions = [tool["function"] for tool in body.get("tools") or ()]
    return [one["name"] for one in functions if one.get("strict") is True and one["name"] in request.schemas]


class StructuredOutput:
    """Compiles the grammars of requests. It is for the event loop, and lives as long as it."""

    def __init__(self, facts: Mapping[str, Any]) -> None:
        """`facts` are those of `server.model_facts`."""
        self._has_end = bool(facts["end_ids"])
        self._grammars = Grammars(
            vocab_size=facts["vocab_size"], end_ids=facts["end_ids"], special=facts["tokenizer"]["special"],
            niceness=_NICENESS, max_processes=_NUM_PROCESSES,
        )  # fmt: skip
        self._special: dict[str, int] = facts["tokenizer"]["special"]
        self._kept: OrderedDict[Source, str] = OrderedDict()

    async def of_text(self, body: Mapping[str, Any]) -> str:
        """Returns the grammar that the completions of a body keep to, empty for none."""
        asked = source_of(body)
        return "" if asked is None else await self._compiled(*asked)

    async def of_chat(self, body: Mapping[str, Any], request: ChatRequest, form: ChatForm, prompt: str) -> str:
        """Returns the grammar that the answers to a conversation keep to, empty for none: for the
        form that its body asks for, calls that must come, and tools that are `strict`. It begins
        behind the model's thought.
        """
        asked = source_of(body)
        names = _strict_names(body, request)
        if not request.forced and not names and asked is None:
            return ""
        # With a thousand special tokens this takes milliseconds, and every chat would wait for it.
        grammar = AnswerGrammar(form, self._special)
        if not request.forced and not names and asked is not None and not request.schemas:
            return await self._compiled(asked[0], dataclasses.replace(asked[1], around=grammar.around(prompt)))
        param = "tool_choice" if request.forced else asked[0] if asked is not None else "tools"
        schemas = {name: request.schemas[name] for name in request.forced or request.schemas}
        # Where a call must come there is no other answer that could have a form.
        others = "" if request.forced else "FREE" if asked is None else "@answer"
        try:
            text = grammar.of_calls(prompt, schemas, strict=names, is_single=request.is_single, others=others)
        except NoGrammarError as error:
            raise ApiError(
                400, f"{param}: calls of this model's tools cannot be forced or checked: {error}; take tool_choice auto, tools "
                "without strict, and no other form beside them", param=param, code="unsupported_parameter",
            ) from None  # fmt: skip
        source = source_text("lark", param, text)
        if others == "@answer" and asked is not None:
            source = dataclasses.replace(asked[1], around=text)
        return await self._compiled(param, source)

    async def _compiled(self, param: str, source: Source) -> str:
        """Returns the grammar that travels with a request whose field `param` asks for a form.
        Raises ApiError in the words of the library.
        """
        if not self._has_end:
            raise ApiError(400, f"{param}: the model has no token that ends a text, and a form needs one", param=param)
        if source not in self._kept:
            said = await self._answer(source)
            if isinstance(said, DflashError):
                raise api_error.from_error(said.reworded(f"{param}: {said}"), param.partition(".")[0])
            if len(said) > frames.MAX_GRAMMAR_CHARACTERS:
                raise ApiError(400, f"{param}: what becomes of it has {len(said)} characters, which is too many", param=param)
            self._kept[source] = said
            if len(self._kept) > _MAX_KEPT:
                self._kept.popitem(last=False)
        self._kept.move_to_end(source)
        return self._kept[source]

    async def _answer(self, source: Source) -> str | DflashError:
        loop = asyncio.get_running_loop()
        said: asyncio.Future[str | DflashError] = loop.create_future()

        def settle(found: str | DflashError) -> None:
            if not said.done():
                said.set_result(found)

        def answer(found: str | DflashError) -> None:
            # At the end of the process there may be no loop any more.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(settle, found)

        key = self._grammars.compile(source, answer)
        try:
            return await asyncio.wait_for(said, WAIT_S)
        except asyncio.TimeoutError:
            text = f"the form was not compiled within {WAIT_S:g} s; ask again, or for a simpler one"
            raise ApiError(503, text, code="busy", retry_after_s=api_error.RETRY_AFTER_S) from None
        finally:
            self._grammars.give_up(key)
