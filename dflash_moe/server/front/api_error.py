"""Errors as clients of OpenAI's API read them, and what becomes of the engine's.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Mapping
from typing import Any

from dflash_moe.errors import ConfigError, DflashError, printable
from dflash_moe.server.front import frames

_TYPES = {
    401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error",
    503: "service_unavailable",
}  # fmt: skip
# Anthropic's types by status, and the status that it has of its own: whoever asks may come back.
_ANTHROPIC_TYPES = {**_TYPES, 413: "request_too_large", 529: "overloaded_error"}
_OVERLOADED = 529
# Errors below this path have the shape of Anthropic's API.
_ANTHROPIC_PATH = "/v1/messages"
# A lost worker is started again within seconds, and a server that drains is replaced.
RETRY_AFTER_S = 5.0
# Status by the code of an engine's error; others are faults of the server.
_STATUS = {
    "invalid_argument": 400, frames.TOO_LONG: 400, "queue_full": 429, "cancelled": 503, frames.UNREADY: 503,
    frames.LOADING: 503, frames.DRAINING: 503, "worker_failed": 503, "worker_lost": 503, "worker_unfit": 503, "timeout": 503,
}  # fmt: skip


# Shows a value of a body in a message, which may be 8 MiB of anything: only so much is looked at.
_REPR = reprlib.Repr()
_REPR.maxstring = _REPR.maxother = 60
brief = _REPR.repr


class ApiError(Exception):
    """A request is answered with this. `param` names the field that is wrong, `code` is for
    programs.
    """

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None,
        retry_after_s: float | None = None, headers: Mapping[str, str] | None = None,
    ) -> None:  # fmt: skip
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code
        self.retry_after_s = retry_after_s
        self._headers = dict(headers or {})

    @property
    def headers(self) -> dict[str, str]:
        """The headers of the answer."""
        if self.retry_after_s is None:
            return self._headers
        return {**self._headers, "retry-after": str(max(1, math.ceil(self.retry_after_s)))}

    def body(self) -> dict[str, Any]:
        """Returns the body of the answer, which is also that of an event in a stream."""
        kind = _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        found: dict[str, Any] = {"message": printable(str(self)), "type": kind, "param": self.param, "code": self.code}
        if self.retry_after_s is not None:
            found["retry_after_s"] = self.retry_after_s
        return {"error": found}

    def renamed(self, names: Mapping[str, str]) -> ApiError:
        """Returns this error, with the name that its field has in another API."""
        if self.param is None or self.param not in names:
            return self
        name, text = names[self.param], str(self)
        said = name + text.removeprefix(self.param) if text.startswith(self.param) else f"{name}: {text}"
        return ApiError(
            self.status, said, param=name, code=self.code, retry_after_s=self.retry_after_s, headers=self._headers
        )  # fmt: skip


def shaped(error: ApiError, path: str) -> tuple[int, dict[str, Any]]:
    """Returns an error's status and body as clients of a path expect them."""
    if not path.startswith(_ANTHROPIC_PATH):
        return error.status, error.body()
    return _anthropic_status(error), anthropic_body(error)


def anthropic_body(error: ApiError) -> dict[str, Any]:
    """Returns the body of an error of Anthropic's API, which is also an event in a stream."""
    status = _anthropic_status(error)
    kind = _ANTHROPIC_TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": printable(str(error))}}


def _anthropic_status(error: ApiError) -> int:
    return _OVERLOADED if error.status == 503 else error.status


def from_engine(fields: object) -> ApiError:
    """Returns the error that the engine process has sent."""
    found = fields if isinstance(fields, dict) else {}
    code = str(found.get("code", "internal"))
    status = _STATUS.get(code, 500)
    retry = found.get("retry_after_s")
    if not isinstance(retry, int | float) or not 0 <= retry < 1e6:
        retry = RETRY_AFTER_S if status == 503 else None
    return ApiError(status, str(found.get("message", "the engine has failed")), code=code, retry_after_s=retry)


def from_error(error: DflashError, param: str | None = None) -> ApiError:
    """Returns what a client is told of an error that was raised in this process: a ConfigError is
    about the request, everything else about the server or the model.
    """
    if isinstance(error, ConfigError):
        return ApiError(400, str(error), param=param, code=error.code)
    return ApiError(_STATUS.get(error.code or "", 500), str(error), code=error.code)
