"""Closed schemas for control messages: the kinds of fields with their limits, and a msgpack codec
over them that is total.

Any bytes decode either to a message whose every field is within its limits, or to a ProtocolError
that names the message and the field. Maps carry integer keys, of which 0 is the message type.
Extension types, duplicate keys and unknown keys are refused.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import dataclasses
import math
import typing
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import msgpack

from dflash_moe.errors import ProtocolError

# The largest message defines a shard of one layer in about 4 KiB, so that this leaves 16 times the
# room.
MAX_FRAME_BYTES = 64 * 1024
# These bound a Tree, so that a peer can make this end neither recurse deeply nor walk for long.
TREE_DEPTH = 5
TREE_NODES = 2048


class FieldKind(Protocol):
    """The kind of a field. `check` returns a decoded value as the message holds it, or raises with
    a text that follows the name of the field; `describe` is the kind's text in docs/protocol.md.
    """

    def check(self, value: Any) -> Any: ...

    def describe(self) -> str: ...


class _Refused(Exception):
    """A value is outside its kind. The text says what was found and what is allowed."""


def _found(value: Any) -> str:
    text = repr(value)
    return f"{type(value).__name__} {text[:60]}{'...' if len(text) > 60 else ''}"


@dataclass(frozen=True, slots=True)
class Uint:
    """An unsigned integer up to `maximum`."""

    maximum: int = 2**64 - 1

    def check(self, value: Any) -> int:
        if type(value) is not int or not 0 <= value <= self.maximum:
            raise _Refused(f"found {_found(value)}, allowed is an integer 0..{self.maximum}")
        return value

    def describe(self) -> str:
        return f"uint <= {self.maximum}"


@dataclass(frozen=True, slots=True)
class Float:
    """A finite float within [minimum, maximum]. Integers are accepted and widened."""

    minimum: float = 0.0
    maximum: float = 1e9

    def check(self, value: Any) -> float:
        if type(value) not in (int, float) or not math.isfinite(value) or not self.minimum <= value <= self.maximum:
            raise _Refused(f"found {_found(value)}, allowed is a number {self.minimum}..{self.maximum}")
        return float(value)

    def describe(self) -> str:
        return f"float {self.minimum}..{self.maximum}"


@dataclass(frozen=True, slots=True)
class Flag:
    """True or false."""

    def check(self, value: Any) -> bool:
        if type(value) is not bool:
            raise _Refused(f"found {_found(value)}, allowed is true or false")
        return value

    def describe(self) -> str:
        return "bool"


@dataclass(frozen=True, slots=True)
class Text:
    """UTF-8 text of at most `max_bytes` bytes."""

    max_bytes: int = 256

    def check(self, value: Any) -> str:
        if type(value) is not str or len(value.encode("utf-8", "surrogatepass")) > self.max_bytes:
            raise _Refused(f"found {_found(value)}, allowed is text of at most {self.max_bytes} bytes")
        return value

    def describe(self) -> str:
        return f"text <= {self.max_bytes} bytes"


@dataclass(frozen=True, slots=True)
class Binary:
    """Exactly `num_bytes` bytes, or where it `may_be_shorter` at most so many."""

    num_bytes: int
    may_be_shorter: bool = False

    def check(self, value: Any) -> bytes:
        least = 0 if self.may_be_shorter else self.num_bytes
        if type(value) is not bytes or not least <= len(value) <= self.num_bytes:
            found = f"{len(value)} bytes" if type(value) is bytes else _found(value)
            how = "at most" if self.may_be_shorter else "exactly"
            raise _Refused(f"found {found}, allowed is a binary of {how} {self.num_bytes} bytes")
        return value

    def describe(self) -> str:
        return f"binary, {'at most ' if self.may_be_shorter else ''}{self.num_bytes} bytes"


@dataclass(frozen=True, slots=True)
class ListOf:
    """At most `max_items` items of one kind, which arrive as a tuple."""

    item: FieldKind
    max_items: int

    def check(self, value: Any) -> tuple[Any, ...]:
        if type(value) not in (list, tuple) or len(value) > self.max_items:
            raise _Refused(f"found {_found(value)}, allowed is a list of at most {self.max_items} items")
        return tuple(self.item.check(item) for item in value)

    def describe(self) -> str:
        return f"list of at most {self.max_items}: {self.item.describe()}"


@dataclass(frozen=True, slots=True)
class Table:
    """A map of at most `max_items` text keys to values of one kind."""

    item: FieldKind
    max_items: int

    def check(self, value: Any) -> dict[str, Any]:
        if type(value) is not dict or len(value) > self.max_items:
            raise _Refused(f"found {_found(value)}, allowed is a map of at most {self.max_items} entries")
        key_kind = Text(128)
        return {key_kind.check(key): self.item.check(item) for key, item in value.items()}

    def describe(self) -> str:
        return f"map of at most {self.max_items}: text -> {self.item.describe()}"


@dataclass(frozen=True, slots=True)
class Tree:
    """Nested maps, lists and scalars of bounded depth and size. Who reads the field checks it
    further (`FfnSpec.from_wire`).
    """

    def check(self, value: Any) -> Any:
        nodes = 0
        stack: list[tuple[Any, int]] = [(value, 1)]
        while stack:
            node, depth = stack.pop()
            nodes += 1
            if nodes > TREE_NODES or depth > TREE_DEPTH:
                raise _Refused(f"found a tree over {TREE_NODES} nodes or {TREE_DEPTH} levels")
            if type(node) is dict:
                if any(type(key) not in (int, str) for key in node):
                    raise _Refused("found a map key that is neither integer nor text")
                stack.extend((item, depth + 1) for item in node.values())
            elif type(node) in (list, tuple):
                stack.extend((item, depth + 1) for item in node)
            elif node is not None and type(node) not in (bool, int, float, str, bytes):
                raise _Refused(f"found {_found(node)}, allowed are maps, lists and scalars")
        return value

    def describe(self) -> str:
        return f"tree of at most {TREE_NODES} nodes, {TREE_DEPTH} levels"


@dataclass(frozen=True, slots=True)
class Wire:
    """The annotation of a message's field: its integer key and its kind."""

    key: int
    kind: FieldKind


class Message:
    """The base of all messages. Subclasses are frozen dataclasses whose fields are annotated with
    `Wire`.
    """

    __slots__ = ()
    TYPE: ClassVar[int] = 0


@dataclass(frozen=True, slots=True)
class FieldSchema:
    """One field as declared, with what the codec and the tables of docs/protocol.md need."""

    name: str
    key: int
    kind: FieldKind
    # This is dataclasses.MISSING when the field is required.
    default: Any


@dataclass(frozen=True, slots=True)
class MessageSchema:
    """A message class with all its fields."""

    cls: type[Message]
    fields: tuple[FieldSchema, ...]


def schema_of(cls: type[Message]) -> MessageSchema:
    """Reads the annotations of a message class. Raises TypeError where two fields share a key or
    one has key 0, which is an error of whoever wrote the class.
    """
    hints = typing.get_type_hints(cls, include_extras=True)
    found: list[FieldSchema] = []
    for item in dataclasses.fields(typing.cast(Any, cls)):
        wire = next(note for note in hints[item.name].__metadata__ if isinstance(note, Wire))
        found.append(FieldSchema(item.name, wire.key, wire.kind, item.default))
    keys = [item.key for item in found]
    if 0 in keys or len(set(keys)) != len(keys):
        raise TypeError(f"{cls.__name__}: field keys must be distinct and not 0, found {keys}")
    return MessageSchema(cls, tuple(found))


class Codec:
    """Encodes and decodes the messages of one table. Any thread may call."""

    def __init__(self, classes: Iterable[type[Message]]) -> None:
        self.schemas = {cls.TYPE: schema_of(cls) for cls in classes}

    def encode(self, message: Message) -> bytes:
        """Returns the msgpack form. Raises ProtocolError when a field is outside its limits or the
        whole exceeds a frame.
        """
        schema = self.schemas[message.TYPE]
        body: dict[int, Any] = {0: message.TYPE}
        for item in schema.fields:
            body[item.key] = _checked(schema, item, getattr(message, item.name))
        payload: bytes = msgpack.packb(body, use_bin_type=True)
        if len(payload) > MAX_FRAME_BYTES:
            name = schema.cls.__name__
            raise ProtocolError(f"message {name}: {len(payload)} bytes exceed the frame limit of {MAX_FRAME_BYTES}")
        return payload

    def decode(self, payload: bytes, *, ignore_unknown: bool = False) -> Message:
        """Returns the message that `payload` holds, or raises ProtocolError.

        `ignore_unknown` drops unknown fields instead of refusing them. A connection sets it only
        when the peer announced a higher minor version.
        """
        body = _unpack(payload)
        kind = body.pop(0, None)
        schema = self.schemas.get(kind) if type(kind) is int else None
        if schema is None:
            raise ProtocolError(f"message type: found {_found(kind)}, known are {sorted(self.schemas)}")
        values: dict[str, Any] = {}
        for item in schema.fields:
            if item.key in body:
                values[item.name] = _checked(schema, item, body.pop(item.key))
            elif item.default is dataclasses.MISSING:
                raise ProtocolError(f"message {schema.cls.__name__}: field {item.name} ({item.key}) is missing")
        if body and not ignore_unknown:
            raise ProtocolError(f"message {schema.cls.__name__}: unknown field {next(iter(body))!r}")
        return schema.cls(**values)


def _checked(schema: MessageSchema, item: FieldSchema, value: Any) -> Any:
    try:
        return item.kind.check(value)
    except _Refused as refused:
        raise ProtocolError(f"message {schema.cls.__name__}: field {item.name}: {refused}") from None


def _unique_pairs(pairs: list[tuple[Any, Any]]) -> dict[Any, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a map has a duplicate key")
    return result


def _refuse_extension(code: int, _payload: bytes) -> Any:
    raise ValueError(f"extension type {code} is not allowed")


def _unpack(payload: bytes) -> dict[Any, Any]:
    if len(payload) > MAX_FRAME_BYTES:
        raise ProtocolError(f"frame: {len(payload)} bytes exceed the limit of {MAX_FRAME_BYTES}")
    try:
        body = msgpack.unpackb(
            payload,
            raw=False,
            strict_map_key=False,
            object_pairs_hook=_unique_pairs,
            ext_hook=_refuse_extension,
        )
    except (ValueError, TypeError, RecursionError, msgpack.UnpackException) as error:
        raise ProtocolError(f"frame: not a msgpack message: {str(error)[:200]}") from None
    if type(body) is not dict:
        raise ProtocolError(f"frame: found {_found(body)}, allowed is a map with integer keys")
    return body
