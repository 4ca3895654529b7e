"""Makes the reader of a message for a form.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dflash_moe.server.front.call_forms import ChatForm
from dflash_moe.server.front.form_reader import FormReader
from dflash_moe.server.front.harmony_reader import HarmonyReader
from dflash_moe.server.front.message_pieces import MessageReader, PlainReader


def new_reader(
    form: ChatForm, tools: Mapping[str, Any], *, is_thinking: bool = False, is_single: bool = False
) -> MessageReader:
    """Returns a reader for one choice. `tools` are the schemas of arguments by name, `is_thinking`
    says that the prompt has begun a thought, `is_single` that a message ends with its first call.
    """
    if form.is_harmony:
        return HarmonyReader(tools, is_single=is_single)
    if form.thoughts is None and (form.calls is None or not tools):
        return PlainReader()
    return FormReader(form.calls, form.thoughts, tools, is_thinking=is_thinking, is_single=is_single)
