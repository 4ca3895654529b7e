"""Where the requests of `bench streaming` go: an OpenAI-compatible server by its URL.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import http.client
import json
import os
import ssl
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from dflash_moe.errors import ConfigError, printable, shown

# The list of models is asked for once, before anything is measured.
LIST_S = 30.0
MAX_LIST_BYTES = 1 << 20
# So much of what a server says of an error is repeated.
MAX_SAID = 300
VERSION = "/v1"
PORTS = {"http": 80, "https": 443}


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A server. `root` is what stands before /v1 in its paths, and `tls` is None where requests go
    in clear.
    """

    url: str
    host: str
    port: int
    root: str
    tls: ssl.SSLContext | None
    key: str | None = None

    def request(self, route: str, body: bytes) -> bytes:
        """Returns a whole HTTP request: a POST of JSON to a route such as "chat/completions"."""
        head = [
            f"POST {self.root}{VERSION}/{route} HTTP/1.1", f"host: {self._authority()}", "content-type: application/json",
            "accept: text/event-stream", f"content-length: {len(body)}", "connection: close", *self._authorization(),
        ]  # fmt: skip
        return "\r\n".join([*head, "", ""]).encode("ascii") + body

    def first_model(self) -> str:
        """Returns the first name of /v1/models. Raises ConfigError where there is no server, or
        none that lists its models.
        """
        connect: Any = http.client.HTTPConnection if self.tls is None else http.client.HTTPSConnection
        connection = connect(self.host, self.port, timeout=LIST_S, **({} if self.tls is None else {"context": self.tls}))
        headers = dict(line.split(": ", 1) for line in self._authorization())
        try:
            connection.request("GET", f"{self.root}{VERSION}/models", headers=headers)
            answer = connection.getresponse()
            status, raw = answer.status, answer.read(MAX_LIST_BYTES)
        except (OSError, http.client.HTTPException) as error:
            raise ConfigError(f"{self.url}: {reason(error)}; is an OpenAI-compatible server listening there?") from None
        finally:
            connection.close()
        try:
            found = json.loads(raw)
            if status == http.HTTPStatus.OK:
                name = found["data"][0]["id"]
                if isinstance(name, str):
                    return name
        except (ValueError, RecursionError, KeyError, IndexError, TypeError):
            found = None
        if status == http.HTTPStatus.UNAUTHORIZED:
            raise ConfigError(f"{self.url}: it asks for a key (401); pass --api-key-file FILE")
        said = f"; it says: {error_text(found)}" if found is not None else ""
        raise ConfigError(f"{self.url}{VERSION}/models: status {status} and no name of a model{said}; pass --served-model NAME")

    def _authority(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == PORTS["https" if self.tls else "http"] else f"{host}:{self.port}"

    def _authorization(self) -> list[str]:
        return [] if self.key is None else [f"authorization: Bearer {self.key}"]


def endpoint_of(url: str, key: str | None = None) -> Endpoint:
    """Reads a URL, with or without /v1 at its end. Raises ConfigError for anything else."""
    wanted = "expected http://HOST:PORT or https://HOST:PORT, with or without a path"
    try:
        parts = urlsplit(url)
        port = parts.port
        host = parts.hostname or ""
        (host + parts.path).encode("ascii")
        # As the resolver does, which has no words for a name that is too long.
        host.encode("idna")
    except ValueError:
        raise ConfigError(f"--url {shown(url)}: it is no URL; {wanted}") from None
    if parts.scheme not in PORTS or not host or parts.query or parts.fragment or any(sign <= " " for sign in url):
        raise ConfigError(f"--url {shown(url)}: {wanted}")
    if "@" in parts.netloc:
        raise ConfigError("--url: a user or key in it would be shown in lists of processes; pass --api-key-file FILE")
    root = parts.path.rstrip("/").removesuffix(VERSION)
    tls = ssl.create_default_context() if parts.scheme == "https" else None
    name = url.rstrip("/").removesuffix(VERSION)
    return Endpoint(name, host, PORTS[parts.scheme] if port is None else port, root, tls, key)


def reason(error: Exception) -> str:
    """Returns in words why something could not be reached."""
    if isinstance(error, TimeoutError):
        return "nothing came within the time"
    if isinstance(error, OSError) and not isinstance(error, ssl.SSLError):
        # asyncio has words of its own for what the system says, and the resolver negative numbers.
        if error.errno is not None and error.errno > 0:
            return os.strerror(error.errno)
        if error.strerror:
            return error.strerror
    return str(error) or type(error).__name__


def error_text(body: Any) -> str:
    """Returns what an answer says of an error, in any of the shapes that servers use, in one line
    that fits a message.
    """
    found = body.get("error", body) if isinstance(body, dict) else body
    if isinstance(found, dict):
        found = found.get("message") or found.get("detail") or found
    text = printable(" ".join((found if isinstance(found, str) else json.dumps(found)).split()))
    return text if len(text) <= MAX_SAID else text[: MAX_SAID - 3] + "..."
