"""What `bench streaming` asks for: prompts that no cache has, of a length in the server's tokens.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from dflash_moe.bench.streaming.endpoint import Endpoint
from dflash_moe.bench.streaming.stream import Streamed, stream
from dflash_moe.errors import ConfigError, DflashError

CHAT, COMPLETIONS = "chat", "completions"
ROUTES = {CHAT: "chat/completions", COMPLETIONS: "completions"}
# Any tokenizer of 2,000 tokens has text here: marks and bytes have ids below (in one of Mistral's
# the first thousand) or at the very end.
TOKEN_IDS = range(1000, 2000)
# Most tokenizers have a token for each of these words and the space before it.
WORDS = (
    "time", "people", "way", "water", "word", "number", "part", "sound", "work", "place", "year", "back", "name", "line",
    "home", "hand", "high", "light", "city", "night", "world", "land", "school", "food", "head", "side", "door", "road",
    "house", "point", "page", "letter", "mother", "answer", "study", "plant", "cover", "sun", "thought", "eye", "state",
    "tree", "story", "life", "paper", "group", "music", "book", "river", "car", "feet", "second", "idea", "fish", "mountain",
    "base", "horse", "color", "face", "wood", "list", "bird", "body", "dog",
)  # fmt: skip
# Two texts of so many words say how many tokens a word has, and how many a text has beside them.
PROBES = 8, 72
# Fields that a server may not know: without them tokens are counted and ended otherwise, and the
# bench still measures.
OPTIONAL = ("ignore_eos", "continuous_usage_stats", "stream_interval")
LEAST_STATUS, MOST_STATUS = 400, 422


@dataclass(slots=True)
class Prompts:
    """Makes bodies of requests. `fit` finds out how the server counts, and comes first. `fields`
    stand in every body beside its own.
    """

    endpoint: Endpoint
    model: str
    kind: str
    prompt_tokens: int
    new_tokens: int
    temperature: float
    seed: int
    is_pretok: bool = False
    stream_interval: int = 1
    tokens_per_word: float = 1.0
    # The tokens of a text without words: marks of a template, and of the beginning.
    own_tokens: float = 0.0
    left_out: list[str] = field(default_factory=list)
    fields: Mapping[str, Any] = field(default_factory=dict)

    def request(self, *name: object) -> bytes:
        """Returns a whole HTTP request. Its prompt is drawn from the seed and from `name`, so that
        another one has another prompt from its first token on.
        """
        drawn = random.Random(f"{self.seed} {name}")
        if self.is_pretok:
            return self._request(drawn.choices(TOKEN_IDS, k=self.prompt_tokens), self.new_tokens)
        count = max(1, round((self.prompt_tokens - self.own_tokens) / self.tokens_per_word))
        return self._request(_text(drawn, count), self.new_tokens)

    def fit(self, timeout_s: float, say: Callable[[str], None]) -> None:
        """Asks for a token twice, and reads how many tokens the server counts in each prompt.
        Raises ConfigError for a server that is not there or does not take such requests, and
        DflashError for one that cannot answer now.
        """
        drawn = random.Random(f"{self.seed} probe")
        if self.is_pretok:
            self._ask(drawn.choices(TOKEN_IDS, k=PROBES[0]), timeout_s, say)
            return
        few, many = (self._ask(_text(drawn, count), timeout_s, say) for count in PROBES)
        self.tokens_per_word = max((many - few) / (PROBES[1] - PROBES[0]), 0.1)
        self.own_tokens = max(few - PROBES[0] * self.tokens_per_word, 0.0)

    def _ask(self, prompt: str | list[int], timeout_s: float, say: Callable[[str], None]) -> int:
        while True:
            found = Streamed()
            asyncio.run(stream(self.endpoint, self._request(prompt, 1), found, timeout_s))
            unknown = [name for name in OPTIONAL if name in found.error and name not in self.left_out]
            if not unknown or not LEAST_STATUS <= found.status <= MOST_STATUS:
                break
            say(f"the server does not know {', '.join(unknown)}, which is left out ({found.error})")
            self.left_out += unknown
        if not found.error:
            return found.prompt_tokens or 0
        if found.status == 0:
            raise ConfigError(f"{self.endpoint.url}: {found.error}; is an OpenAI-compatible server listening there?")
        text = f"{self.endpoint.url}: the first request failed: {found.error}"
        is_ours = LEAST_STATUS <= found.status <= MOST_STATUS
        raise (ConfigError if is_ours else DflashError)(text)

    def _request(self, prompt: str | list[int], max_tokens: int) -> bytes:
        options: dict[str, Any] = {"include_usage": True}
        body: dict[str, Any] = {
            "model": self.model, "max_tokens": max_tokens, "temperature": self.temperature, "stream": True,
            "stream_options": options, "ignore_eos": True, **self.fields,
        }  # fmt: skip
        if self.kind == CHAT:
            body["messages"] = [{"role": "user", "content": prompt}]
        else:
            body["prompt"] = prompt
        if self.stream_interval > 1:
            # Events with several tokens must say how many they have.
            body["stream_interval"], options["continuous_usage_stats"] = self.stream_interval, True
        return self.endpoint.request(ROUTES[self.kind], _without(body, self.left_out))


def _without(body: Mapping[str, Any], left_out: list[str]) -> bytes:
    kept = {name: value for name, value in body.items() if name not in left_out}
    kept["stream_options"] = {name: value for name, value in body["stream_options"].items() if name not in left_out}
    return json.dumps(kept, separators=(",", ":")).encode()


def _text(drawn: random.Random, count: int) -> str:
    return " ".join(drawn.choices(WORDS, k=count))
