"""What the translators of Anthropic's Messages and OpenAI's Responses have in common: both make a
body of OpenAI's chat of theirs, and refuse by its place what that has no form for.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from dflash_moe.server.front import request_fields
from dflash_moe.server.front.api_error import ApiError, brief

# More messages, blocks or tools than a request of Anthropic's API may have messages.
MAX_LISTED = 100_000
# How much to think, in the words of both APIs.
_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")


def refusal(place: str, found: object, allowed: str) -> ApiError:
    """Returns the error for a value at a place such as "messages[2].content"."""
    return ApiError(400, f"{place}={brief(found)} is not allowed; allowed: {allowed}", param=_field(place))


def unsupported(place: str, what: str) -> ApiError:
    """Returns the error for what would change the answer and is not honoured."""
    text = f"{place}: this server does not honour {what}, and without it the answer would be another; leave it out"
    return ApiError(400, text, param=_field(place), code="unsupported_parameter")


def _field(place: str) -> str:
    return place.partition("[")[0].partition(".")[0]


def mapping(found: object, place: str) -> Mapping[str, Any]:
    """Returns an object. Raises ApiError for anything else."""
    if not isinstance(found, dict):
        raise refusal(place, found, "an object")
    return found


def mappings(found: object, place: str) -> list[Mapping[str, Any]]:
    """Returns a list of objects. Raises ApiError for anything else."""
    if not isinstance(found, list) or len(found) > MAX_LISTED:
        raise refusal(place, found, f"a list of at most {MAX_LISTED} objects")
    return [mapping(one, f"{place}[{at}]") for at, one in enumerate(found)]


def text_in(found: Mapping[str, Any], name: str, place: str) -> str:
    """Returns a text that an object must have. Raises ApiError for anything else."""
    value = found.get(name)
    if not isinstance(value, str):
        raise refusal(f"{place}.{name}", value, "a text")
    return value


def one_of(found: object, place: str, allowed: Collection[str]) -> str:
    """Returns one of several words. Raises ApiError for anything else."""
    if not isinstance(found, str) or found not in allowed:
        raise refusal(place, found, ", ".join(allowed))
    return found


def text_part(part: Mapping[str, Any], place: str, kinds: Collection[str]) -> str:
    """Returns the text of a part of a content. Raises ApiError for what is none, such as an
    image.
    """
    if part.get("type") not in kinds:
        raise unsupported(place, f"a part of type {brief(part.get('type'))}")
    return text_in(part, "text", place)


def text_parts(found: object, place: str, kinds: Collection[str]) -> str:
    """Returns the text of a content: a text, or a list of parts of these kinds, a line each, as a
    chat has them. Raises ApiError for anything else.
    """
    if isinstance(found, str):
        return found
    return "\n".join(text_part(part, f"{place}[{at}]", kinds) for at, part in enumerate(mappings(found, place)))


@contextlib.contextmanager
def as_chat(chat: Mapping[str, Any], names: Mapping[str, str]) -> Iterator[None]:
    """Checks a body that was translated as that of a chat. Errors about one of its fields are
    raised with the name that it has in the API it was translated from, as `names` say.
    """
    try:
        request_fields.check(chat, "chat")
        yield
    except ApiError as error:
        raise error.renamed(names) from None


def passed(body: Mapping[str, Any], route: str, translated: Collection[str]) -> dict[str, Any]:
    """Returns the fields of a body that a chat has under the same name and in the same form."""
    names = (request_fields.HONOURED[route] & request_fields.HONOURED["chat"]) - set(translated)
    return {name: body[name] for name in names if body.get(name) is not None}


def set_effort(chat: dict[str, Any], effort: object, place: str) -> None:
    """Says to the template how much to think. Raises ApiError for what is no such word."""
    chat["reasoning_effort"] = one_of(effort, place, _EFFORTS)
    if effort == "none":
        set_thinking(chat, is_on=False)


def set_thinking(chat: dict[str, Any], *, is_on: bool) -> None:
    """Says to the template whether to think, under the names that templates have for it, unless the
    request says so itself.
    """
    given = chat.get("chat_template_kwargs", {})
    if isinstance(given, dict):
        chat["chat_template_kwargs"] = {"enable_thinking": is_on, "thinking": is_on, **given}
