"""The words that `activations` may be: how inputs are rounded before they are multiplied.

They come from the table in csrc/compute/numerics.cc, so that no numerics class is named here.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from dflash_moe import _core

BACKENDS = ("cpu", "cuda", "hip")


def _words() -> tuple[str, ...]:
    """Returns the words: a rounding of inputs, or the name of a class that only some machines
    compute.
    """
    classes = _core.numerics_table()
    partial = [facts.name for facts in classes if len(facts.offered_by) < len(BACKENDS)]
    return (*dict.fromkeys(facts.activations for facts in classes), *partial)


ACTIVATIONS = _words()
