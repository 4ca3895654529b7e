"""The program that reads large bodies. JSON is parsed in C, which holds the interpreter for up to
75 ms for 8 MiB, and no event loop may stand still for so long. A thread does not help, and one that
gives way to the engine still less: it holds the interpreter while it waits for a processor.

Run by `large_bodies.py` through `start.py`. Frames are those of integrations/limited_process.py: a
request is the most values that a body may have, in 4 bytes, and the body. An answer is a list of
msgpack: FIELDS and these, REFUSED with the status, the message and the code of an error, or PLAIN
for fields of which msgpack cannot hold one, such as a number of more than 64 bits.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import gc
import os
import resource
import sys
from typing import Any, BinaryIO

import msgpack

from dflash_moe.integrations.limited_process import LENGTH
from dflash_moe.server.front import frames
from dflash_moe.server.front.api_error import ApiError
from dflash_moe.server.front.large_bodies import FIELDS, PLAIN, REFUSED
from dflash_moe.server.front.request_fields import parsed

# The least there is. Sixteen streams lost an eighth of their tokens/s beside bodies that were read
# at 19, and a third beside texts and grammars at 10 (bench/results/serving_interference.json).
NICENESS = 19
# An empty list takes 64 bytes for three of JSON, and an object with a field 240 for seven: a body
# of 8 MiB that is nothing but these takes more than this, and is refused.
_BASE_BYTES = 128 << 20
_BYTES_PER_BYTE = 24
TOO_MANY_VALUES = (
    "the body has {count:,} values (numbers, texts, lists and objects), of which each takes a token or "
    "more where the model is to read it, and at most {most:,} are taken; send fewer: nothing is cut"
)


def run_bodies(max_body_bytes: int) -> None:
    """Reads bodies from stdin until that ends."""
    # Not `os.nice`, which adds to what the thread had that started this process.
    os.setpriority(os.PRIO_PROCESS, 0, NICENESS)
    # JSON has no circles, and the collector would look at millions of values again and again.
    gc.disable()
    most_bytes = _BASE_BYTES + _BYTES_PER_BYTE * max_body_bytes
    limits = {resource.RLIMIT_AS: most_bytes, resource.RLIMIT_CORE: 0, resource.RLIMIT_FSIZE: 0, resource.RLIMIT_NPROC: 0}
    for which, limit in limits.items():
        resource.setrlimit(which, (limit, limit))
    requests, answers = sys.stdin.buffer, sys.stdout.buffer
    _write(answers, b"")
    while len(head := requests.read(2 * LENGTH.size)) == 2 * LENGTH.size:
        size, most_values = LENGTH.unpack(head[: LENGTH.size])[0], LENGTH.unpack(head[LENGTH.size :])[0]
        _write(answers, _answer(requests.read(size - LENGTH.size), most_values))


def _answer(raw: bytes, most_values: int) -> bytes:
    try:
        body = parsed(raw)
        count = _num_values(body)
        if count > most_values:
            raise ApiError(400, TOO_MANY_VALUES.format(count=count, most=most_values), code=frames.TOO_LONG)
        return _packed(FIELDS, dict(body))
    except ApiError as error:
        return _packed(REFUSED, error.status, str(error), error.code)
    except (ValueError, OverflowError):
        # A number of more than 64 bits, or a depth that JSON takes and msgpack does not.
        return _packed(PLAIN)
    except MemoryError:
        return _packed(REFUSED, 400, "the body takes more memory than a request of its size has use for", None)


def _packed(*answer: Any) -> bytes:
    packed: bytes = msgpack.packb(answer, unicode_errors="surrogatepass")
    return packed


def _num_values(body: dict[str, Any]) -> int:
    count = 1
    waiting: list[Any] = [body]
    while waiting:
        one = waiting.pop()
        count += len(one)
        waiting += [value for value in (one.values() if isinstance(one, dict) else one) if isinstance(value, (dict, list))]
    return count


def _write(stream: BinaryIO, answer: bytes) -> None:
    stream.write(LENGTH.pack(len(answer)) + answer)
    stream.flush()
