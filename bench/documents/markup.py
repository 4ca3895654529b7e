"""Fills the marks in the documents, and finds what is not as it should be.

A measured figure outside of a mark is a finding, so that nobody copies one by hand. What a sentence
states and nobody measured (a setting, a mark to reach) is listed in STATED.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from bench.documents.figures import FIGURES
from bench.documents.recorded import Recorded
from bench.documents.tables import TABLES

# Figures of recorded results stand in these documents.
PAGES = ("engine", "faults", "kernels", "llama", "modes", "operators", "parity", "peers", "results", "server")
DOCUMENTS = (
    "README.md", "docs/benchmarks.md", *(f"docs/benchmarks/{page}.md" for page in PAGES), "docs/howto/weight_formats.md",
    "docs/numerics.md", "docs/reliability.md",
)  # fmt: skip

_TABLE = re.compile(r"(<!-- table: (measured/[\w-]+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)
_FIGURE = re.compile(r"(<!-- figure: ([\w-]+) -->)(.*?)(<!-- end -->)", re.DOTALL)
# A measurement gives a number with one of these units of time, speed or share.
_UNITS = r"ns|us|µs|ms|s|min|minutes|seconds|GB/s|GiB/s|MB/s|GFLOP/s|GFLOPS|tokens/s|tok/s|%|x(?! \d)|times"
_MEASURED = re.compile(rf"(?<![\w.])\d[\d,.]*\s?(?:{_UNITS})(?![\w/])")
# These sentences are about settings, definitions and marks to reach, by document with the words
# around the number. Those of benchmarks.md may stand in its pages too.
STATED = {
    "docs/benchmarks.md": (
        "95 % bootstrap interval", "at least 2 %", "delay line of 2 ms each way", "The mark was 80 %.",
        "marks were 25 us (goal 15 us) over shared memory and 60 us over sockets",
        "of one row was to take 60 us where whole layers are ours and 120 us where only modules are",
        "are to reach 1 and 1.05 x (goal 1.2 x) its speed, those of Q8_0 1.05 and 1.3 x;",
        "16 sequences over a worker, 0.9 x that of one process", "may take 3 % more than in the plain loop",
        "marks were at most 15 us more than TCP at 8 KiB, and at 1 MiB at least 0.8 GB/s",
        "marks were at most 1 us a call and 1 % of a token's time", "The mark was 0.5 %.",
        "own share of a step is to be at most 2 %", "to take at most 3 % more than in the plain loop",
    ),
    "docs/reliability.md": (
        "frozen for 10 ms to 10 s", "one tick (20 ms) at most", "waits 20,000 times within", "after 300 ms without progress",
        "5 ms later at most", "brings each 200 ms late", "for 3 to 5 s each",
        "With 4 ms a row, the default of 0.2% computes", "0.5% of 100 rows in a second, 0.05% of 1,000",
        "some 1.4 s or 9.2 s of calls", "in 2% after 70 s or eight minutes",
    ),
    "docs/numerics.md": ("never less than 1.5 times what one rounding of the result costs",),
}  # fmt: skip


def written(text: str, results: Path, not_recorded: list[str] | None = None) -> str:
    """Returns the document with every table and figure as the results give it. Raises KeyError
    naming a mark that nothing defines, and FileNotFoundError for a result that is not there; with
    `not_recorded`, what stands between its marks stays and the reason is added there.
    """
    recorded = Recorded(results)

    def filled(match: re.Match[str], wanted: Callable[[Recorded], str], around: str) -> str:
        try:
            return match[1] + around + wanted(recorded) + around + match[4]
        except FileNotFoundError as error:
            if not_recorded is None:
                raise
            not_recorded.append(f"{match[2]}: {error}")
            return match[0]

    text = _TABLE.sub(lambda match: filled(match, TABLES[match[2]], "\n"), text)
    return _FIGURE.sub(lambda match: filled(match, FIGURES[match[2]], ""), text)


def findings(root: Path) -> list[str]:
    """Returns a finding for tables and figures that are not what the results give, marks that
    nothing defines, definitions without a mark, results and rows that no table shows, and figures
    that were written by hand.
    """
    found: list[str] = []
    used: set[str] = set()
    recorded = Recorded(root / "bench" / "results")
    texts = {name: (root / name).read_text(encoding="utf-8") for name in DOCUMENTS}
    for name, text in texts.items():
        found += _of_marks(name, text, _TABLE, TABLES, recorded, used)
        found += _of_marks(name, text, _FIGURE, FIGURES, recorded, used)
        found += _by_hand(name, text)
    for defined in sorted((TABLES.keys() | FIGURES.keys()) - used):
        found.append(f"bench/documents: '{defined}' is defined and stands in no document; take it out, or show it")
    return found + recorded.unshown()


def _of_marks(
    name: str, text: str, mark: re.Pattern[str], known: dict[str, Callable[[Recorded], str]], recorded: Recorded, used: set[str]
) -> list[str]:
    found = []
    for match in mark.finditer(text):
        at = f"{name}:{text.count(chr(10), 0, match.start()) + 1}"
        used.add(match[2])
        if match[2] not in known:
            found.append(f"{at}: nothing defines '{match[2]}'")
            continue
        try:
            wanted = known[match[2]](recorded)
        except (FileNotFoundError, KeyError, ValueError) as error:
            found.append(f"{at}: {match[2]} cannot be made of the results: {error}")
            continue
        if match[3].strip("\n") != wanted:
            difference = next(
                (f"'{old}' is there, the result gives '{new}'" for old, new in _lines(match[3], wanted) if old != new),
                "differs",
            )
            found.append(f"{at}: {match[2]}: {difference}; run `python -m bench.documents`")
    return found


def _lines(old: str, new: str) -> list[tuple[str, str]]:
    before, after = old.strip("\n").splitlines(), new.splitlines()
    longest = max(len(before), len(after))
    return list(zip(before + [""] * (longest - len(before)), after + [""] * (longest - len(after)), strict=True))


def _by_hand(name: str, text: str) -> list[str]:
    """Returns a finding for each figure with a unit outside of marks, code and what is stated."""
    blank = lambda match: re.sub(r"[^\n]", " ", match[0])  # noqa: E731 - keeps lines where they are
    prose = _FIGURE.sub(blank, _TABLE.sub(blank, text))
    prose = re.sub(r"^    [^\n]*$|```.*?```|`[^`\n]*`|\]\([^)]*\)", blank, prose, flags=re.MULTILINE | re.DOTALL)
    for words in STATED.get("docs/benchmarks.md" if name.startswith("docs/benchmarks/") else name, ()):
        prose = re.sub(r"\s+".join(map(re.escape, words.split())), blank, prose)
    hint = "take it from a result, or list it in STATED where nobody measured it"
    return [
        f"{name}:{prose.count(chr(10), 0, match.start()) + 1}: '{match[0]}' is written by hand; {hint}"
        for match in _MEASURED.finditer(prose)
    ]
