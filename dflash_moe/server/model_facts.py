"""What a front is told of a model: its tokenizer, its template, its limits, and how it is sampled
where a request does not say.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dflash_moe.errors import UnsupportedError
from dflash_moe.integrations.chat_template import (
    ChatTemplate,
    TemplateRenderer,
    find_chat_template,
    find_tool_template,
    most_text_bytes,
    special_tokens,
)
from dflash_moe.integrations.generation_settings import read_generation_settings
from dflash_moe.server.chat_form import find_chat_form
from dflash_moe.server.chat_probes import Probes
from dflash_moe.server.front.call_forms import ChatForm

# A front names no folder of this machine to its callers.
_ORIGIN = "the model's chat template"
_NO_TEMPLATE = "the model has no chat template"

if TYPE_CHECKING:
    from dflash_moe.engine.llm import LLM


def tokenizer_facts(tokenizer: Any) -> dict[str, Any]:
    """Returns a tokenizer as the front takes it. Raises UnsupportedError for one that is no fast
    one: only those can be handed to a process without transformers.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or not hasattr(backend, "to_str"):
        raise UnsupportedError(
            f"the model's tokenizer is a {type(tokenizer).__name__}, which only its own Python code can run, and the server's "
            "front has none of that: put a tokenizer.json beside config.json (transformers writes one with save_pretrained)"
        )
    text = backend.to_str()
    parsed = json.loads(text)
    is_bpe = parsed.get("model", {}).get("type") == "BPE"
    # transformers does not tidy what byte pairs make unless it is told to corrupt it.
    cleans_up = bool(getattr(tokenizer, "clean_up_tokenization_spaces", False)) and not is_bpe
    return {
        "json": text,
        "special_ids": [int(token_id) for token_id in tokenizer.all_special_ids],
        "cleans_up": cleans_up,
        # Whether its tokens are spelt with a letter for each byte.
        "has_byte_letters": "ByteLevel" in json.dumps(parsed.get("decoder")),
        "splits_special_tokens": bool(getattr(tokenizer, "split_special_tokens", False)),
        # Those that no text is made into, which a grammar names.
        "special": {token["content"]: token["id"] for token in parsed.get("added_tokens", ()) if token.get("special")},
    }


def template_facts(path: Path, tokenizer: Any) -> dict[str, Any]:
    """Returns a model's chat template, or why there is none. Raises CheckpointError for something
    else in its place.
    """
    try:
        found = find_chat_template(path, tokenizer)
    except UnsupportedError as error:
        return {
            "template": "", "template_origin": "", "special_tokens": {}, "no_template": str(error), "tool_template": "",
            "chat_form": ChatForm(no_calls=_NO_TEMPLATE, no_thoughts=_NO_TEMPLATE).facts(),
        }  # fmt: skip
    with_tools = find_tool_template(path, tokenizer)
    names = special_tokens(tokenizer)
    form = _form_of(found, names, tokenizer)
    if with_tools is not None:
        calls = _form_of(with_tools, names, tokenizer)
        form = replace(form, calls=calls.calls, no_calls=calls.no_calls)
    return {
        "template": found.text, "template_origin": _ORIGIN, "special_tokens": names, "no_template": "",
        "tool_template": "" if with_tools is None else with_tools.text, "chat_form": form.facts(),
    }  # fmt: skip


def _form_of(template: ChatTemplate, names: Mapping[str, str], tokenizer: Any) -> ChatForm:
    """Returns how the answers of a model with this template are read."""
    added = tokenizer.backend_tokenizer.get_added_tokens_decoder().values()
    with TemplateRenderer(ChatTemplate(template.text, _ORIGIN), names) as renderer:
        return find_chat_form(Probes(template.text, renderer.render, [token.content for token in added if token.special]))


def model_facts(path: Path, llm: LLM, deciding: Mapping[str, Any]) -> dict[str, Any]:
    """Returns all that a front is told of a loaded model. `deciding` is what else decides tokens,
    of JSON's types: the fingerprint names both.
    """
    max_model_len = llm.engine.length_limit.num_tokens
    facts = {
        "tokenizer": tokenizer_facts(llm.tokenizer),
        **template_facts(path, llm.tokenizer),
        # As `chat` has it: what the checkpoint recommends, else the most likely token.
        "sampling": {"temperature": 0.0, **read_generation_settings(path).sampling},
        "max_model_len": max_model_len,
        "max_text_bytes": most_text_bytes(llm.tokenizer, max_model_len),
        "vocab_size": llm.forward.vocab_size,
        "end_ids": sorted(llm.engine.eos_token_ids),
        # It decides what a grammar allows.
        "llguidance": metadata.version("llguidance"),
    }
    digest = hashlib.sha256(json.dumps([facts, deciding], sort_keys=True).encode())
    # How many may wait decides no token.
    return {**facts, "max_queue": llm.engine.settings.max_queue, "fingerprint": f"fp_{digest.hexdigest()[:16]}"}
