"""Reads what `generate` is to complete: one text, or a file of JSON lines with several prompts,
each with sampling parameters of its own.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable
from dataclasses import dataclass
from io import TextIOWrapper
from pathlib import Path
from typing import Any

from dflash_moe.config.values import did_you_mean
from dflash_moe.engine.sampling.sampling_params import SamplingParams
from dflash_moe.errors import ConfigError, shown
from dflash_moe.named_files import open_named

# A file with such a name has JSON lines, whatever is in it, and one with such a name never.
LINES_SUFFIX = ".jsonl"
TEXT_SUFFIX = ".txt"
PROMPT = "prompt"
# A mask is a program, which no file holds.
FIELDS = tuple(field.name for field in dataclasses.fields(SamplingParams) if field.name != "token_mask")


@dataclass(frozen=True, slots=True)
class GivenPrompt:
    """A text to complete, how, and where it stands: a flag, or FILE:LINE."""

    text: str
    params: SamplingParams
    origin: str


@dataclass(frozen=True, slots=True)
class GivenPrompts:
    """All that is to complete. `are_lines` is set for JSON lines, where one line is one prompt, and
    one result too.
    """

    prompts: tuple[GivenPrompt, ...]
    are_lines: bool = False


def given_prompts(prompt: str | None, prompt_file: Path | None, params: SamplingParams) -> GivenPrompts:
    """Returns what --prompt or --prompt-file gives. `params` holds for what a line does not say.
    Raises ConfigError that names the flag, or file, line and field.
    """
    if (prompt is None) == (prompt_file is None):
        raise ConfigError("pass the text to complete with --prompt TEXT or --prompt-file FILE, and not both")
    if prompt_file is None:
        assert prompt is not None
        return GivenPrompts((GivenPrompt(_encodable(prompt, "--prompt"), params, "--prompt"),))
    origin = f"--prompt-file {prompt_file}"
    try:
        with TextIOWrapper(open_named(prompt_file), encoding="utf-8") as file:
            text = file.read()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"{origin}: cannot be read as UTF-8 text: {reason}; name a text file, or use --prompt") from None
    if not _has_lines(prompt_file, text):
        return GivenPrompts((GivenPrompt(text, params, origin),))
    return GivenPrompts(tuple(_read_lines(str(prompt_file), text, params)), are_lines=True)


def _has_lines(path: Path, text: str) -> bool:
    suffix = path.suffix.lower()
    if suffix in (LINES_SUFFIX, TEXT_SUFFIX):
        return suffix == LINES_SUFFIX
    # A file with another ending has prompts by lines if each line is a prompt's JSON: nobody wants
    # that completed as one text.
    lines = [line for line in text.split("\n") if line.strip()]
    return bool(lines) and all(_is_prompt_object(line) for line in lines)


def _is_prompt_object(line: str) -> bool:
    if not line.lstrip().startswith("{"):
        return False
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return False
    return PROMPT in found


def _read_lines(path: str, text: str, params: SamplingParams) -> Iterable[GivenPrompt]:
    found = [
        _read_line(f"{path}:{number}", line, params) for number, line in enumerate(text.split("\n"), start=1) if line.strip()
    ]
    if not found:
        raise ConfigError(f'--prompt-file {path}: it has no prompt; write one a line, such as {{"{PROMPT}": "Once"}}')
    return found


def _read_line(origin: str, line: str, params: SamplingParams) -> GivenPrompt:
    try:
        value = json.loads(line, object_pairs_hook=lambda pairs: _without_twins(origin, pairs))
    except ConfigError:
        raise
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{origin}: not JSON ({error}); each line is a string or an object") from None
    if isinstance(value, str):
        value = {PROMPT: value}
    if not isinstance(value, dict):
        raise ConfigError(f'{origin}: {shown(value)} is no prompt; write a JSON string, or an object with "{PROMPT}"')
    for name in value:
        if name not in (PROMPT, *FIELDS):
            hint = did_you_mean(name, (PROMPT, *FIELDS))
            raise ConfigError(f"{origin}: unknown field {shown(name)}{hint}; allowed: {', '.join((PROMPT, *FIELDS))}")
    text = value.pop(PROMPT, None)
    if not isinstance(text, str) or not text:
        raise ConfigError(f'{origin}: "{PROMPT}" is {shown(text)}; expected a text of at least one character')
    try:
        return GivenPrompt(_encodable(text, f"{origin}: {PROMPT}"), dataclasses.replace(params, **_typed(value)), origin)
    except ConfigError as error:
        text = str(error)
        raise ConfigError(text if text.startswith(origin) else f"{origin}: {text}") from None


def _without_twins(origin: str, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twin = next(name for name in names if names.count(name) > 1)
        raise ConfigError(f"{origin}: field {shown(twin)} is there twice")
    return found


def _typed(fields: dict[str, Any]) -> dict[str, Any]:
    """Returns the fields as `SamplingParams` takes them: the keys of a JSON object are texts."""
    bias = fields.get("logit_bias")
    if isinstance(bias, dict):
        keys = {key: int(key) if key.isascii() and key.isdigit() and len(key) < 12 else key for key in bias}
        fields["logit_bias"] = {keys[key]: value for key, value in bias.items()}
    return fields


def _encodable(text: str, origin: str) -> str:
    """Returns a text that tokenizers take. An argument may hold bytes that are no UTF-8, and JSON
    half a surrogate pair.
    """
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ConfigError(f"{origin}: character {error.start} is no Unicode text; write UTF-8") from None
    return text
