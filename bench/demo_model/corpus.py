"""The demo model's corpus: documentation present with any Python - pydoc's topics and the standard
library's docstrings.

Read with `ast`, nothing is imported. Free to use: Python and its documentation are under the PSF
License, version 2. Deterministic for a given Python release; the hash of the release that trained
the model is committed below.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import platform
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from dflash_moe.errors import ConfigError

LICENCE = "PSF-2.0"
CORPUS_PYTHON = "3.11.7"
CORPUS_SHA256 = "0ffb0d587d6ca359beee5195d485efc7a9dccf43433b3d1ed6fe27734a02a402"
# One document in twenty, chosen by its hash, is never trained on.
HELD_OUT_EVERY = 20
# Shorter docstrings are mostly fragments.
MIN_DOCSTRING_CHARS = 120
EXCLUDED = ("test", "tests", "idlelib", "lib2to3", "site-packages", "turtledemo", "ensurepip", "__pycache__", "encodings")


@dataclass(frozen=True, slots=True)
class Corpus:
    train: tuple[str, ...]
    held_out: tuple[str, ...]
    sha256: str


def checked_corpus() -> Corpus:
    """Returns the corpus that trained the shipped model. Raises ConfigError where this Python has
    another one.
    """
    corpus = load_corpus()
    if corpus.sha256 != CORPUS_SHA256:
        raise ConfigError(
            f"the corpus of Python {platform.python_version()} has the hash {corpus.sha256[:12]}, that of the shipped model "
            f"{CORPUS_SHA256[:12]}: run this with Python {CORPUS_PYTHON}"
        )
    return corpus


def load_corpus() -> Corpus:
    """Loads all documents of this Python, split by their hashes. They are 2 million characters of
    English and Python.
    """
    documents = sorted(set(_topics()) | set(_docstrings()))
    digest = hashlib.sha256()
    train: list[str] = []
    held_out: list[str] = []
    for text in documents:
        own = hashlib.sha256(text.encode("utf-8")).digest()
        digest.update(own)
        (held_out if own[0] % HELD_OUT_EVERY == 0 else train).append(text)
    return Corpus(tuple(train), tuple(held_out), digest.hexdigest())


def _topics() -> list[str]:
    from pydoc_data.topics import topics

    return [text.strip() for text in topics.values()]


def _docstrings() -> list[str]:
    root = Path(sysconfig.get_path("stdlib"))
    found: list[str] = []
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if any(part in EXCLUDED for part in relative.parts):
            continue
        try:
            tree = ast.parse(path.read_text(encoding="utf-8"))
        except (SyntaxError, UnicodeDecodeError):
            continue
        found += _documents_of(tree)
    return found


def _documents_of(tree: ast.Module) -> list[str]:
    """Returns a document for each docstring of a module, and for each documented function or class
    with the line of its signature first.
    """
    found: list[str] = []
    module_text = ast.get_docstring(tree)
    if module_text and len(module_text) >= MIN_DOCSTRING_CHARS:
        found.append(module_text)
    for node in ast.walk(tree):
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            continue
        text = ast.get_docstring(node)
        if not text or len(text) < MIN_DOCSTRING_CHARS:
            continue
        head = f"class {node.name}:" if isinstance(node, ast.ClassDef) else f"def {node.name}({ast.unparse(node.args)}):"
        found.append(f'{head}\n    """{inspect.cleandoc(text)}"""')
    return found
