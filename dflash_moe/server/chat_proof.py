"""Proves a form of calls and thoughts: readers made of it find in turns that the template has
rendered what was rendered, wherever the text is cut.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from dflash_moe.engine.request import STOP
from dflash_moe.engine.text import Chunk
from dflash_moe.server.chat_probes import ANSWER, FIRST, KEYS, MAX_TURN, RESULT, SECOND, THOUGHT, TOOLS, VALUES, Probes
from dflash_moe.server.front.call_forms import CallForm, ChatForm, ThoughtForm
from dflash_moe.server.front.message_pieces import Message, MessageReader
from dflash_moe.server.front.readers import new_reader

# Arguments of every type, and texts that might be taken for marks.
_HARD: dict[str, Any] = {
    KEYS[0]: 'say "hi" & <b>\n2 < 3, é', KEYS[1]: "", "count": -3, "share": 0.5, "is_set": True, "nothing": None,
    "nested": {"a": [1, {"b": "c}"}]}, "listed": [1, 2],
}  # fmt: skip
_SCHEMAS = {tool["function"]["name"]: tool["function"]["parameters"] for tool in TOOLS}
Calls = Sequence[tuple[str, Mapping[str, Any]]]


def unproven_thoughts(probes: Probes, form: ThoughtForm) -> str:
    """Returns why a form of thoughts is not proven; nothing where it is."""
    chat = ChatForm(thoughts=form)
    text = probes.tried([probes.answer(ANSWER, **{form.field: THOUGHT})])
    if text is not None and THOUGHT in text:
        turn = text[text.rfind(form.begin, 0, text.find(THOUGHT)) : text.rfind(ANSWER) + len(ANSWER)]
    else:
        # The template takes such thoughts out of texts, or writes them before calls.
        turn = f"{form.begin}\n{THOUGHT}\n{form.end}\n\n{ANSWER}"
    behind = turn[len(form.begin) :]
    return _unread(probes, chat, turn, THOUGHT, ANSWER, []) or _unread(
        probes, chat, behind, THOUGHT, ANSWER, [], is_thinking=True
    )


def unproven_calls(probes: Probes, form: CallForm, thoughts: ThoughtForm | None) -> str:
    """Returns why a form of calls is not proven; nothing where it is."""
    chat = ChatForm(form, thoughts)
    pair = probes.pair(is_parallel=form.is_parallel)
    probed: list[Calls] = [pair, [(FIRST, _HARD)], [(FIRST, {})], [(SECOND, _HARD), (FIRST, VALUES[0])]]
    for calls in probed:
        if len(calls) > 1 and not form.is_parallel:
            continue
        turn = probes.turn(probes.calling("", *calls))
        if turn is None:
            return f"the chat template refuses a conversation with calls: {probes.refusal}"
        if reason := _unread(probes, chat, without_thought(turn, thoughts), "", "", calls):
            return reason
    turn = probes.turn(probes.calling(ANSWER, *pair))
    if turn is not None and ANSWER in turn and (
        reason := _unread(probes, chat, turn[turn.find(ANSWER) :], "", ANSWER, pair)
    ):  # fmt: skip
        return reason
    return _unanswered(probes, [probes.calling("", *pair), *probes.results(len(pair))])


def without_thought(turn: str, thoughts: ThoughtForm | None) -> str:
    """Returns a turn without the marks of an empty thought, which are none of a call."""
    if thoughts is None:
        return turn
    return re.sub(rf"^\s*({re.escape(thoughts.begin)})?\s*{re.escape(thoughts.end)}\s*", "", turn)


def _unanswered(probes: Probes, turns: Sequence[dict[str, Any]]) -> str:
    answered = probes.tried(turns, add_generation_prompt=True)
    if answered is None:
        return f"the chat template refuses what a tool has returned: {probes.refusal}"
    return "" if RESULT in answered else "the chat template leaves out what a tool has returned"


def unproven_harmony(probes: Probes, form: ChatForm) -> str:
    """Returns why messages in channels are not proven; nothing where they are."""
    probed: list[Calls] = [[(FIRST, VALUES[0])], [(FIRST, _HARD)], [(FIRST, {})], []]
    for calls in probed:
        message = probes.calling("", *calls, thinking=THOUGHT) if calls else probes.answer(ANSWER, thinking=THOUGHT)
        text = probes.tried([message])
        if text is None or not text.startswith(probes.generation_prompt):
            return "the chat template writes messages otherwise than it begins them"
        turn = text[len(probes.generation_prompt) :]
        if reason := _unread(probes, form, turn, THOUGHT, "" if calls else ANSWER, calls):
            return reason
    return _unanswered(probes, [probes.calling("", (FIRST, VALUES[0]), thinking=THOUGHT), *probes.results(1)])


def _unread(
    probes: Probes, form: ChatForm, turn: str, reasoning: str, content: str, calls: Calls, *, is_thinking: bool = False
) -> str:
    """Returns what readers do not find in a turn, however it is cut; nothing if they find all."""
    if len(turn) > MAX_TURN:
        return f"the chat template writes more than {MAX_TURN} characters for a thought"
    for special in probes.special:
        if not any(special in mark for mark in form.marks):
            turn = turn.replace(special, "")
    cuts = [[turn], list(turn), *([turn[:at], turn[at:]] for at in range(1, len(turn)))]
    for parts in cuts:
        reader = new_reader(form, _SCHEMAS, is_thinking=is_thinking)
        message = read(reader, parts)
        found = [(call.name, json.loads(call.arguments)) for call in message.calls]
        wanted = [(name, dict(arguments)) for name, arguments in calls]
        if found != wanted:
            return f"calls that the chat template writes are read otherwise: {turn[:200]!r}"
        if message.content.strip() != content or message.reasoning.strip() != reasoning:
            return f"texts or thoughts that the chat template writes are read otherwise: {turn[:200]!r}"
    return ""


def read(reader: MessageReader, parts: Sequence[str]) -> Message:
    """Returns what a reader makes of a text that comes in parts."""
    message = Message(reader)
    for part in parts:
        message.push(Chunk(part, ()))
    message.push(Chunk("", (), finish_reason=STOP))
    return message
