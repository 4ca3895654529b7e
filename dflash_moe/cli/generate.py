"""`dflash-moe generate`: text out, streaming, with the routed experts computed by the topology's
workers.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import statistics
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dflash_moe.cli import options
from dflash_moe.cli.loading import loading_shown
from dflash_moe.errors import ConfigError

if TYPE_CHECKING:
    from dflash_moe.engine.generation import TokenStep
    from dflash_moe.runtime.expert_runtime import ExpertRuntime


# Beyond this temperature every token is as likely as any other.
MAX_TEMPERATURE = 1e4


def register(app: typer.Typer) -> None:
    app.command(name="generate")(generate)


@options.with_settings
def generate(
    model: options.ModelOption,
    topology: options.TopologyOption = None,
    prompt: Annotated[
        str | None, typer.Option(help="Text to complete [default: none; give this or --prompt-file].", show_default=False)
    ] = None,
    prompt_file: Annotated[
        Path | None, typer.Option(help="UTF-8 file with the text to complete [default: none].", show_default=False)
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens to generate at most.")] = 64,
    temperature: Annotated[
        float, typer.Option(min=0.0, max=MAX_TEMPERATURE, help="0 takes the most likely token; higher is more random.")
    ] = 0.0,
    seed: Annotated[
        int, typer.Option(min=0, max=options.MAX_SEED, help="Seed of the sampling; without effect at temperature 0.")
    ] = 0,
    json_out: Annotated[
        Path | None,
        typer.Option("--json", help="Write token ids, times and byte counts here [default: nowhere].", show_default=False),
    ] = None,
    **overrides: Any,
) -> None:
    """Complete a prompt. Without a topology: one local CPU worker."""
    text = _prompt_text(prompt, prompt_file)
    directory = options.model_directory(model)
    from dflash_moe.engine.generation import generate_tokens
    from dflash_moe.engine.host_model import check_length, open_host
    from dflash_moe.integrations.generation import TextStream, stop_token_ids
    from dflash_moe.integrations.tokenizer import load_tokenizer
    from dflash_moe.runtime.expert_runtime import ExpertRuntime

    tokenizer = load_tokenizer(directory)
    input_ids = tokenizer(text)["input_ids"]
    if not input_ids:
        raise ConfigError("the prompt has no tokens; pass at least one character with --prompt or --prompt-file")
    check_length(directory, len(input_ids) + max_new_tokens)
    with loading_shown() as on_loading:
        runtime = ExpertRuntime.start(options.load_topology(topology), model=directory, on_loading=on_loading, **overrides)
    with runtime:
        host = open_host(directory, runtime)
        stream = TextStream(tokenizer)
        steps: list[TokenStep] = []
        for step in generate_tokens(
            host,
            input_ids,
            max_new_tokens=max_new_tokens,
            stop_token_ids=stop_token_ids(host.model, tokenizer),
            temperature=temperature,
            seed=seed,
        ):
            steps.append(step)
            _emit(stream.push(step.token_id))
        _emit(stream.finish() + "\n")
        if json_out is not None:
            options.write_json(json_out, _report(runtime, len(input_ids), steps, tokenizer))


def _prompt_text(prompt: str | None, prompt_file: Path | None) -> str:
    if (prompt is None) == (prompt_file is None):
        raise ConfigError("pass the text to complete with --prompt TEXT or --prompt-file FILE, and not both")
    if prompt is not None:
        return prompt
    assert prompt_file is not None
    try:
        return prompt_file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--prompt-file {prompt_file}: cannot be read as UTF-8 text ({error})") from None


def _emit(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _report(runtime: ExpertRuntime, prompt_tokens: int, steps: list[TokenStep], tokenizer: Any) -> dict[str, Any]:
    """Returns the report of a run. Times are in seconds: `ttft_s` is the forward pass of the
    prefill, and `tpot_s` the median of the later ones.
    """
    totals = runtime.stats()["totals"]
    token_ids = [step.token_id for step in steps]
    later = [step.forward_s for step in steps[1:]]
    return {
        "prompt_tokens": prompt_tokens,
        "token_ids": token_ids,
        "text": tokenizer.decode(token_ids, skip_special_tokens=True),
        "ttft_s": steps[0].forward_s if steps else None,
        "tpot_s": statistics.median(later) if later else None,
        "tpot_samples_s": later,
        **{key: int(totals[key]) for key in ("calls", "request_bytes", "reply_bytes", "floor_bytes")},
    }
