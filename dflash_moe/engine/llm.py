"""`LLM` is the engine as a Python program uses it: a model, its workers and one engine thread, and
any number of callers that generate, stream or await.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Callable, Generator, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dflash_moe.engine.delivery import TokenStream
from dflash_moe.engine.engine import Engine
from dflash_moe.engine.engine_settings import EngineSettings
from dflash_moe.engine.fitted import fit_here
from dflash_moe.engine.host_model import open_host
from dflash_moe.engine.kv_budget import most_blocks
from dflash_moe.engine.request import TokenDelta
from dflash_moe.engine.sampling_params import SamplingParams
from dflash_moe.engine.text import ChoiceText, Chunk, Completion
from dflash_moe.errors import ConfigError, DflashError, QueueFull, shown
from dflash_moe.integrations.generation import stop_token_ids
from dflash_moe.integrations.generation_settings import read_generation_settings
from dflash_moe.integrations.tokenizer import encode, load_tokenizer
from dflash_moe.runtime.expert_runtime import ExpertRuntime
from dflash_moe.topology import Topology

if TYPE_CHECKING:
    from dflash_moe.runtime.fleet import LoadingReport

# A text, or the ids of its tokens.
Prompt = str | Sequence[int]


class LLM:
    """A model behind an engine. Any thread may call; close it, or use it as a context manager.

        with dm.LLM("path/to/checkpoint", topology=topology) as llm:
            outputs = llm.generate(["a", "b"], dm.SamplingParams(temperature=0))

    A request's tokens do not depend on what else runs. Errors name the request; ConfigError for
    what can never be computed, QueueFull for too many waiting requests, and those of
    `ExpertRuntime.experts` where workers are lost.
    """

    def __init__(
        self, model: str | Path, topology: Topology | str | Path | None = None, *, tokenizer: Any = None,
        on_loading: LoadingReport | None = None, **overrides: Any,
    ) -> None:  # fmt: skip
        """Starts the workers of `topology` and loads the model, which is fitted to this machine
        where that is None (engine/fitted.py).
        `tokenizer` stands in for the checkpoint's own, and `overrides` are settings
        (docs/topology.md). Errors are those of `ExpertRuntime.start` and `load_model`.
        """
        if topology is None:
            topology = fit_here(model, overrides).topology
        elif not isinstance(topology, Topology):
            topology = Topology.load(Path(topology))
        path = Path(model)
        with ExitStack() as stack:
            self.tokenizer = load_tokenizer(path) if tokenizer is None else tokenizer
            self.runtime = stack.enter_context(ExpertRuntime.start(topology, model=path, on_loading=on_loading, **overrides))
            self.host = open_host(path, self.runtime)
            settings = self.runtime.settings
            self.forward = self.host.engine_forward(
                settings.kv_memory, most_blocks(settings.max_context, settings.max_requests)
            )
            stack.callback(self.forward.close)
            eos = stop_token_ids(self.host.model, self.tokenizer) | read_generation_settings(path).stop_token_ids
            self.engine = stack.enter_context(Engine(self.forward, EngineSettings.of(self.runtime), eos_token_ids=eos))
            self._closing = stack.pop_all()

    def submit(self, prompt: Prompt, params: SamplingParams | None = None) -> TokenStream:
        """Starts a request and returns the stream of its token ids, without text."""
        return self.engine.submit(self.token_ids(prompt), params)

    def token_ids(self, prompt: Prompt) -> list[int]:
        """Returns the ids of a text, with what the tokenizer puts before it; ids stay as they
        are.
        """
        if isinstance(prompt, str):
            return encode(self.tokenizer, prompt)
        if isinstance(prompt, bytes) or not hasattr(prompt, "__iter__"):
            raise ConfigError(f"prompt {shown(prompt)}: expected a text, or a sequence of token ids")
        return [*prompt]

    def generate(
        self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None = None, *,
        on_chunk: Callable[[int, Chunk], None] | None = None,
    ) -> list[Completion]:  # fmt: skip
        """Completes prompts, which are computed together, and returns the choices of the first, of
        the second and so on. `params` are those of all prompts, or one for each; `on_chunk` is
        called with a prompt's place for each chunk.

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
        runs = self._runs(prompts, params, on_chunk)
        return _outcomes(deque(runs))

    def _runs(
        self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None,
        on_chunk: Callable[[int, Chunk], None] | None,
    ) -> list[_Run]:  # fmt: skip
        wanted = _prompts(prompts)
        each = list(params) if isinstance(params, Sequence) else [params] * len(wanted)
        if len(each) != len(wanted):
            raise ConfigError(f"params: {len(each)} were given for {len(wanted)} prompts; pass one, or one for each")
        ids = [self.token_ids(prompt) for prompt in wanted]
        for place, found in enumerate(ids):
            if not found:
                raise ConfigError(f"prompt {place} has no tokens; at least 1 is needed")
        return [_Run(self, place, *one, on_chunk) for place, one in enumerate(zip(ids, each, strict=True))]

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Generator[Chunk, None, None]:
        """Yields chunks of text as they come; those of several choices in any order. A caller that
        stops early cancels the request.
        """
        text = _StreamText(self, prompt, params)
        try:
            while deltas := text.stream.take():
                yield from text.chunks(deltas)
        finally:
            text.stream.cancel()

    async def astream(self, prompt: Prompt, params: SamplingParams | None = None) -> AsyncIterator[Chunk]:
        """As `stream`, for an event loop."""
        text = _StreamText(self, prompt, params)
        try:
            while deltas := await text.stream.atake():
                for chunk in text.chunks(deltas):
                    yield chunk
        finally:
            text.stream.cancel()

    def unready_reason(self) -> str:
        """Returns why a request would fail or wait for a worker now, empty where it would not; see
        `ExpertRuntime.unready_reason`.
        """
        return self.runtime.unready_reason()

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


class _StreamText:
    """A running request and the text of its choices."""

    def __init__(self, llm: LLM, prompt: Prompt, params: SamplingParams | None) -> None:
        params = SamplingParams() if params is None else params
        self.stream = llm.submit(prompt, params)
        self.texts = [ChoiceText(llm.tokenizer, params.stop, choice) for choice in range(params.n)]

    def chunks(self, deltas: list[TokenDelta]) -> Iterator[Chunk]:
        """Yields the chunks of deltas. A choice that has met its stop string is cancelled."""
        for delta in deltas:
            text = self.texts[delta.choice]
            chunk = text.push(delta)
            if chunk is not None:
                if text.is_stopped and delta.finish_reason is None:
                    self.stream.cancel(delta.choice)
                yield chunk


class _Run:
    """One prompt of `LLM.generate`."""

    def __init__(
        self, llm: LLM, place: int, token_ids: list[int], params: SamplingParams | None,
        on_chunk: Callable[[int, Chunk], None] | None,
    ) -> None:  # fmt: skip
        self._llm, self._place, self._token_ids, self._params, self._on_chunk = (
            llm,
            place,
            token_ids,
            params,
            on_chunk,
        )
        self._text: _StreamText | None = None
        self._error: DflashError | None = None

    def begin(self) -> bool:
        """Submits the prompt, and returns whether the queue had room for it. What else refuses it
        is its outcome.
        """
        self._error = None
        try:
            self._text = _StreamText(self._llm, self._token_ids, self._params)
        except DflashError as error:
            self._error = error
        return not isinstance(self._error, QueueFull)

    def outcome(self) -> list[Completion] | DflashError:
        """Awaits its end and returns the finished choices, or the error that ended it."""
        if self._error is not None:
            return self._error
        assert self._text is not None
        try:
            while deltas := self._text.stream.take():
                for chunk in self._text.chunks(deltas):
                    if self._on_chunk is not None:
                        self._on_chunk(self._place, chunk)
        except DflashError as error:
            self.cancel()
            return error
        return [text.completion(self._place, len(self._token_ids)) for text in self._text.texts]

    def cancel(self) -> None:
        """Ends what has not ended."""
        if self._text is not None:
            self._text.stream.cancel()


def _outcomes(waiting: deque[_Run]) -> Iterator[list[Completion] | DflashError]:
    """Yields the outcomes of prompts in their order, of which as many run as the queue takes."""
    begun: deque[_Run] = deque()
    try:
        while waiting or begun:
            while waiting and waiting[0].begin():
                begun.append(waiting.popleft())
            # Where none was taken, others fill the queue, and the first prompt's outcome says so.
            yield (begun or waiting)[0].outcome()
            (begun or waiting).popleft()
    finally:
        # One that an interrupt kept from being moved is still among those that wait.
        for run in (*begun, *waiting):
            run.cancel()


def _prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Returns a list of prompts for one or several."""
    if isinstance(prompts, str):
        return [prompts]
    if isinstance(prompts, bytes) or not hasattr(prompts, "__iter__"):
        raise ConfigError(f"prompts {shown(prompts)}: expected a text, token ids, or several of them")
    found: list[Any] = list(prompts)
    # Integers of numpy and torch are ids too; other arrays have a length or no index.
    return [found] if found and all(hasattr(one, "__index__") and not getattr(one, "shape", ()) for one in found) else found
