"""How a server meets its callers, and what of that must not be.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import logging
import ssl
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_moe.errors import ConfigError
from dflash_moe.server.front.request_log import LogForm
from dflash_moe.server.listening import BACKLOG, Bound

log = logging.getLogger(__name__)

MAX_CONNECTIONS = 1000
MAX_BODY_BYTES = 8 << 20
DRAIN_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """How a server meets its callers. `names` are those of the model, its own first."""

    names: Sequence[str]
    keys: Sequence[str] = ()
    hosts: Sequence[str] = ()
    origins: Sequence[str] = ()
    tls_cert: Path | None = None
    tls_key: Path | None = None
    max_connections: int = MAX_CONNECTIONS
    max_body_bytes: int = MAX_BODY_BYTES
    drain_s: float = DRAIN_S
    request_log: LogForm = LogForm.TEXT

    @property
    def has_tls(self) -> bool:
        """Whether connections are encrypted."""
        return self.tls_cert is not None

    def check(self, bound: Bound) -> None:
        """Raises ConfigError for what must not be: strangers without a key, or a certificate that
        cannot be used. Says what is unwise.
        """
        if not bound.is_loopback and not self.keys:
            raise ConfigError(
                f"--host {bound.host}: others can reach this address, and without a key anybody there could use the server; "
                "give --api-key-file FILE, or listen at 127.0.0.1"
            )
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ConfigError("--tls-cert and --tls-key belong together; give both or none")
        if self.tls_cert is not None:
            try:
                # Nobody is asked on the terminal for an encrypted key's password.
                ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(self.tls_cert, self.tls_key, password=lambda: "")
            except (OSError, ssl.SSLError, ValueError) as error:
                raise ConfigError(f"--tls-cert {self.tls_cert} --tls-key {self.tls_key}: {error}; PEM files are read") from None
        elif not bound.is_loopback:
            log.warning(
                "keys and texts travel unencrypted to %s: give --tls-cert and --tls-key, or let a proxy encrypt", bound.host
            )

    def for_front(self) -> dict[str, Any]:
        """Returns what the front is told."""
        return {
            "names": list(self.names), "keys": list(self.keys), "hosts": list(self.hosts), "origins": list(self.origins),
            "tls_cert": str(self.tls_cert or ""), "tls_key": str(self.tls_key or ""), "max_connections": self.max_connections,
            "max_body_bytes": self.max_body_bytes, "backlog": BACKLOG, "request_log": self.request_log.value,
        }  # fmt: skip
