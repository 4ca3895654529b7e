"""Who may ask: keys, and pages of strangers in a browser of somebody who may. This wraps the whole
application, so that no route is forgotten.

A page of another site can have a browser send requests here, and the browser adds a Basic password
by itself; such requests carry an `Origin`. A name that its owner lets point here (DNS rebinding)
makes the page's requests look like those of this site, but for their `Host`.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import hashlib
import hmac
import ipaddress
from collections.abc import Mapping, Sequence
from urllib.parse import urlsplit

from dflash_moe.server.front.api_error import ApiError

# These say nothing but whether the server works, and probes have no key.
OPEN_PATHS = {"/health", "/ready"}
# The entries of a request's scope that handlers read.
SALT, IS_KNOWN = "dflash_moe.salt", "dflash_moe.is_known"
_SALT_BYTES = 16
# Who may ask is said by these, each once: thousands of one would be compared with all keys, or each
# with all others, before anything is known of the caller.
_ONCE = (b"host", b"origin", b"authorization", b"x-api-key")


class Guard:
    """Lets requests through that may, as (salt of the key, whether the caller is known)."""

    def __init__(self, keys: Sequence[str], *, hosts: Sequence[str], origins: Sequence[str]) -> None:
        """`hosts` are names by which others reach this server, and `origins` the pages that may
        ask. Without `keys` only loopback names are hosts of their own.
        """
        # Digests have one length, so that a comparison tells none.
        self._keys = [(hashlib.sha256(key.encode()).digest(), _salt(key)) for key in keys]
        self._hosts = {host.lower().rstrip(".") for host in hosts}
        self._origins = set(origins)

    def admit(self, path: str, headers: Sequence[tuple[bytes, bytes]]) -> tuple[bytes, bool]:
        """Returns the salt of the caller's key, and whether the caller is known. Raises ApiError
        for who may not ask.
        """
        given = _given_once(headers)
        self._check_host(given.get(b"host"))
        self._check_origin(given.get(b"origin"), given.get(b"host"))
        if not self._keys:
            return b"", True
        salt = self._salt_of(given)
        if salt is None and path not in OPEN_PATHS:
            raise ApiError(
                401, "a key is needed: Authorization: Bearer KEY, x-api-key: KEY, or KEY as the password of Basic",
                code="invalid_api_key", headers={"www-authenticate": 'Basic realm="dflash_moe", charset="UTF-8"'},
            )  # fmt: skip
        return salt or b"", salt is not None

    def allowed_origin(self, headers: Sequence[tuple[bytes, bytes]]) -> str | None:
        """Returns the page that asks, where it is one of those that may; CORS headers are for
        it.
        """
        found = next((value.decode("latin-1") for name, value in headers if name == b"origin"), None)
        return found if found is not None and self._may_ask(found) else None

    def _may_ask(self, origin: str) -> bool:
        return "*" in self._origins or origin in self._origins

    def _check_host(self, host: bytes | None) -> None:
        if self._keys or host is None:
            return
        name = host_name(host.decode("latin-1"))
        if name not in self._hosts and not is_loopback_name(name):
            raise ApiError(
                403, f"Host {name[:80]!r} is none of this server's names; a proxy's name is allowed by --allow-host, and "
                "with --api-key-file any is", code="foreign_host",
            )  # fmt: skip

    def _check_origin(self, given: bytes | None, host: bytes | None) -> None:
        if given is None:
            return
        origin = given.decode("latin-1")
        if self._may_ask(origin) or host is not None and _netloc(origin) == host.decode("latin-1").lower():
            return
        raise ApiError(403, f"Origin {origin[:80]!r} may not ask here; --allow-origin lets a page do so", code="foreign_origin")

    def _salt_of(self, headers: Mapping[bytes, bytes]) -> bytes | None:
        found = None
        for given in _given_keys(headers):
            digest = hashlib.sha256(given).digest()
            for key, salt in self._keys:
                # All are compared, whichever one it is.
                if hmac.compare_digest(digest, key):
                    found = salt
        return found


def _given_once(headers: Sequence[tuple[bytes, bytes]]) -> dict[bytes, bytes]:
    """Returns the headers that say who asks. Raises ApiError where one is given twice."""
    found: dict[bytes, bytes] = {}
    for name, value in headers:
        if name not in _ONCE:
            continue
        if name in found:
            raise ApiError(400, f"the header {name.decode()} is given more than once")
        found[name] = value
    return found


def _given_keys(headers: Mapping[bytes, bytes]) -> list[bytes]:
    found = [headers[b"x-api-key"].strip()] if b"x-api-key" in headers else []
    scheme, _, rest = headers.get(b"authorization", b"").strip().partition(b" ")
    if scheme.lower() == b"bearer":
        found.append(rest.strip())
    elif scheme.lower() == b"basic":
        with contextlib.suppress(binascii.Error):
            found.append(base64.b64decode(rest.strip(), validate=True).partition(b":")[2])
    return found


def _salt(key: str) -> bytes:
    return hashlib.blake2b(key.encode(), digest_size=_SALT_BYTES, person=b"cache salt").digest()


def host_name(given: str) -> str:
    """Returns the name in a Host header, without port and brackets, in lower case."""
    text = given.strip().lower()
    if text.startswith("["):
        return text[1:].partition("]")[0]
    return text.partition(":")[0].rstrip(".")


def is_loopback_name(name: str) -> bool:
    """Says whether a name means this machine whoever resolves it."""
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def _netloc(origin: str) -> str | None:
    """Returns host and port of an origin as a Host header has them; None for what is none."""
    try:
        return urlsplit(origin).netloc.lower() or None
    except ValueError:
        return None


def cors_headers(origin: str | None) -> Mapping[str, str]:
    """Returns the headers that let a page of this origin read an answer; none without one."""
    if origin is None:
        return {}
    return {"access-control-allow-origin": origin, "vary": "Origin", "access-control-expose-headers": "*"}


def preflight_headers(origin: str) -> Mapping[str, str]:
    """Returns the answer to a browser that asks whether a page may ask."""
    return {
        **cors_headers(origin), "access-control-allow-methods": "GET, POST, OPTIONS",
        # Clients add headers of their own, such as x-stainless-os; "*" is all of them but this one.
        "access-control-allow-headers": "*, authorization", "access-control-max-age": "600",
    }  # fmt: skip
