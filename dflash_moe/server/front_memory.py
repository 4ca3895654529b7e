"""How much memory a front takes, and what it and the engine process start for texts and grammars,
which the plan of a server leaves to them.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

MB = 1_000_000
# The interpreter with its libraries 44 MB, the process that renders templates 12, the one that
# reads large bodies 25 from the first of them on, the one that compiles grammars 47, and the one
# that follows them 30, both from the first grammar on; texts, answers and grammars that are under
# way the rest.
_BASE_BYTES = 165 * MB
# The tables of a vocabulary, by its words: those of the tokenizer take 0.9 KB a word with 150,000
# words and 1.1 while they are read, and those of grammars 0.9.
_WORD_BYTES = 2000


def front_bytes(num_words: int) -> int:
    """Returns the bytes of a front whose model has a vocabulary of so many words."""
    return _BASE_BYTES + num_words * _WORD_BYTES
