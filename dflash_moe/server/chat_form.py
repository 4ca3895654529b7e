"""Finds how a model writes calls of tools and thoughts, in what its chat template makes of probes:
conversations whose names, arguments and texts are sentinels. What stands between the sentinels are
the marks. A form counts only once it is proven: readers made of it find in each rendered turn what
the probe had, wherever the text is cut.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from dflash_moe.errors import DflashError
from dflash_moe.server import chat_proof
from dflash_moe.server.chat_probes import ANSWER, FIRST, KEYS, QUESTION, SECOND, THOUGHT, VALUES, Probes
from dflash_moe.server.front.call_forms import HARMONY, JSON, NAMED, PYTHON, TAGGED, CallForm, ChatForm, ThoughtForm

# A mark around thoughts is one tag.
_TAG = r"<[^<>\s]{1,40}>|\[/?[A-Z_]{1,40}\]|◁[^◁▷\s]{1,40}▷"
_LAST_TAG, _FIRST_TAG = re.compile(rf"({_TAG})\s*$"), re.compile(rf"^\s*({_TAG})")
_HARMONY_SIGNS = ("<|channel|>analysis<|message|>", "functions.", "<|call|>")
# Messages have thoughts under these names, the last one Cohere's.
FIELDS = ("reasoning_content", "reasoning", "thinking", "tool_plan")
# Tags around a thought are within so many characters of it.
_NEAR = 128
# So many tags are tried, each of which costs a rendering.
_MAX_PAIRS = 16
# Where one mark ends and the next begins: a part that two texts have in common is cut there.
_BEGINS, _ENDS = "<[{ \n", ">] \n"


class NotFound(Exception):  # noqa: N818 - it says why there is no form
    """A template has no form that is known."""


def find_chat_form(probes: Probes) -> ChatForm:
    """Returns what is found and proven in a template. It never fails: what is not found is said."""
    if all(sign in probes.template for sign in _HARMONY_SIGNS):
        return _harmony(probes)
    calls, thoughts, no_calls, no_thoughts = None, None, "", ""
    try:
        thoughts = _thoughts(probes)
        no_thoughts = chat_proof.unproven_thoughts(probes, thoughts)
    except (NotFound, DflashError) as error:
        no_thoughts = str(error)
    thoughts = None if no_thoughts else thoughts
    try:
        calls = _calls(probes, thoughts)
        no_calls = chat_proof.unproven_calls(probes, calls, thoughts)
    except (NotFound, DflashError) as error:
        no_calls = str(error)
    return ChatForm(None if no_calls else calls, thoughts, no_calls, no_thoughts)


def _harmony(probes: Probes) -> ChatForm:
    probes.one_call()
    calls, thoughts = CallForm(HARMONY, is_parallel=False), ThoughtForm("", "", "thinking")
    reason = chat_proof.unproven_harmony(probes, ChatForm(calls, thoughts))
    return ChatForm(None, None, reason, reason) if reason else ChatForm(calls, thoughts)


# -- thoughts --------------------------------------------------------------------------------------
def _thoughts(probes: Probes) -> ThoughtForm:
    for field in FIELDS:
        # Some templates write thoughts only before calls.
        for turn in (probes.answer(ANSWER, **{field: THOUGHT}), probes.calling("", (FIRST, VALUES[0]), **{field: THOUGHT})):
            text = probes.tried([turn])
            if text is None or THOUGHT not in text:
                continue
            before, behind = text.split(THOUGHT, 1)
            begin, end = _LAST_TAG.search(before[-_NEAR:]), _FIRST_TAG.search(behind[:_NEAR])
            if begin is None or end is None:
                raise NotFound("the chat template writes thoughts, but without a tag around them")
            return ThoughtForm(begin[1], end[1], field)
    # Other templates only take thoughts of earlier turns out of a message's text.
    for opened, closed in _tag_pairs(probes.template):
        turns = [probes.answer(f"{opened}{THOUGHT}{closed}{ANSWER}"), {"role": "user", "content": QUESTION}]
        text = probes.tried(turns, add_generation_prompt=True)
        if text is not None and ANSWER in text and THOUGHT not in text:
            return ThoughtForm(opened, closed)
    raise NotFound("the chat template has no thoughts of the model")


def _tag_pairs(template: str) -> list[tuple[str, str]]:
    ends = dict.fromkeys(re.findall(r"</([^<>\s/]{1,40})>", template))
    return [(f"<{name}>", f"</{name}>") for name in list(ends)[:_MAX_PAIRS]]


# -- calls -----------------------------------------------------------------------------------------
def _calls(probes: Probes, thoughts: ThoughtForm | None) -> CallForm:
    if not probes.says_tools():
        raise NotFound(probes.refusal or "the chat template says nothing of tools")
    two = probes.two_calls()
    is_parallel = two is not None
    turn = two or probes.one_call()
    if turn is None:
        raise NotFound(probes.refusal or "the chat template writes no calls of tools")
    found = _form_of(chat_proof.without_thought(turn, thoughts), is_parallel=is_parallel)
    found = replace(found, takes_text=probes.takes_text, is_parallel=is_parallel, has_short_ids=probes.has_short_ids)
    behind = probes.tried([probes.calling(ANSWER, *probes.pair(is_parallel=is_parallel))])
    at = -1 if behind is None else behind.rfind(ANSWER)
    if behind is not None and at >= 0:
        lead = re.match(r"\s*", behind[at + len(ANSWER) :])
        found = replace(found, lead=lead[0] if lead and found.opening else "")
    return found


def _form_of(turn: str, *, is_parallel: bool) -> CallForm:
    """Returns the form of a turn that has calls alone, without what ends each turn."""
    spans, found = _spans(turn, is_parallel=is_parallel)
    before, after = turn[: spans[0][0]], turn[spans[-1][1] :]
    if not is_parallel:
        return replace(found, begin=before.lstrip(), end=after.rstrip())
    between = turn[spans[0][1] : spans[1][0]]
    begin = _cut_left(os.path.commonprefix([before[::-1], between[::-1]])[::-1], before)
    rest = between[: len(between) - len(begin)]
    end = _cut_right(os.path.commonprefix([rest, after]))
    return replace(
        found, section_begin=before[: len(before) - len(begin)].lstrip(), begin=begin, end=end,
        separator=rest[len(end) :], section_end=after[len(end) :].rstrip(),
    )  # fmt: skip


def _cut_left(shared: str, whole: str) -> str:
    """Returns a shared end, from where one of its marks begins."""
    if shared == whole or not shared or shared[0] in _BEGINS:
        return shared
    at = min((place for sign in _BEGINS if (place := shared.find(sign)) >= 0), default=len(shared))
    return shared[at:]


def _cut_right(shared: str) -> str:
    """Returns a shared beginning, up to where one of its marks ends."""
    return shared[: 1 + max(shared.rfind(sign) for sign in _ENDS)]


def _spans(turn: str, *, is_parallel: bool) -> tuple[list[tuple[int, int]], CallForm]:
    """Returns where each call is in a turn, without marks around it, and what its kind says."""
    names = [FIRST, SECOND] if is_parallel else [FIRST]
    # What comes before the second call ends there.
    ats = [turn.find(name) for name in names]
    if min(ats) < 0:
        raise NotFound("the chat template leaves the name of a tool that was called out")
    for kind in (_json_spans, _named_spans, _python_spans, _tagged_spans):
        found = kind(turn, ats)
        if found is not None:
            return found
    raise NotFound("the chat template writes calls in a form that is not known")


Spans = tuple[list[tuple[int, int]], CallForm]


def _json_spans(turn: str, ats: Sequence[int]) -> Spans | None:
    found, form = [], None
    for at in ats:
        begin = at
        while (begin := turn.rfind("{", 0, begin)) >= 0:
            try:
                value, end = json.JSONDecoder().raw_decode(turn, begin)
            except ValueError:
                continue
            paths = _paths(value)
            if end > at and paths is not None:
                found.append((begin, end))
                form = CallForm(JSON, name_path=paths[0], arguments_path=paths[1], id_path=paths[2], is_quoted=paths[3])
                break
        else:
            return None
    return (found, form) if form is not None else None


_IDS = [form.format(name=name, place=place) for form in Probes.IDS for place, name in enumerate((FIRST, SECOND))]


def _paths(value: Any) -> tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...], bool] | None:
    """Returns where name, arguments and id are in an object, and whether arguments are quoted."""
    name: tuple[str, ...] = ()
    arguments: tuple[str, ...] = ()
    call_id: tuple[str, ...] = ()
    is_quoted = False
    todo: list[tuple[tuple[str, ...], Any]] = [((), value)]
    while todo:
        path, one = todo.pop()
        if one in (FIRST, SECOND):
            name = path
        elif isinstance(one, str) and one in _IDS:
            call_id = path
        elif one in VALUES or (isinstance(one, str) and one.startswith("{") and one in map(json.dumps, VALUES)):
            arguments, is_quoted = path, isinstance(one, str)
        elif isinstance(one, dict):
            todo += [((*path, key), member) for key, member in one.items()]
    return (name, arguments, call_id, is_quoted) if name and arguments else None


def _named_spans(turn: str, ats: Sequence[int]) -> Spans | None:
    found, middle, prefix = [], "", None
    for at, name in zip(ats, (FIRST, SECOND), strict=False):
        begin = turn.find("{", at)
        try:
            value, end = json.JSONDecoder().raw_decode(turn, begin) if begin >= 0 else (None, 0)
        except ValueError:
            return None
        if value not in VALUES:
            return None
        middle = turn[at + len(name) : begin]
        counted = re.match(r":[0-9]+", middle)
        if counted is not None:
            middle, prefix = middle[counted.end() :], "functions." if turn[:at].endswith("functions.") else ""
        found.append((at, end))
    return found, CallForm(NAMED, middle=middle, id_prefix=prefix)


def _python_spans(turn: str, ats: Sequence[int]) -> Spans | None:
    found = []
    for at, name, values in zip(ats, (FIRST, SECOND), VALUES, strict=False):
        written = re.compile(
            re.escape(name) + r"\(" + ", ?".join(f"{key}=['\"]{value}['\"]" for key, value in values.items()) + r"\)"
        )
        matched = written.match(turn, at)
        if matched is None:
            return None
        found.append((at, matched.end()))
    return found, CallForm(PYTHON)


def _tagged_spans(turn: str, ats: Sequence[int]) -> Spans | None:
    (one, two), values = KEYS, list(VALUES[0].values())
    pattern = f"{FIRST}(.*?){one}(.*?){values[0]}(.*?){two}(.*?){values[1]}"
    matched = re.compile(pattern, re.DOTALL).match(turn, ats[0])
    if matched is None or matched[2] != matched[4]:
        return None
    first, key_end, between, _ = matched.groups()
    shared = os.path.commonprefix([first[::-1], between[::-1]])[::-1]
    # A key's mark begins with its tag.
    key_begin = shared[max(0, shared.rfind("<")) :]
    name_end = first[: len(first) - len(key_begin)]
    value_end = between[: len(between) - len(key_begin)]
    tail = turn[matched.end() :]
    value_end = _cut_right(os.path.commonprefix([value_end, tail])) or value_end
    if not key_begin.strip() or not key_end.strip() or not tail.startswith(value_end.rstrip()):
        return None
    found = [(ats[0], matched.end() + len(value_end.rstrip()))]
    for at in ats[1:]:
        end = turn.find(list(VALUES[1].values())[-1], at)
        end = turn.find(value_end.rstrip(), end)
        if end < 0:
            return None
        found.append((at, end + len(value_end.rstrip())))
    return found, CallForm(TAGGED, name_end=name_end, key_begin=key_begin, key_end=key_end, value_end=value_end)
