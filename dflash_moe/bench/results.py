"""Writes and reads the result file of every bench case. It holds samples, machine and commit, so
that a number can be traced and compared.

Schema 2 is {"schema", "case", "commit", "dirty", "machine", "params", "rows": [...]} and, where a
case has them, "summary" and "timelines". What was measured has as many digits as say something. A
long list of like objects is {"columns": [names], "values": [[...], ...]}; schema 1 has none of
these. Plots and comparisons read these files only, never a live run. This file depends on nothing
but the standard library and errors.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from dflash_moe.errors import ConfigError
from dflash_moe.named_files import open_named

SCHEMA = 2
READ_SCHEMAS = (1, SCHEMA)
# A row keeps at most so many samples of a round, those of each twentieth of it: what a comparison
# needs of a round is its median and its spread, and a result stays below 300 KB.
KEPT_OF_A_ROUND = 21
# So many digits are written of a sample, whose repetition differs in the third, and of what was
# made of all of them.
SAMPLE_DIGITS, DIGITS = 4, 8
# So many objects with the same keys are written as a table, which names the keys once.
TABLE_ROWS = 64
MEASURED = ("rows", "summary", "timelines")
# Git leaves out paths that are written in this way.
NOT_MEASURED = (":(exclude)bench/results", ":(exclude)*.md")


def percentile(samples: Sequence[float], fraction: float) -> float:
    """Returns the nearest-rank percentile of a sequence that is not empty. `fraction` is in [0,
    1].
    """
    ordered = sorted(samples)
    rank = min(len(ordered) - 1, max(0, round(fraction * (len(ordered) - 1))))
    return ordered[rank]


def timing_fields(samples_s: Sequence[float], *, per_round: int = 1) -> dict[str, Any]:
    """Returns the fields that every row carries: `samples_s` in the order of rounds,
    `samples_per_round`, and `median_s` and `p95_s` of all that was measured. Where that are more
    than `samples_per_round`, `measured_per_round` of them, samples are the quantiles of a round.
    """
    kept: Sequence[float] = samples_s
    if per_round > KEPT_OF_A_ROUND:
        rounds = (sorted(samples_s[at : at + per_round]) for at in range(0, len(samples_s), per_round))
        kept = [quantile for one in rounds for quantile in _quantiles(one)]
    return {
        "samples_s": list(kept),
        "samples_per_round": min(per_round, KEPT_OF_A_ROUND),
        "measured_per_round": per_round,
        "median_s": statistics.median(samples_s),
        "p95_s": percentile(samples_s, 0.95),
    }


def _quantiles(ordered: Sequence[float]) -> Iterator[float]:
    """Yields the least, the largest and what lies evenly between; the middle one is the median."""
    for number in range(KEPT_OF_A_ROUND):
        whole, part = divmod(number * (len(ordered) - 1), KEPT_OF_A_ROUND - 1)
        above = ordered[min(whole + 1, len(ordered) - 1)]
        yield ordered[whole] + (above - ordered[whole]) * part / (KEPT_OF_A_ROUND - 1)


@dataclass(slots=True)
class BenchResult:
    """The result of one bench run. Rows grow as they are measured, so that an interrupted run keeps
    what it has.

    `interleaved` says that sample i of two rows was taken in the same round, so that ratios may be
    taken round by round.
    """

    case: str
    params: dict[str, Any]
    rows: list[dict[str, Any]] = field(default_factory=list)
    complete: bool = False
    started_unix: float = field(default_factory=time.time)
    interleaved: bool = False
    summary: list[dict[str, Any]] = field(default_factory=list)
    timelines: list[dict[str, Any]] = field(default_factory=list)
    # An incomplete run says what ended it.
    ended_by: str | None = None
    # This describes the tree at the start: an edit meanwhile changes no code that runs.
    provenance: dict[str, Any] = field(default_factory=lambda: provenance())

    def as_json(self) -> dict[str, Any]:
        found: dict[str, Any] = {
            "schema": SCHEMA,
            "case": self.case,
            **self.provenance,
            "started_unix": self.started_unix,
            "complete": self.complete,
            "interleaved": self.interleaved,
            "params": self.params,
            "rows": self.rows,
        }
        optional = {"ended_by": self.ended_by, "summary": self.summary, "timelines": self.timelines}
        return found | {key: value for key, value in optional.items() if value}

    def write(self, path: Path) -> None:
        """Writes the JSON atomically, so that a reader never sees half a file. Raises OSError
        naming `path`, and what was there before stays.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(path.name + ".partial")
        try:
            partial.write_text(text_of(self.as_json()), encoding="utf-8")
            partial.replace(path)
        except OSError as error:
            # The error of a full disk names no file.
            with suppress(OSError):
                partial.unlink()
            raise OSError(error.errno, error.strerror, str(path)) from None


def text_of(result: Mapping[str, Any]) -> str:
    """Returns the text of a result file, with a line for each row."""
    lines = []
    for key, value in result.items():
        packed = _packed(value) if key in MEASURED else value
        lines.append(f'"{key}":{_text(packed)}')
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _text(value: Any) -> str:
    if isinstance(value, list):
        return "[\n" + ",\n".join(json.dumps(one, separators=(",", ":")) for one in value) + "\n]"
    if isinstance(value, Mapping) and value.keys() == {"columns", "values"}:
        return f'{{"columns":{json.dumps(value["columns"])},"values":{_text(value["values"])}}}'
    return json.dumps(value)


def _packed(value: Any, digits: int = DIGITS) -> Any:
    """Returns what is written of something measured."""
    if isinstance(value, float):
        return float(f"{value:.{digits}g}")
    if isinstance(value, Mapping):
        return {key: _packed(one, SAMPLE_DIGITS if key == "samples_s" else digits) for key, one in value.items()}
    if not isinstance(value, list | tuple):
        return value
    packed = [_packed(one, digits) for one in value]
    if len(packed) < TABLE_ROWS or not all(isinstance(one, dict) and one.keys() == packed[0].keys() for one in packed):
        return packed
    return {"columns": list(packed[0]), "values": [[one[key] for key in packed[0]] for one in packed]}


def _unpacked(value: Any) -> Any:
    """Returns lists of objects for tables. What only looks like a table stays as it is."""
    if isinstance(value, list):
        return [_unpacked(one) for one in value]
    if not isinstance(value, dict):
        return value
    if value.keys() == {"columns", "values"} and all(isinstance(one, list) for one in value.values()):
        columns = [str(one) for one in value["columns"]]
        if all(isinstance(line, list) and len(line) == len(columns) for line in value["values"]):
            return [dict(zip(columns, map(_unpacked, line), strict=True)) for line in value["values"]]
    return {key: _unpacked(one) for key, one in value.items()}


def described(params: Any, *left_out: str) -> dict[str, Any]:
    """Returns the parameters of a bench, a dataclass, as its result has them: all fields but those
    `left_out`, a model by its name.
    """
    found = {item.name: getattr(params, item.name) for item in dataclasses.fields(params) if item.name not in left_out}
    found = {name: list(value) if isinstance(value, tuple) else value for name, value in found.items()}
    return found | {"model": params.model.name}


def read_result(path: Path, *, case: str | None = None) -> dict[str, Any]:
    """Reads a result file. Raises ConfigError for another schema, another case, or something that
    is no result at all.
    """
    try:
        with open_named(path) as file:
            loaded = json.loads(file.read().decode("utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such result file") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}); pass a result file of `dflash-moe bench`") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: not a JSON result file ({error}); is it cut short?") from None
    if isinstance(loaded, dict):
        loaded |= {key: _unpacked(loaded[key]) for key in MEASURED if key in loaded}
    if not isinstance(loaded, Mapping) or loaded.get("schema") not in READ_SCHEMAS or not isinstance(loaded.get("rows"), list):
        found = loaded.get("schema") if isinstance(loaded, Mapping) else type(loaded).__name__
        raise ConfigError(f"{path}: expected a bench result of schema {SCHEMA}, found {found!r}")
    if case is not None and loaded.get("case") != case:
        raise ConfigError(f"{path}: expected a result of case {case!r}, found {loaded.get('case')!r}")
    if not isinstance(loaded.get("case"), str) or not all(isinstance(row, Mapping) for row in loaded["rows"]):
        raise ConfigError(f"{path}: a bench result needs a case and rows that are objects; is the file damaged?")
    for key in ("params", "machine"):
        if not isinstance(loaded.get(key, {}), Mapping):
            raise ConfigError(f"{path}: {key!r} is not an object; is the file damaged?")
    return {"params": {}, "commit": "unknown", "machine": {}, **loaded}


def require_fields(row: Mapping[str, Any], fields: Sequence[str], file: str) -> None:
    """Raises ConfigError naming file, row and the first field that the row lacks."""
    for key in fields:
        if row.get(key) is None:
            raise ConfigError(f"{file}: row {row.get('name', '(without a name)')!r} lacks the field {key!r}; it cannot be used")


def provenance() -> dict[str, Any]:
    """Returns `commit`, `dirty` and `machine`, which say where a number comes from."""
    commit, dirty = source_commit()
    return {"commit": commit, "dirty": dirty, "machine": machine_facts()}


def source_commit() -> tuple[str, bool]:
    """Returns (commit, dirty) of the source tree from which this package runs, and ("unknown",
    True) for an installed wheel. Results and documents may differ from the commit, because they are
    no code that is measured.
    """
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return "unknown", True
    try:
        commit = _git(root, "rev-parse", "HEAD")
        dirty = bool(_git(root, "status", "--porcelain", "--untracked-files=no", "--", ".", *NOT_MEASURED))
    except (OSError, subprocess.SubprocessError):
        return "unknown", True
    return commit, dirty


def _git(root: Path, *arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=True, timeout=10)
    return done.stdout.strip()


def machine_facts() -> dict[str, Any]:
    """Returns what a reader needs to judge the numbers. It names no host."""
    return {
        "cpu": _cpu_model(),
        "cores_usable": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "load_average": list(os.getloadavg()),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "isa": _best_isa(),
        "packages": {name: version for name in ("torch", "transformers", "numpy") if (version := _version(name))},
    }


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()


def _best_isa() -> str:
    from dflash_moe import _core

    return _core.best_isa()


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
