"""What tests of the server need: a front for a whole file, which takes seconds to start.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.server.served import LARGE, Served, ids_of, served


@pytest.fixture(scope="module")
def front() -> Iterator[Served]:
    """A front before a scripted engine that repeats prompts."""
    with served(names=["demo", "gpt-4o"]) as found:
        # The processes that read, render and compile what was sent live as long as all tests.
        asked = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1, "guided_regex": "a", **LARGE}
        found.post("/v1/chat/completions", asked)
        yield found


@pytest.fixture
def says(front: Served) -> Iterator[Callable[[str], None]]:
    """Lets the engine answer with a text and end."""
    repeating = front.engine.answer

    def say(text: str) -> None:
        front.engine.answer = lambda _prompt, _choice: ids_of(text)

    yield say
    front.engine.answer = repeating
