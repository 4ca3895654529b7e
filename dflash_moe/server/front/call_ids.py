"""Ids of tool calls.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import secrets
import string

_LETTERS = string.ascii_letters + string.digits


def new_call_id(*, is_short: bool) -> str:
    """Returns a new id; a short one has nine letters and digits, as Mistral's templates demand."""
    return "".join(secrets.choice(_LETTERS) for _ in range(9)) if is_short else f"call_{secrets.token_hex(12)}"
