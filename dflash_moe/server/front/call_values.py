"""Values of arguments that are not written as JSON: what stands between marks, and what is written
as Python writes it.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping
from typing import Any

from dflash_moe.server.front.text_source import NO_JSON, loaded

_CONSTANTS = {"True": "true", "False": "false", "None": "null"}
_TYPES: dict[type, tuple[str, ...]] = {
    bool: ("boolean",), int: ("integer", "number"), float: ("number",), str: ("string",), list: ("array",),
    dict: ("object",), type(None): ("null",),
}  # fmt: skip
_TOKEN = re.compile(
    r"\s*(?:(?P<string>'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\")|(?P<word>[A-Za-z]+)|(?P<number>[-+0-9.][-+0-9.eE_]*)"
    r"|(?P<sign>[\[\]{}(),:]))\s*",
    re.DOTALL,
)


def json_of_python(text: str) -> str | None:
    """Returns a literal of Python as JSON text; None for what is none."""
    found, at = [], 0
    while at < len(text):
        token = _TOKEN.match(text, at)
        if token is None:
            return None
        at = token.end()
        if token["string"] is not None:
            value = _python_string(token["string"])
            if value is None:
                return None
            found.append(json.dumps(value, ensure_ascii=False))
        elif token["word"] is not None:
            found.append(_CONSTANTS.get(token["word"], token["word"]))
        else:
            # A tuple is a list.
            found.append({"(": "[", ")": "]"}.get(token["sign"] or token["number"], token["sign"] or token["number"]))
    value = loaded(" ".join(found), object)
    return None if value is NO_JSON else json.dumps(value, ensure_ascii=False)


def _python_string(token: str) -> str | None:
    quote = token[0]
    # A line may end within: models do not know where they may break one.
    body = token[1:-1].replace("\n", "\\n").replace("\r", "\\r").replace("\0", "\\0")
    try:
        found: str = ast.literal_eval(quote + body + quote)
    except (ValueError, SyntaxError):
        return None
    return found


def json_of_raw(text: str, schema: Any, key: str) -> str:
    """Returns what stands between the marks of an argument as JSON text. A tool's schema says
    whether that is a string; where it does not, what is JSON is taken for that.
    """
    types = _types(schema, key)
    if types == {"string"}:
        return json.dumps(text, ensure_ascii=False)
    value = text.strip()
    value = _CONSTANTS.get(value, value)
    found = loaded(value, object)
    if found is NO_JSON:
        # A template may write lists and objects as Python does.
        python = json_of_python(value) if value[:1] in ("[", "{", "(") else None
        found, value = (NO_JSON, value) if python is None else (loaded(python, object), python)
    if found is NO_JSON or (types and not types & set(_TYPES[type(found)])):
        return json.dumps(text, ensure_ascii=False)
    return value


def _types(schema: Any, key: str) -> set[str]:
    """Returns the names of types that an argument may have; none where the schema does not say."""
    properties = schema.get("properties") if isinstance(schema, Mapping) else None
    one = properties.get(key) if isinstance(properties, Mapping) else None
    if not isinstance(one, Mapping):
        return set()
    found: set[str] = set()
    for each in (one, *_listed(one.get("anyOf")), *_listed(one.get("oneOf"))):
        kind = each.get("type") if isinstance(each, Mapping) else None
        found.update(name for name in (kind, *_listed(kind)) if isinstance(name, str))
    return found


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
