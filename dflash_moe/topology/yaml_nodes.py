"""Reads YAML as nodes with lines. It allows a closed subset: maps, lists and plain scalars, but no
aliases, tags, duplicate or unknown keys.

It is built on PyYAML's safe composer, which never constructs objects. Every complaint is a
TopologyError that starts with `file:line:`. This file knows nothing about topologies.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from typing import Any

import yaml
import yaml.composer
import yaml.constructor
import yaml.reader

from dflash_moe.config import did_you_mean
from dflash_moe.errors import TopologyError, shown

# The format needs 5 levels. The bound limits the recursion of the composer.
MAX_DEPTH = 16
# Nothing in a topology is larger. Python would take an integer of any length.
MAX_INTEGER = 1 << 63
_TAG = "tag:yaml.org,2002:"
_NUMBER_TAGS = (f"{_TAG}int", f"{_TAG}float")
# YAML 1.1 takes 0777 to the base 8, and 1__ and 0x10 for numbers too.
_DECIMAL = re.compile(r"[-+]?(?:0|[1-9][0-9]*)", re.ASCII)
_FLOAT = re.compile(r"[^_]*", re.ASCII)
_TEXT_TAGS = (f"{_TAG}str", f"{_TAG}timestamp", f"{_TAG}value")


class _SafeComposer(yaml.SafeLoader):
    """Refuses anchors, aliases and deep nesting while composing."""

    depth = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        event: Any = self.peek_event()  # type: ignore[no-untyped-call]
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None) is not None:
            raise yaml.composer.ComposerError(None, None, "anchors and aliases are not allowed", event.start_mark)
        if getattr(event, "tag", None) is not None:
            raise yaml.composer.ComposerError(None, None, f"the tag {event.tag!r} is not allowed", event.start_mark)
        if self.depth >= MAX_DEPTH:
            raise yaml.composer.ComposerError(None, None, f"nested deeper than {MAX_DEPTH} levels", event.start_mark)
        self.depth += 1
        try:
            return super().compose_node(parent, index)
        finally:
            self.depth -= 1


class Value:
    """One node of the document and its place there. Its methods return Python values, or raise
    TopologyError that names the place.
    """

    def __init__(self, node: Any, source: str, path: str, *, key: Any = None) -> None:
        self._node = node
        self._start = node if key is None else key
        self.source = source
        self.path = path

    @property
    def line(self) -> int:
        """The line of the node, or of its key where it has one, counted from 1."""
        return int(self._start.start_mark.line) + 1

    def error(self, text: str) -> TopologyError:
        """Makes a TopologyError at this node."""
        return TopologyError(f"{self.source}:{self.line}: {text}")

    def scalar(self) -> str | int | float | bool | None:
        """Returns the scalar as YAML 1.1 reads it. What YAML takes for neither number, boolean nor
        null, such as a date, is text.
        """
        node = self._node
        if not isinstance(node, yaml.ScalarNode):
            raise self.error(f"{self.path} must be a single value, not a {self._kind()}")
        if node.tag == f"{_TAG}null":
            return None
        if node.tag == f"{_TAG}bool":
            return node.value.lower() in ("yes", "true", "on")
        if node.tag in _NUMBER_TAGS:
            return self._number(node)
        return str(node.value)

    def flag(self) -> bool:
        """Returns true or false. Raises ConfigError for anything else."""
        value = self.scalar()
        if not isinstance(value, bool):
            raise self.error(f"{self.path}: {shown(value)} is not allowed; allowed: true, false")
        return value

    def _number(self, node: Any) -> int | float:
        if ":" in node.value:
            raise self.error(f"{self.path}: {shown(node.value)} is a number to the base 60 in YAML; put it in quotes")
        constructor = yaml.constructor.SafeConstructor()
        is_whole = node.tag == f"{_TAG}int"
        if not (_DECIMAL if is_whole else _FLOAT).fullmatch(node.value):
            raise self.error(
                f"{self.path}: {shown(node.value)} is no plain decimal number, and YAML would read another one than it looks "
                "like; write digits alone, the first of which is not 0"
            )
        number: int | float
        try:
            number = int(constructor.construct_yaml_int(node)) if is_whole else float(constructor.construct_yaml_float(node))
        except (ValueError, OverflowError, IndexError):
            raise self.error(f"{self.path}: {shown(node.value)} is not a number") from None
        if abs(number) > MAX_INTEGER if is_whole else not math.isfinite(number):
            raise self.error(f"{self.path}: {shown(node.value)} is not a finite number of less than 64 bits")
        return number

    def text(self) -> str:
        """Returns the scalar, which must be text."""
        value = self.scalar()
        if not isinstance(value, str):
            raise self._no_text(value)
        return value

    def word(self) -> str:
        """Returns the scalar as it is written. It must be text, or a whole number."""
        value = self.scalar()
        if not isinstance(value, str) and (isinstance(value, bool) or not isinstance(value, int)):
            raise self._no_text(value)
        return str(self._node.value)

    def _no_text(self, value: object) -> TopologyError:
        written, read = str(self._node.value)[:80], shown(value)
        found = written if read == written else f"{written}, which YAML reads as {read}"
        return self.error(f"{self.path} must be text, found {found}; put it in quotes")

    def choice(self, allowed: Iterable[str]) -> str:
        """Returns the scalar in lower case, which must then be one of `allowed`."""
        allowed = list(allowed)
        value = self.scalar()
        word = str(value).lower() if isinstance(value, str) else ""
        if word not in allowed:
            hint = did_you_mean(word, allowed)
            raise self.error(f"{self.path}: {shown(value)} is not allowed; allowed: {', '.join(allowed)}{hint}")
        return word

    def whole(self, low: int, high: int) -> int:
        """Returns the scalar, which must be an integer of low..high."""
        value = self.scalar()
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise self.error(f"{self.path}: {shown(value)} is not allowed; allowed: whole numbers {low}..{high}")
        return value

    def number(self, low: float, high: float) -> float:
        """Returns the scalar as a float, which must be a number of low..high."""
        value = self.scalar()
        if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
            raise self.error(f"{self.path}: {shown(value)} is not allowed; allowed: numbers {low:g}..{high:g}")
        return float(value)

    def items(self, max_items: int) -> list[Value]:
        """Returns the elements of a list of at most `max_items`."""
        if not isinstance(self._node, yaml.SequenceNode):
            raise self.error(f"{self.path} must be a list, found a {self._kind()}")
        if len(self._node.value) > max_items:
            raise self.error(f"{self.path} has {len(self._node.value)} entries; at most {max_items} are allowed")
        return [Value(node, self.source, f"{self.path}[{index}]") for index, node in enumerate(self._node.value)]

    def is_list(self) -> bool:
        """Says whether `items` would find a list."""
        return isinstance(self._node, yaml.SequenceNode)

    def is_map(self) -> bool:
        """Says whether `entries` would find a map."""
        return isinstance(self._node, yaml.MappingNode)

    def entries(self) -> Iterator[tuple[str, Value]]:
        """Yields (key, value) of a map with scalar keys, in the order of the document. A key that
        appears twice is an error.
        """
        if not isinstance(self._node, yaml.MappingNode):
            raise self.error(f"{self.path or 'the topology'} must be a map of keys, found a {self._kind()}")
        seen: dict[str, int] = {}
        for key_node, value_node in self._node.value:
            key_value = Value(key_node, self.source, self.path)
            if not isinstance(key_node, yaml.ScalarNode):
                raise key_value.error(f"{self.path or 'the topology'}: a key must be a single word")
            key = str(key_node.value)
            path = f"{self.path}.{key}" if self.path else key
            if key in seen:
                raise key_value.error(f"duplicate key {shown(path)}; it is also on line {seen[key]}")
            seen[key] = key_value.line
            yield key, Value(value_node, self.source, path, key=key_node)

    def fields(self, allowed: Iterable[str]) -> dict[str, Value]:
        """Returns a map whose keys must be among `allowed`. A key with an empty value counts as
        absent.
        """
        allowed = list(allowed)
        found = {}
        for key, value in self.entries():
            if key not in allowed:
                hint = did_you_mean(key, allowed) or f"; known keys: {', '.join(allowed)}"
                raise value.error(f"unknown key {shown(value.path)}{hint}")
            if not value.is_null():
                found[key] = value
        return found

    def is_null(self) -> bool:
        """Says whether nothing stands after the key."""
        return isinstance(self._node, yaml.ScalarNode) and self._node.tag == f"{_TAG}null"

    def _kind(self) -> str:
        if isinstance(self._node, yaml.MappingNode):
            return "map"
        return "list" if isinstance(self._node, yaml.SequenceNode) else f"value {shown(str(self._node.value))}"


def compose(text: str, source: str) -> Value:
    """Returns the root of the document. Raises TopologyError when the text is not one document of
    the allowed subset.
    """
    try:
        loader = _SafeComposer(text)
        try:
            node = loader.get_single_node()
        finally:
            loader.dispose()
    except yaml.YAMLError as error:
        raise TopologyError(f"{source}:{_line_of(error, text)}: {_problem_of(error)}") from None
    if node is None:
        raise TopologyError(f"{source}:1: the file is empty; it must start with 'version: 1'")
    return Value(node, source, "")


def _line_of(error: yaml.YAMLError, text: str) -> int:
    mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
    if mark is not None:
        return int(mark.line) + 1
    position = getattr(error, "position", 0)
    return text.count("\n", 0, position if isinstance(position, int) else 0) + 1


def _problem_of(error: yaml.YAMLError) -> str:
    if isinstance(error, yaml.reader.ReaderError):
        return "the file has a character that YAML does not allow"
    problem = " ".join(part for part in (getattr(error, "context", None), getattr(error, "problem", None)) if part)
    return " ".join(problem.split()) or "not YAML"
