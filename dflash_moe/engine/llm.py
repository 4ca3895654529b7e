"""`LLM` is the engine as a Python program uses it: a model, its workers and one engine thread, and
any number of callers that generate, stream or await.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, aclosing
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

from dflash_moe.engine.chat_prompts import ChatPrompts, Message, conversations, is_conversation
from dflash_moe.engine.delivery import Outbox, TokenStream
from dflash_moe.engine.engine import Engine
from dflash_moe.engine.engine_settings import EngineSettings
from dflash_moe.engine.prompt_runs import PromptRun, PromptRuns
from dflash_moe.engine.sampling.sampling_params import SamplingParams
from dflash_moe.engine.text import Chunk, Completion, RequestText
from dflash_moe.errors import ConfigError, DflashError, UnsupportedError, shown
from dflash_moe.experts.expert_runtime import ExpertRuntime
from dflash_moe.forward.fitted import fit_here
from dflash_moe.forward.host_model import open_host
from dflash_moe.forward.kv_budget import most_blocks
from dflash_moe.integrations.generation import stop_token_ids
from dflash_moe.integrations.generation_settings import read_generation_settings
from dflash_moe.integrations.tokenizer import encode, load_tokenizer
from dflash_moe.topology import Topology

if TYPE_CHECKING:
    from dflash_moe.holders.fleet import LoadingReport

log = logging.getLogger(__name__)

# A text, the ids of its tokens, or the messages of a conversation.
Prompt = str | Sequence[int] | Sequence[Message]


class LLM:
    """A model behind an engine. Any thread may call; close it, or use it as a context manager.

        with dm.LLM("path/to/checkpoint", topology=topology) as llm:
            outputs = llm.generate(["a", "b"], dm.SamplingParams(temperature=0))
            answer = llm.chat([{"role": "user", "content": "Hello"}])[0].text

    A prompt is a text, a list of token ids, or a list of messages, which the model's own template
    renders. A request's tokens do not depend on what else runs. Errors name the request;
    ConfigError for what can never be computed, QueueFull for too many waiting requests, and those
    of `ExpertRuntime.experts` where workers are lost.
    """

    def __init__(
        self, model: str | Path, topology: Topology | str | Path | None = None, *, tokenizer: Any = None,
        on_loading: LoadingReport | None = None, **overrides: Any,
    ) -> None:  # fmt: skip
        """Starts the workers of `topology` and loads the model, which is fitted to this machine
        where that is None (forward/fitted.py).
        `tokenizer` stands in for the checkpoint's own, and `overrides` are settings
        (docs/topology.md). A checkpoint without a tokenizer takes token ids, and its completions
        have no text. Errors are those of `ExpertRuntime.start` and `load_model`.
        """
        if topology is None:
            topology = fit_here(model, overrides).topology
        elif not isinstance(topology, Topology):
            topology = Topology.load(Path(topology))
        path = Path(model)
        with ExitStack() as stack:
            self.tokenizer = tokenizer
            # Why there is no tokenizer, where there is none.
            self._no_tokenizer: UnsupportedError | None = None
            if tokenizer is None:
                self._load_tokenizer(path)
            self.runtime = stack.enter_context(ExpertRuntime.start(topology, model=path, on_loading=on_loading, **overrides))
            settings = self.runtime.settings
            self.host = open_host(path, self.runtime, cache=settings.cache)
            self.forward = self.host.engine_forward(
                settings.kv_memory, most_blocks(settings.max_context, settings.max_requests)
            )
            stack.callback(self.forward.close)
            eos = stop_token_ids(self.host.model, self.tokenizer) | read_generation_settings(path).stop_token_ids
            self.engine = stack.enter_context(Engine(self.forward, EngineSettings.of(self.runtime), eos_token_ids=eos))
            self.runtime.note_engine(self.engine.stats)
            self._chats = ChatPrompts(path, self.engine.length_limit.num_tokens)
            stack.callback(self._chats.close)
            self._closing = stack.pop_all()

    def _load_tokenizer(self, path: Path) -> None:
        try:
            self.tokenizer = load_tokenizer(path)
        except UnsupportedError as error:
            self._no_tokenizer = error
            log.warning("only token ids are taken, and completions have no text: %s", error)

    def _need_tokenizer(self, what: str) -> None:
        """Raises UnsupportedError where there is no tokenizer for what needs one."""
        if self._no_tokenizer is not None:
            text = f"{what} needs a tokenizer, and the model comes without one: pass token ids, or LLM(tokenizer=...)"
            raise self._no_tokenizer.reworded(f"{text} ({self._no_tokenizer})")

    @overload
    def submit(
        self, prompt: Prompt, params: SamplingParams | None = None, *, outbox: None = None, cache_salt: bytes = b""
    ) -> TokenStream: ...
    @overload
    def submit(
        self, prompt: Prompt, params: SamplingParams | None = None, *, outbox: Outbox, cache_salt: bytes = b""
    ) -> int: ...
    def submit(
        self, prompt: Prompt, params: SamplingParams | None = None, *, outbox: Outbox | None = None, cache_salt: bytes = b""
    ) -> TokenStream | int:
        """Starts a request and returns the stream of its token ids, without text. With an `outbox`
        they go there, together with those of its other requests, and the request's id is returned.
        What the prefix cache has of a prompt is found by requests with the same `cache_salt` alone.
        """
        return self.engine.submit(self.token_ids(prompt), params, outbox=outbox, cache_salt=cache_salt)

    def cancel(self, request_id: int, choice: int | None = None) -> None:
        """Ends a request, or one choice of it; as `Engine.cancel`."""
        self.engine.cancel(request_id, choice)

    def room(self, num_prompt: int) -> int:
        """Returns the most `max_tokens` that a prompt of so many tokens may ask for, 0 where it is
        too long for any.
        """
        return self.engine.room(num_prompt)

    def drain(self, deadline_s: float) -> bool:
        """Takes no new requests from now on, and waits until the open ones have ended; what has not
        by the deadline is cancelled. Returns whether all have; as `Engine.drain`.
        """
        return self.engine.drain(deadline_s)

    def token_ids(self, prompt: Prompt, *, chat_template_kwargs: Mapping[str, Any] | None = None) -> list[int]:
        """Returns the ids of a text, with what the tokenizer puts before it, or those of a
        conversation, with what begins the next answer; ids stay as they are.
        `chat_template_kwargs` are further variables of the model's template.
        """
        if isinstance(prompt, str):
            self._need_tokenizer("a text")
            return encode(self.tokenizer, prompt)
        if is_conversation(prompt):
            self._need_tokenizer("a conversation")
            return self._chats.token_ids(self.tokenizer, prompt, chat_template_kwargs)  # type: ignore[arg-type]
        if isinstance(prompt, bytes) or not hasattr(prompt, "__iter__"):
            raise ConfigError(f"prompt {shown(prompt)}: expected a text, a sequence of token ids, or a list of messages")
        return [*prompt]  # type: ignore[list-item]

    def generate(
        self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None = None, *,
        on_chunk: Callable[[int, Chunk], None] | None = None,
    ) -> list[Completion]:  # fmt: skip
        """Completes prompts, which are computed together, and returns the choices of the first, of
        the second and so on. `params` are those of all prompts, or one for each; `on_chunk` is
        called with a prompt's place for each chunk, those of several prompts in any order. What it
        raises ends all of them and passes through.

        Where a request fails the others end first, and then its error is raised.
        """
        outcomes = list(self.generate_each(prompts, params, on_chunk=on_chunk))
        for outcome in outcomes:
            if isinstance(outcome, DflashError):
                raise outcome
        return [completion for outcome in outcomes if not isinstance(outcome, DflashError) for completion in outcome]

    def generate_each(
        self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None = None, *,
        on_chunk: Callable[[int, Chunk], None] | None = None,
    ) -> Iterator[list[Completion] | DflashError]:  # fmt: skip
        """As `generate`, but yields for each prompt in turn its choices, or the error that ended it
        while others went on. Prompts that the queue has no room for are submitted as it gets some.
        A caller that stops early cancels the rest.
        """
        return PromptRuns(self._runs(prompts, params), on_chunk).outcomes()

    def chat(
        self, messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams] | None = None, *,
        chat_template_kwargs: Mapping[str, Any] | None = None, on_chunk: Callable[[int, Chunk], None] | None = None,
    ) -> list[Completion]:  # fmt: skip
        """Answers a conversation, or several together, as the model's own template renders them,
        and returns the answers like `generate`. A message has a `role` and a `content`;
        `chat_template_kwargs` are further variables of the template.

        Errors, beside those of `generate`: ConfigError for what is no conversation or what the
        template refuses, UnsupportedError for a model without a template.
        """
        prompts = [self.token_ids(one, chat_template_kwargs=chat_template_kwargs) for one in conversations(messages)]
        return self.generate(prompts, params, on_chunk=on_chunk)

    def _runs(
        self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None
    ) -> list[PromptRun]:
        wanted = _prompts(prompts)
        each = list(params) if isinstance(params, Sequence) else [params] * len(wanted)
        if len(each) != len(wanted):
            raise ConfigError(f"params: {len(each)} were given for {len(wanted)} prompts; pass one, or one for each")
        ids = [self.token_ids(prompt) for prompt in wanted]
        for place, found in enumerate(ids):
            if not found:
                raise ConfigError(f"prompt {place} has no tokens; at least 1 is needed")
        return [self._run(place, *one) for place, one in enumerate(zip(ids, each, strict=True))]

    def _run(self, place: int, token_ids: list[int], params: SamplingParams | None) -> PromptRun:
        return PromptRun(place, len(token_ids), lambda: self._begin(token_ids, params))

    def _begin(self, prompt: Prompt, params: SamplingParams | None) -> RequestText:
        """Starts a request whose text is read."""
        params = SamplingParams() if params is None else params
        if getattr(params, "stop", ()):
            self._need_tokenizer("a stop string")
        return RequestText(self.submit(prompt, params), self.tokenizer, params)

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Generator[Chunk, None, None]:
        """Yields chunks of text as they come; those of several choices in any order. A caller that
        stops early cancels the request.
        """
        yield from self._begin(prompt, params).read()

    async def astream(self, prompt: Prompt, params: SamplingParams | None = None) -> AsyncIterator[Chunk]:
        """As `stream`, for an event loop."""
        async with aclosing(self._begin(prompt, params).aread()) as chunks:
            async for chunk in chunks:
                yield chunk

    def unready_reason(self) -> str:
        """Returns why a request would fail or wait for a worker now, empty where it would not: the
        engine takes none, or as `ExpertRuntime.unready_reason`.
        """
        return self.engine.refusal() or self.runtime.unready_reason()

    def stats(self) -> dict[str, Any]:
        """Returns what engine and runtime counted: `engine` (requests, steps, tokens, blocks and
        times) and what `ExpertRuntime.stats` has.
        """
        return {"engine": self.engine.stats(), **self.runtime.stats()}

    def close(self) -> None:
        """Ends all requests, the engine and the workers. It may be called twice."""
        self._closing.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()


def _prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Returns a list of prompts for one or several."""
    if isinstance(prompts, str) or is_conversation(prompts):
        return [prompts]  # type: ignore[list-item]
    if isinstance(prompts, bytes) or not hasattr(prompts, "__iter__"):
        raise ConfigError(f"prompts {shown(prompts)}: expected a text, token ids, messages, or several of them")
    found: list[Any] = list(prompts)
    # Integers of numpy and torch are ids too; other arrays have a length or no index.
    return [found] if found and all(hasattr(one, "__index__") and not getattr(one, "shape", ()) for one in found) else found
