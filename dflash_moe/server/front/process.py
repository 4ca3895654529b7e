"""The life of a front: it takes settings, then the model, then requests, until the engine process
says that it is over, or is gone.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import asyncio
import asyncio.constants
import faulthandler
import logging
import math
import os
import resource
import signal
import socket
from collections.abc import Mapping
from typing import Any

import uvicorn

from dflash_moe.server.front.application import Application
from dflash_moe.server.front.engine_link import EngineLink
from dflash_moe.server.front.guard import Guard
from dflash_moe.server.front.http_protocol import HEADER_S, protocol_class
from dflash_moe.server.front.request_log import LogForm, RequestLog
from dflash_moe.server.front.routes import Routes
from dflash_moe.telemetry.logs import set_up_worker_logging

log = logging.getLogger(__name__)

# The engine process sends settings at once.
BEGIN_S = 30.0
# Answers that are under way have so long to end in an error event once there is no engine process.
PARTING_S = 1.0
# A connection on which no request comes is closed after so long.
KEEP_ALIVE_S = 30
# Descriptors beside those of connections.
_SPARE_DESCRIPTORS = 64


def run_front(link_fd: int, listen_fd: int) -> int:
    """Serves until the engine process ends, and returns the exit code. It owns both descriptors."""
    # Ctrl-C is for the engine process, which says what follows.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # In the background of its terminal, whose setting `tostop` would stop it at its first warning.
    signal.signal(signal.SIGTTOU, signal.SIG_IGN)
    faulthandler.enable()
    set_up_worker_logging()
    # What uvicorn says of each start and each strange request helps nobody.
    logging.getLogger("uvicorn.error").setLevel(logging.ERROR)
    code = asyncio.run(_serve(socket.socket(fileno=link_fd), socket.socket(fileno=listen_fd)))
    logging.shutdown()
    # Threads may still tokenise or render what nobody waits for. The process that renders ends with
    # its pipe.
    os._exit(code)


async def _serve(link_socket: socket.socket, listener: socket.socket) -> int:
    loop = asyncio.get_running_loop()
    told: asyncio.Future[None] = loop.create_future()
    facts: dict[str, Any] = {}

    def on_model(found: Mapping[str, Any]) -> None:
        facts.update(found)
        told.set_result(None)

    link_socket.setblocking(False)
    _, link = await loop.create_connection(lambda: EngineLink(on_model), sock=link_socket)
    await asyncio.wait((link.begun, link.ended), timeout=BEGIN_S, return_when=asyncio.FIRST_COMPLETED)
    if not link.begun.done():
        return 1
    settings = link.settings
    admission = Guard(settings["keys"], hosts=settings["hosts"], origins=settings["origins"])
    request_log = RequestLog(LogForm(settings["request_log"]))
    application = Application(link, admission, request_log, max_body_bytes=settings["max_body_bytes"])
    _raise_descriptor_limit(settings["max_connections"])
    server = _Server(
        uvicorn.Config(
            application,
            http=protocol_class(settings["max_connections"], application.traffic),
            ws="none",
            loop="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=1,
            backlog=settings["backlog"],
            ssl_certfile=settings["tls_cert"] or None,
            ssl_keyfile=settings["tls_key"] or None,
        )  # fmt: skip
    )
    # Connections count, and have timers, from the end of this handshake on. By itself it may take a
    # minute, and uvicorn has no setting for it.
    asyncio.constants.SSL_HANDSHAKE_TIMEOUT = HEADER_S  # type: ignore[misc]
    serving = asyncio.ensure_future(server.serve(sockets=[listener]))
    over = (serving, link.ending, link.ended)
    await asyncio.wait((told, *over), return_when=asyncio.FIRST_COMPLETED)
    if told.done():
        await _prepare(application, link, facts)
        await asyncio.wait(over, return_when=asyncio.FIRST_COMPLETED)
    if link.ending.done():
        await _finish(server, serving, link, link.ending.result())
    await _part(server, serving)
    request_log.close()
    if link.end_reason:
        log.error("%s", link.end_reason)
    return 1 if link.end_reason or not (link.ending.done() or link.ended.done()) else 0


async def _prepare(application: Application, link: EngineLink, facts: Mapping[str, Any]) -> None:
    """Makes the model's routes, of which a large tokenizer takes a second."""
    names = link.settings["names"]
    try:
        application.routes = await asyncio.get_running_loop().run_in_executor(None, lambda: Routes(link, facts, names))
    except Exception as error:
        log.exception("the front cannot read what it was told of the model")
        link.give_up(f"the model cannot be served: {error}")
    else:
        link.say_up()


async def _finish(server: uvicorn.Server, serving: asyncio.Future[None], link: EngineLink, within_s: float) -> None:
    """Lets readers have what was computed for them, and closes each connection behind its answer.
    It takes at most `within_s`, and ends with the engine process.
    """
    # Shorter than this wait, so that nothing is cancelled before `_part` has cut it off.
    server.config.timeout_graceful_shutdown = math.ceil(within_s + PARTING_S)
    server.should_exit = True
    await asyncio.wait((serving, link.ended), timeout=within_s, return_when=asyncio.FIRST_COMPLETED)


async def _part(server: uvicorn.Server, serving: asyncio.Future[None]) -> None:
    """Lets streams end in an event, for which there must be time, and cuts off whoever does not
    read it.
    """
    if server.server_state.tasks:
        await asyncio.wait(server.server_state.tasks, timeout=PARTING_S)
    if server.server_state.tasks:
        for connection in list(server.server_state.connections):
            connection.transport.abort()
    server.should_exit = True
    await asyncio.wait((serving,), timeout=PARTING_S / 2)


class _Server(uvicorn.Server):
    """Leaves signals as they are: the engine process says when it is over."""

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        """Serves until `should_exit` is set."""
        await self._serve(sockets)


def _raise_descriptor_limit(max_connections: int) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = max_connections + _SPARE_DESCRIPTORS
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted if hard == resource.RLIM_INFINITY else min(wanted, hard), hard))
