"""`dflash-moe chat`: a conversation in the terminal, or one line of stdin for each turn, with the
model's own template.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from typing import Annotated, Any

import typer

from dflash_moe.cli import help_page, options, sampling_options
from dflash_moe.cli.demo_model import DEMO, TOY
from dflash_moe.cli.loading import loading_shown

# Long enough for an answer that thinks first; Ctrl-C ends one that does not come to an end.
MAX_TOKENS = 2048
_RECOMMENDED = "what the model recommends"


def register(app: typer.Typer) -> None:
    app.command(name="chat")(chat)


@options.with_settings(reads_config=True)
def chat(
    model: options.ModelOption,
    topology: options.TopologyOption = None,
    system: Annotated[
        str | None,
        typer.Option(
            metavar="TEXT",
            help="System prompt: before all turns [default: none].",
            show_default=False,
            rich_help_panel=help_page.MODEL,
        ),
    ] = None,
    max_tokens: Annotated[int, sampling_options.max_tokens("answer")] = MAX_TOKENS,
    temperature: Annotated[float | None, sampling_options.temperature(f"{_RECOMMENDED}, else 0")] = None,
    top_p: Annotated[float | None, sampling_options.top_p(f"{_RECOMMENDED}, else 1")] = None,
    top_k: Annotated[int | None, sampling_options.top_k(f"{_RECOMMENDED}, else 0")] = None,
    min_p: Annotated[float | None, sampling_options.min_p(f"{_RECOMMENDED}, else 0")] = None,
    stop: Annotated[list[str] | None, sampling_options.STOP] = None,
    seed: Annotated[int, sampling_options.SEED] = 0,
    **overrides: Any,
) -> None:
    """Talk with a model, by the chat template it comes with. Without a topology the model is
    fitted to this machine.

    Each line is a turn, typed or from a pipe. Ctrl-C stops an answer, and a second one leaves;
    /reset forgets the conversation, /stats says how fast it is, /help lists the rest. Answers go to
    stdout, everything else to stderr.
    """
    directory = options.model_directory(model)
    from dflash_moe.engine.chat_history import ChatHistory
    from dflash_moe.engine.llm import LLM
    from dflash_moe.integrations.chat_template import TemplateRenderer, find_chat_template, special_tokens
    from dflash_moe.integrations.generation_settings import read_generation_settings
    from dflash_moe.integrations.tokenizer import load_tokenizer

    recommended = read_generation_settings(directory).sampling
    given = {"temperature": temperature, "top_p": top_p, "top_k": top_k, "min_p": min_p}
    stated = {name: value for name, value in given.items() if value is not None}
    params = sampling_options.sampling_params(
        max_tokens=max_tokens, stop=tuple(stop or ()), seed=seed, **{"temperature": 0.0, **recommended, **stated}
    )
    tokenizer = load_tokenizer(directory)
    template = find_chat_template(directory, tokenizer)
    with TemplateRenderer(template, special_tokens(tokenizer)) as renderer:
        history = ChatHistory(renderer, tokenizer, system)
        # A template that fails, or refuses the system prompt, says so before minutes of loading.
        history.ask("Hello")
        with loading_shown() as on_loading:
            llm = LLM(
                directory,
                options.topology_for(topology, directory, overrides),
                tokenizer=tokenizer,
                on_loading=on_loading,
                **overrides,
            )
        with llm:
            from dflash_moe.cli.chat_session import ChatSession

            if llm.host.report.not_paged:
                options.say(f"each turn is computed from its beginning, without a prefix cache: {llm.host.report.not_paged}")
            if model == DEMO:
                options.say(TOY)
            if recommended.keys() - stated.keys():
                taken = ", ".join(f"{name} {value:g}" for name, value in recommended.items() if name not in stated)
                options.say(f"sampling as the checkpoint recommends: {taken}; options of the same names change it")
            ChatSession(llm, history, params).run()
