"""`python -m dflash_moe`: the same as the `dflash-moe` command. Workers are started this way.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import sys

from dflash_moe.cli.main import run

if __name__ == "__main__":
    sys.exit(run())
