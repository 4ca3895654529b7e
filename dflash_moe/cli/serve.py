"""`dflash-moe serve`: a model behind a server for clients of OpenAI's and Anthropic's APIs.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import importlib.util
import signal
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import typer

from dflash_moe.cli import help_page, options
from dflash_moe.cli.loading import loading_shown
from dflash_moe.cli.model_path import DEMO, TOY
from dflash_moe.config import SETTINGS
from dflash_moe.config.values import parse_bytes
from dflash_moe.errors import ConfigError
from dflash_moe.server.front.request_log import LogForm
from dflash_moe.server.server_settings import DRAIN_S, MAX_CONNECTIONS, ServerSettings

PORT = 8000
# What the front and the processes that it asks import beside the package's own requirements.
PACKAGES = ("uvicorn", "httptools", "starlette", "tokenizers", "jinja2", "prometheus_client", "llguidance")
LARGEST_BODY = 1 << 30


def _network(*names: str, **given: Any) -> Any:
    return typer.Option(*names, rich_help_panel=help_page.NETWORK, **given)


@options.with_settings(reads_config=True)
def serve(
    model: options.ModelOption,
    topology: options.TopologyOption = None,
    host: Annotated[
        str, _network(metavar="ADDRESS", help="Address to listen at: beyond this machine only with keys.")
    ] = "127.0.0.1",
    port: Annotated[int, _network(min=0, max=65535, metavar="PORT", help="Port to listen at: 0 takes a free one.")] = PORT,
    api_key_file: Annotated[
        Path | None,
        _network(
            metavar="FILE", help="Keys of clients, one a line: mode 0600 [default: none, loopback only].", show_default=False
        ),
    ] = None,
    tls_cert: Annotated[
        Path | None, _network(metavar="FILE", help="Certificate in PEM, with its chain [default: none].", show_default=False)
    ] = None,
    tls_key: Annotated[
        Path | None, _network(metavar="FILE", help="Its private key in PEM [default: none].", show_default=False)
    ] = None,
    alias: Annotated[
        list[str] | None,
        _network(
            metavar="NAME",
            help="A further name of the model: may be repeated; '*' takes any [default: none].",
            show_default=False,
        ),
    ] = None,
    allow_host: Annotated[
        list[str] | None,
        _network(
            metavar="NAME",
            help="Without keys, a proxy's name that requests may have: may be repeated [default: none].",
            show_default=False,
        ),
    ] = None,
    allow_origin: Annotated[
        list[str] | None,
        _network(
            metavar="ORIGIN",
            help="A page of another site that may ask: as in https://chat.example, may be repeated [default: none].",
            show_default=False,
        ),
    ] = None,
    max_queue: Annotated[
        int | None,
        _network(
            min=1,
            metavar="N",
            help="Number of requests that may wait: more are refused with 429 [default: engine.max_queue].",
            show_default=False,
        ),
    ] = None,
    max_connections: Annotated[
        int, _network(min=1, max=100_000, metavar="N", help="Number of connections that may be open.")
    ] = MAX_CONNECTIONS,
    max_body: Annotated[str, _network(metavar="SIZE", help="Largest body of a request: more is refused with 413.")] = "8MiB",
    drain_s: Annotated[
        float, _network(min=0.0, max=86_400.0, metavar="S", help="Seconds that open requests get once this is to end.")
    ] = DRAIN_S,
    request_log: Annotated[
        LogForm, _network(metavar="text|json|off", help="Form of the line that each request leaves on stderr.")
    ] = LogForm.TEXT,
    **overrides: Any,
) -> None | int:
    """Serve a model to clients of OpenAI's and Anthropic's APIs. Without a topology the model is
    fitted to this machine.

    `ready on URL` comes on stdout once requests are answered; until then they get 503. SIGTERM and
    Ctrl-C let open requests finish, a second one does not wait for them.
    """
    _need_packages()
    if max_queue is not None:
        setting = next(one for one in SETTINGS if one.name == "max_queue")
        overrides["max_queue"] = setting.check(max_queue, "--max-queue")
    directory = options.model_directory(model)
    settings = ServerSettings(
        names=[_name(model, directory), *(alias or ())],
        keys=_keys(api_key_file),
        # A name of this machine alone, as /etc/hosts may have it, is one to be asked by.
        hosts=[host, *(allow_host or ())],
        origins=allow_origin or (),
        tls_cert=tls_cert,
        tls_key=tls_key,
        max_connections=max_connections,
        max_body_bytes=_bytes(max_body),
        drain_s=drain_s,
        request_log=request_log,
    )
    _show_server_log()

    from dflash_moe.server.listening import bind
    from dflash_moe.server.serving import Server
    from dflash_moe.telemetry.stop_signals import exit_by_signals

    with ExitStack() as closing:
        # A taken port ends this before torch is imported.
        bound = bind(host, port)
        closing.callback(bound.sock.close)
        with exit_by_signals([signal.SIGTERM]):
            server = closing.enter_context(Server(bound, settings))
            llm, facts = _load(model, directory, topology, overrides, closing)
        url = bound.url(has_tls=settings.has_tls)
        from dflash_moe.server.llm_service import LLMService

        service = LLMService(llm, facts)
        closing.callback(service.close)
        return server.serve(service, facts, lambda: typer.echo(f"ready on {url}"))


def _load(
    model: str, directory: Path, topology: Path | None, overrides: dict[str, Any], closing: ExitStack
) -> tuple[Any, dict[str, Any]]:
    """Loads the model, and returns it with what the front is told of it."""
    options.say(f"loading {model}; requests get 503 until it is there")
    from dflash_moe.engine.llm import LLM
    from dflash_moe.integrations.generation_settings import read_generation_settings
    from dflash_moe.integrations.tokenizer import load_tokenizer
    from dflash_moe.proofs.receipt_record import deciding_fields
    from dflash_moe.server.front_memory import front_bytes
    from dflash_moe.server.model_facts import model_facts, template_facts, tokenizer_facts

    tokenizer = load_tokenizer(directory)
    # What is wrong with these is said before minutes of loading.
    tokenizer_facts(tokenizer)
    if no_template := template_facts(directory, tokenizer)["no_template"]:
        options.say(f"conversations are refused, and texts are completed: {no_template}")
    read_generation_settings(directory)
    placed = options.topology_for(topology, directory, overrides, front_bytes=front_bytes(len(tokenizer)))
    with loading_shown() as on_loading:
        llm = closing.enter_context(LLM(directory, placed, tokenizer=tokenizer, on_loading=on_loading, **overrides))
    if llm.host.report.not_paged:
        options.say(f"one sequence at a time, with the model's own cache: {llm.host.report.not_paged}")
    if model == DEMO:
        options.say(TOY)
    return llm, model_facts(directory, llm, deciding_fields(llm))


def _name(model: str, directory: Path) -> str:
    """Returns what the model is called: its folder, or its file without the ending."""
    if model == DEMO:
        return DEMO
    path = directory.resolve()
    return path.name if path.is_dir() else path.stem


def _keys(path: Path | None) -> list[str]:
    from dflash_moe.server.api_keys import read_api_keys

    return [] if path is None else read_api_keys(path)


def _bytes(text: str) -> int:
    try:
        found = parse_bytes(text)
    except ValueError:
        found = 0
    if not 1024 <= found <= LARGEST_BODY:
        raise ConfigError(f"--max-body {text!r} is not allowed; allowed: 1KiB..1GiB")
    return found


def _need_packages() -> None:
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(f"{missing[0]} is not installed, and the server needs it: pip install 'dflash-moe[serve]'")


def _show_server_log() -> None:
    """Lets through what the server says of itself: warnings, and how it ends."""
    options.show_log("server")
