"""How long a worker that computes wrong numbers goes unnoticed, as the budget of the audit has it.

A wrong row is noticed when it is one of those that the audit computes again (holders/row_audit.py),
so that the number of rows until then follows from two shares alone.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import math
from dataclasses import dataclass

# What computing a row again takes on the machines of decision 58, its weights read from memory.
ROW_S = 0.004
# Of such rows documents and `doctor` speak: how many of a worker's are wrong, and how many all
# workers answer together in a second, from a slow decode to a busy engine.
WRONG_SHARES = (1.0, 0.02, 0.001)
ROWS_PER_S = (100, 1000, 10_000)
CERTAINTIES = (0.5, 0.99)


@dataclass(frozen=True, slots=True)
class Detection:
    """Of a worker with this share of wrong rows, a share of whose rows is audited: after how many
    calls of one row it is found with each of CERTAINTIES.
    """

    rows_per_s: int
    wrong_share: float
    audited_share: float
    calls: tuple[int, ...]


def calls_until_caught(wrong_share: float, audited_share: float, certainty: float) -> int:
    """Returns after how many calls of one row a worker is found with probability `certainty`, where
    each row is wrong and is audited with these probabilities, whatever the others are. All three
    are above 0, the shares at most 1 and `certainty` below it.
    """
    caught = wrong_share * audited_share
    return 1 if caught >= 1 else math.ceil(math.log1p(-certainty) / math.log1p(-caught))


def audited_share(cpu: float, rows_per_s: float, row_s: float = ROW_S) -> float:
    """Returns the share of rows that is computed again within `cpu` of a core, where workers answer
    `rows_per_s` rows in a second and computing one takes `row_s`.
    """
    return min(1.0, cpu / row_s / rows_per_s)


def detections(cpu: float) -> list[Detection]:
    """Returns what a budget finds, for each of ROWS_PER_S and WRONG_SHARES; nothing for none."""
    found = []
    for rows_per_s in ROWS_PER_S if cpu > 0 else ():
        share = audited_share(cpu, rows_per_s)
        for wrong in WRONG_SHARES:
            calls = tuple(calls_until_caught(wrong, share, certainty) for certainty in CERTAINTIES)
            found.append(Detection(rows_per_s, wrong, share, calls))
    return found
