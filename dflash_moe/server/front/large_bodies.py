"""Reads bodies that are too large for the event loop's process, in one of their own
(body_process.py).

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import logging
import threading
from pathlib import Path

import msgpack

from dflash_moe.integrations.limited_process import LENGTH, Ended, LimitedProcess
from dflash_moe.server.front import api_error
from dflash_moe.server.front.api_error import ApiError
from dflash_moe.server.front.request_fields import Body, parsed

log = logging.getLogger(__name__)

# A smaller body of numbers is parsed within 3 ms.
LARGE_BYTES = 256 << 10
# Values beside those of the prompt, a token or more each, and of one field that has a value for
# each word of the vocabulary, such as `logit_bias`. No request of a client comes near.
_MORE_VALUES = 10_000
# What an answer begins with.
FIELDS, REFUSED, PLAIN = "fields", "refused", "plain"
_TOO_LARGE = "its answer is larger than any body"
_TIME_LIMIT = "it took too much processor time"
_MEMORY_LIMIT = "it took too much memory"


class LargeBodies:
    """Reads bodies. Threads may call it, and one body is read at a time. Its process is started for
    the first body and ends with this one.
    """

    def __init__(self, max_body_bytes: int) -> None:
        self._max_body_bytes = max_body_bytes
        self._process: LimitedProcess | None = None
        self._lock = threading.Lock()

    def parsed(self, raw: bytes, max_model_len: int, vocab_size: int) -> Body:
        """As `request_fields.parsed`. Raises ApiError also for a body that has more values than a
        prompt of so many tokens and a bias for each word, and where its process fails.
        """
        most_values = max_model_len + vocab_size + _MORE_VALUES
        # Msgpack writes a float in nine bytes, where JSON has four or more.
        most_bytes = 4 * self._max_body_bytes + (1 << 16)
        with self._lock:
            try:
                if self._process is None:
                    self._process = self._started()
                answer = self._process.ask(LENGTH.pack(most_values) + raw, most_bytes, _TOO_LARGE)
            except (OSError, Ended) as error:
                self._end()
                log.warning("the process that reads large bodies has failed, and another one is started: %s", error)
                text = "a body of this size cannot be read at the moment; try again, or send less"
                raise ApiError(503, text, code="busy", retry_after_s=api_error.RETRY_AFTER_S) from None
            except BaseException:
                # An interrupt leaves an answer behind, which must not become the next one.
                self._end()
                raise
        kind, *content = msgpack.unpackb(answer, unicode_errors="surrogatepass", strict_map_key=False)
        if kind == PLAIN:
            # It has what a frame cannot hold, in few enough values.
            return parsed(raw)
        if kind == FIELDS:
            return Body(content[0], len(raw))
        status, message, code = content
        raise ApiError(status, message, code=code)

    def _started(self) -> LimitedProcess:
        most = str(self._max_body_bytes)
        program = [str(Path(__file__).resolve().with_name("start.py")), "dflash_moe", "bodies", "--max-body", most]
        return LimitedProcess(program, time_limit=_TIME_LIMIT, memory_limit=_MEMORY_LIMIT)

    def _end(self) -> None:
        if self._process is not None:
            self._process.close()
            self._process = None
