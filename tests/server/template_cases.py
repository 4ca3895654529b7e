"""The published templates in templates/, and what is found in each.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

from dflash_moe.integrations.chat_template import ChatTemplate, TemplateRenderer
from dflash_moe.server.chat_form import find_chat_form
from dflash_moe.server.chat_probes import Probes
from dflash_moe.server.front.call_forms import HARMONY, JSON, NAMED, PYTHON, TAGGED, ChatForm

FOLDER = Path(__file__).parent / "templates"
# What stands for a tokenizer's special tokens, without one.
_SPECIAL = re.compile(r"<[|｜][^|｜<>\s]{1,40}[|｜]>|\[\|[^|\]]{1,40}\|\]|\[e~\[|<seed:[be]os>")
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}

# By file: the kind of calls or what says why there are none, and the mark of thoughts.
CASES: dict[str, tuple[str, str | None]] = {
    "command-a": (JSON, "<|START_THINKING|>"),
    "command-r7b": ("says nothing of tools", None),
    "deepseek-r1": (NAMED, "<think>"),
    "deepseek-r1-distill": ("says nothing of tools", "<think>"),
    "deepseek-v3": ("says nothing of tools", "<think>"),
    "deepseek-v3.1": (NAMED, "<think>"),
    "exaone-4": (JSON, "<think>"),
    "functionary-3.1": (NAMED, None),
    "gemma-3": ("says nothing of tools", None),
    "glm-4.5": (TAGGED, "<think>"),
    "gpt-oss": (HARMONY, ""),
    "granite-3.3": ("writes no calls", None),
    "granite-4": (JSON, None),
    "hermes-3": (JSON, None),
    "jamba": (JSON, None),
    "kimi-k2.5": (NAMED, "<think>"),
    "lfm2.5": (PYTHON, "<think>"),
    "llama-3.1": (JSON, None),
    "llama-3.2": (JSON, None),
    "llama-4": ("read otherwise", None),
    "minimax-m2": (TAGGED, "<think>"),
    "mistral-7b-v0.3": (JSON, None),
    "mistral-nemo": (JSON, None),
    "nemotron-3-nano": (TAGGED, "<think>"),
    "phi-4-mini": ("says nothing of tools", None),
    "qwen2.5": (JSON, None),
    "qwen3": (JSON, "<think>"),
    "qwen3-2507": (JSON, None),
    "qwen3-coder": (TAGGED, None),
    "qwen3.5": (TAGGED, "<think>"),
    "qwq-32b": (JSON, "<think>"),
    "seed-oss": (TAGGED, "<seed:think>"),
    "smollm3": ("says nothing of tools", None),
}
KINDS = (JSON, NAMED, TAGGED, PYTHON, HARMONY)


def text_of(name: str) -> str:
    return (FOLDER / f"{name}.jinja").read_text(encoding="utf-8")


def special_of(name: str) -> list[str]:
    return sorted({*_SPECIAL.findall(text_of(name)), *TOKENS.values()})


@cache
def form_of(name: str) -> ChatForm:
    """What is found in a template, once for all tests of a process."""
    text = text_of(name)
    with TemplateRenderer(ChatTemplate(text, name), TOKENS) as renderer:
        return find_chat_form(Probes(text, renderer.render, special_of(name)))
