"""Numerics classes as topologies and placements speak of them: which class a word of `activations`
asks for on which backend.

Everything comes from the table in csrc/compute/numerics.cc, so that no class is named here.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from dflash_moe import _core
from dflash_moe.config.activations import ACTIVATIONS, BACKENDS
from dflash_moe.errors import UnsupportedError

CLASSES = {facts.name: facts for facts in _core.numerics_table()}
DEFAULT_NUMERICS = next(iter(CLASSES))
DEFAULT_ACTIVATIONS = CLASSES[DEFAULT_NUMERICS].activations


def _offered(activations: str, backend: str) -> tuple[str, ...]:
    """Returns the classes that a backend has for a word."""
    return tuple(name for name, facts in CLASSES.items() if facts.activations == activations and backend in facts.offered_by)


# For these words one backend has several classes, because its cards differ. Only the opened card
# says which of them it computes, in the answer to hello. Until then the word stands for the class.
_UNDECIDED = {
    word: classes for word in ACTIVATIONS for backend in BACKENDS if len(classes := _offered(word, backend)) > 1
}  # fmt: skip


def class_on(activations: str, backend: str) -> str:
    """Returns the class that a word means on `backend` (cpu, cuda or hip), or the word itself where
    the device there has to say which.

    A class that nothing offers there is returned all the same, and the device that is asked for it
    refuses it with a reason of its own.
    """
    if activations in CLASSES:
        return activations
    named = tuple(name for name, facts in CLASSES.items() if facts.activations == activations)
    found = _offered(activations, backend) or named
    return found[0] if len(found) == 1 else activations


def possible_classes(numerics: str) -> tuple[str, ...]:
    """Returns the classes that `numerics` may turn out to be: the class itself, or for a word whose
    class a card decides all that it may decide for.
    """
    return _UNDECIDED.get(numerics, (numerics,))


def takes_weights(numerics: str, weight_dtype: str) -> bool:
    """Says whether the class computes with weights in this format."""
    try:
        _core.check_numerics(numerics, weight_dtype)
    except UnsupportedError:
        return False
    return True
