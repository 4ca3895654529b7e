"""`python -m dflash_moe` does the same as the command `dflash-moe`. Workers that a host starts
run this file too.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import sys

from dflash_moe.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
