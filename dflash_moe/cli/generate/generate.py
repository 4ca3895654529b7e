"""`dflash-moe generate`: text out, streaming, or the completions of several prompts as JSON lines,
with the routed experts computed by the topology's workers.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import dataclasses
import functools
import json
import secrets
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dflash_moe.cli import help_page, options, sampling_options
from dflash_moe.cli.generate import generate_report
from dflash_moe.cli.generate.prompt_files import GivenPrompt, GivenPrompts, given_prompts
from dflash_moe.cli.live_text import Rate, Write, live_text
from dflash_moe.cli.loading import doing_shown, loading_shown
from dflash_moe.cli.sampling_options import sampling_params
from dflash_moe.errors import ConfigError, DflashError

if TYPE_CHECKING:
    from dflash_moe.engine.llm import LLM
    from dflash_moe.engine.text import Chunk, Completion


@options.with_settings(reads_config=True)
def generate(
    model: options.ModelOption,
    topology: options.TopologyOption = None,
    prompt: Annotated[
        str | None,
        typer.Option(
            "-p",
            "--prompt",
            metavar="TEXT",
            help="Text to complete [default: none; give this or --prompt-file].",
            show_default=False,
            rich_help_panel=help_page.MODEL,
        ),
    ] = None,
    prompt_file: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="UTF-8 file with the text, or JSON lines: several prompts, each a string, or an object "
            'such as {"prompt": "Once", "max_tokens": 8, "temperature": 0.7} with any of SamplingParams\' names. Lines are '
            'read where the name ends in .jsonl, or every line is an object with "prompt" and the name does not end in .txt '
            "[default: none].",
            show_default=False,
            rich_help_panel=help_page.MODEL,
        ),
    ] = None,
    max_tokens: Annotated[int, sampling_options.max_tokens("prompt")] = 64,
    temperature: Annotated[float, sampling_options.temperature()] = 0.0,
    top_p: Annotated[float, sampling_options.top_p()] = 1.0,
    top_k: Annotated[int, sampling_options.top_k()] = 0,
    min_p: Annotated[float, sampling_options.min_p()] = 0.0,
    stop: Annotated[list[str] | None, sampling_options.STOP] = None,
    seed: Annotated[int, sampling_options.SEED] = 0,
    json_out: Annotated[Path | None, options.json_option("Token ids, times and byte counts")] = None,
    receipt: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Write a receipt here: `replay` proves the run again with it, on any machine; for one prompt [default: none].",
            show_default=False,
            rich_help_panel=help_page.MORE,
        ),
    ] = None,
    verbose: options.VerboseOption = False,
    **overrides: Any,
) -> None:
    """Complete a prompt, or several from a file of JSON lines. Without a topology
    the model is fitted to this machine.

    The text of one prompt comes as it is computed. Several prompts are computed together; each
    finished choice is a JSON line with prompt, choice, text, token_ids and finish_reason, in the
    order of the prompts, and one that failed has prompt and error. The last line on stderr says how
    fast it was.
    """
    params = sampling_params(
        max_tokens=max_tokens, temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p, stop=tuple(stop or ()),
        seed=seed,
    )  # fmt: skip
    given = given_prompts(prompt, prompt_file, params)
    if receipt is not None:
        given = _for_receipt(given, receipt)
    directory = options.model_directory(model)
    with doing_shown(f"reading {directory.name}"):
        from dflash_moe.engine.llm import LLM
        from dflash_moe.integrations.tokenizer import load_tokenizer

        tokenizer = load_tokenizer(directory)
    placed = options.topology_for(topology, directory, overrides)
    token_ids = [_token_ids(one, tokenizer) for one in given.prompts]
    _check_lengths(directory, given, token_ids)
    with loading_shown() as on_loading:
        llm = LLM(
            directory,
            placed,
            tokenizer=tokenizer,
            on_loading=on_loading,
            **overrides,
        )
    with llm:
        if llm.host.report.not_paged:
            options.say(f"one sequence at a time, with the model's own cache: {llm.host.report.not_paged}")
        complete = functools.partial(_complete, llm, given, token_ids, json_out, is_verbose=verbose)
        if receipt is None:
            complete()
        else:
            _complete_with_receipt(llm, given, token_ids, complete, (receipt, model))


def _for_receipt(given: GivenPrompts, path: Path) -> GivenPrompts:
    """Returns the prompt with a seed that is known. Raises ConfigError where there are several."""
    options.prepare_outputs(path)
    if len(given.prompts) != 1 or given.prompts[0].params.n != 1:
        raise ConfigError(
            f"--receipt: a receipt is of one prompt and one choice; found {len(given.prompts)} prompts, of which the first has "
            f"{given.prompts[0].params.n} choices"
        )
    one = given.prompts[0]
    seed = secrets.randbits(63) if one.params.seed is None else one.params.seed
    return dataclasses.replace(given, prompts=(dataclasses.replace(one, params=dataclasses.replace(one.params, seed=seed)),))


def _complete_with_receipt(
    llm: LLM,
    given: GivenPrompts,
    token_ids: list[list[int]],
    complete: Callable[[], list[list[Completion]]],
    target: tuple[Path, str],
) -> None:
    """Has the prompt completed and writes its receipt. `target` is where to, and what the model was
    called.
    """
    from dflash_moe.proofs.receipt_record import digests_kept, make_receipt

    params = given.prompts[0].params
    with digests_kept(llm, params.seed or 0) as digests:
        outcomes = complete()
    completion = outcomes[0][0]
    if not completion.token_ids:
        raise DflashError("--receipt: no token was generated, so that there is nothing to prove; the receipt was not written")
    path, model = target
    found = make_receipt(llm, model, token_ids[0], params, completion.token_ids, digests)
    options.write_json(path, found.to_json())
    said = "bit by bit" if not found.host.no_claim else f"by tolerance only: {found.host.no_claim}"
    options.say(f"receipt: {path}; `dflash-moe replay {path}` proves it again, {said}")


def _token_ids(given: GivenPrompt, tokenizer: Any) -> list[int]:
    from dflash_moe.integrations.tokenizer import encode

    found = encode(tokenizer, given.text)
    if not found:
        raise ConfigError(
            f"{given.origin}: the prompt has no tokens; pass at least one character with --prompt or --prompt-file"
        )
    return found


def _check_lengths(directory: Path, given: GivenPrompts, token_ids: list[list[int]]) -> None:
    """Raises ConfigError for a prompt that is too long for the model, before anything is loaded."""
    from dflash_moe.forward.host_model import check_length

    lengths = [len(ids) + one.params.max_tokens for one, ids in zip(given.prompts, token_ids, strict=True)]
    longest = max(range(len(lengths)), key=lengths.__getitem__)
    try:
        check_length(directory, lengths[longest])
    except ConfigError as error:
        if not given.are_lines:
            raise
        raise ConfigError(f"{given.prompts[longest].origin}: {error}") from None


class _Progress:
    """What is said while tokens are computed; another thread asks."""

    def __init__(self, llm: LLM, num_prompts: int) -> None:
        self._llm = llm
        self._num_prompts = num_prompts
        self._rate = Rate()
        self.num_done = 0

    def __call__(self) -> str:
        stats = self._llm.engine.stats()
        count = stats["generated_tokens"]
        said = f"{count} tokens, {self._rate.add(count):.1f} tokens/s"
        if self._num_prompts == 1:
            return said
        return f"{said}, {self.num_done} of {self._num_prompts} prompts done, {stats['running']} running"


def _complete(
    llm: LLM, given: GivenPrompts, token_ids: list[list[int]], json_out: Path | None, *, is_verbose: bool
) -> list[list[Completion]]:
    """Completes all prompts, writes what comes of them and says how fast it was. Returns the
    choices of each. Raises the error of the first that failed, once the others have ended.
    """
    progress = _Progress(llm, len(given.prompts))
    chunks: list[Chunk] = []
    outcomes: list[list[Completion] | DflashError] = []
    with live_text(progress, has_lines=given.are_lines) as write:

        def on_chunk(_place: int, chunk: Chunk) -> None:
            if not given.are_lines:
                chunks.append(chunk)
                write(chunk.text)

        began = time.monotonic()
        for outcome in llm.generate_each(token_ids, [one.params for one in given.prompts], on_chunk=on_chunk):
            if given.are_lines:
                _write_lines(write, len(outcomes), outcome)
            outcomes.append(outcome)
            progress.num_done += 1
        seconds = time.monotonic() - began
        if not given.are_lines and not isinstance(outcomes[0], DflashError):
            write("\n")
    stats = llm.stats()
    found = [completion for outcome in outcomes if not isinstance(outcome, DflashError) for completion in outcome]
    if json_out is not None and given.are_lines:
        options.write_json(json_out, generate_report.report_of_several(outcomes, stats))
    elif json_out is not None and found:
        options.write_json(json_out, generate_report.report_of_one(found[0], chunks, stats))
    if found:
        options.say(generate_report.summary(found, len(given.prompts), seconds, stats, is_verbose=is_verbose))
    _raise_first(given, outcomes)
    return [outcome for outcome in outcomes if not isinstance(outcome, DflashError)]


def _write_lines(write: Write, place: int, outcome: list[Completion] | DflashError) -> None:
    if isinstance(outcome, DflashError):
        write(json.dumps(generate_report.error_fields(place, outcome)) + "\n")
        return
    for found in outcome:
        write(json.dumps(generate_report.choice_fields(found)) + "\n")


def _raise_first(given: GivenPrompts, outcomes: list[list[Completion] | DflashError]) -> None:
    failed = [(place, outcome) for place, outcome in enumerate(outcomes) if isinstance(outcome, DflashError)]
    if not failed:
        return
    place, error = failed[0]
    text = generate_report.unnamed(error)
    if given.are_lines:
        text = f"{len(failed)} of {len(outcomes)} prompts failed; the first, {given.prompts[place].origin}: {text}"
    raise error.reworded(text)
