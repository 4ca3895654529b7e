"""The fields that ask for answers in a form, under the names of OpenAI, vLLM and llama-server.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from dflash_moe.integrations.grammars import Source
from dflash_moe.server.front.api_error import ApiError, brief

MAX_SOURCE_BYTES = 64 << 10
_OBJECT = '{"type":"object"}'


def source_of(body: Mapping[str, Any]) -> tuple[str, Source] | None:
    """Returns the form that a body asks for, and the name of the field that does; None where it
    asks for none. Raises ApiError for what is none, or more than one.
    """
    found = []
    for name, read in _FIELDS.items():
        if body.get(name) is not None and (source := read(name, body[name])) is not None:
            found.append((name, source))
    if len(found) > 1:
        raise ApiError(400, f"{found[1][0]}: {found[0][0]} asks for a form too; leave one of them out", param=found[1][0])
    return found[0] if found else None


def source_text(kind: str, name: str, value: object) -> Source:
    """Returns the source of a `kind` that the field `name` gives as a text. Raises ApiError for
    what is none, or has more than MAX_SOURCE_BYTES.
    """
    if not isinstance(value, str):
        raise ApiError(400, f"{name}={brief(value)} is not allowed; allowed: a text", param=name)
    try:
        size = len(value.encode())
    except UnicodeEncodeError:
        raise ApiError(400, f"{name}: it has half of a pair of surrogates, which is no Unicode", param=name) from None
    if size > MAX_SOURCE_BYTES:
        raise ApiError(400, f"{name} has more than {MAX_SOURCE_BYTES} bytes, which is all that is taken", param=name)
    return Source(kind, value)


def _json(name: str, value: object) -> Source:
    """Returns the source of a schema, which may be JSON in a text, as vLLM takes it too."""
    if isinstance(value, str):
        return source_text("json", name, value)
    if not isinstance(value, dict):
        raise ApiError(400, f"{name}={brief(value)} is not allowed; allowed: a JSON schema, which is an object", param=name)
    parts, size = [], 0
    try:
        # Part by part, so that what is far too large is not spelt out.
        for part in json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).iterencode(value):
            parts.append(part)
            size += len(part)
            if size > MAX_SOURCE_BYTES:
                break
    except RecursionError:
        raise ApiError(400, f"{name} is nested too deeply", param=name) from None
    return source_text("json", name, "".join(parts))


def _choice(name: str, value: object) -> Source | None:
    if value == []:
        return None
    if not isinstance(value, list) or not all(isinstance(one, str) and one for one in value):
        raise ApiError(400, f"{name}={brief(value)} is not allowed; allowed: a list of texts that are not empty", param=name)
    if sum(map(len, value)) > MAX_SOURCE_BYTES:
        raise ApiError(400, f"{name} has more than {MAX_SOURCE_BYTES} bytes, which is all that is taken", param=name)
    return source_text("choice", name, json.dumps(value, ensure_ascii=False))


def _grammar(name: str, value: object) -> Source | None:
    # llama-server's default.
    return None if value == "" else source_text("grammar", name, value)


def _regex(name: str, value: object) -> Source:
    return source_text("regex", name, value)


def _response_format(name: str, value: object) -> Source | None:
    """OpenAI's field. llama-server's has the schema at the same place for both types."""
    given: dict[str, Any] = value if isinstance(value, dict) else {}
    if given.get("type") == "text":
        return None
    if given.get("type") == "json_object":
        schema = given.get("schema")
        return Source("json", _OBJECT) if schema in (None, {}) else _json(name, schema)
    if given.get("type") == "json_schema":
        named = given.get("json_schema", given)
        schema = named.get("schema") if isinstance(named, dict) else None
        if schema is None:
            raise ApiError(400, f"{name}: its json_schema has no schema", param=name)
        return _json(name, schema)
    allowed = '{"type": "text"}, "json_object", or "json_schema" with {"json_schema": {"schema": ...}}'
    raise ApiError(400, f"{name}={brief(value)} is not allowed; allowed: {allowed}", param=name)


def _structured_outputs(name: str, value: object) -> Source | None:
    """The field of vLLM, of which one entry says the form."""
    if not isinstance(value, dict):
        raise ApiError(400, f"{name}={brief(value)} is not allowed; allowed: an object", param=name)
    given = {key: one for key, one in value.items() if one is not None and one is not False}
    if not given:
        return None
    (key, form), *others = given.items()
    if others or key not in _ENTRIES:
        wrong = others[0][0] if others and key in _ENTRIES else key
        raise ApiError(400, f"{name}: {brief(wrong)} is not honoured; allowed: one of {', '.join(_ENTRIES)}", param=name)
    return _ENTRIES[key](f"{name}.{key}", form)


_ENTRIES: dict[str, Callable[[str, object], Source | None]] = {
    "json": _json, "regex": _regex, "choice": _choice, "grammar": _grammar,
    "json_object": lambda _name, _value: Source("json", _OBJECT),
}  # fmt: skip
_FIELDS: dict[str, Callable[[str, object], Source | None]] = {
    "response_format": _response_format, "structured_outputs": _structured_outputs, "guided_json": _json,
    "guided_regex": _regex, "guided_choice": _choice, "guided_grammar": _grammar, "json_schema": _json, "grammar": _grammar,
}  # fmt: skip
NAMES = frozenset(_FIELDS)
