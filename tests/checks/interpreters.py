"""`make pythons`: on every Python that pyproject.toml names and this machine has, all sources
compile, what needs no other package is imported, and the tests that need none pass. Interpreters
are those of PATH, of pyenv and of uv. One that is missing is named; one that fails is a failure.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# The folders of what users run. Tests and the lab run in the project's own environment.
SOURCES = ("dflash_moe", "setup.py")
# These import the standard library and what of the package needs no more.
TESTS = ("tests.unit.engine.test_door",)
COMMANDS = (
    # What a later version warns of, such as an unknown escape in a text, is an error here.
    ("-W", "error", "-m", "compileall", "-q", *SOURCES),
    ("-m", "tests.checks.importable"),
    ("-m", "unittest", "-q", *TESTS),
)
LIMIT_S = 60.0
_ASK = (
    "import platform, sys; "
    "kind = 'own' if sys.prefix == sys.base_prefix else 'environment'; "
    "print(platform.python_implementation(), platform.python_version(), kind)"
)


def declared(root: Path) -> list[str]:
    """Returns the versions that pyproject.toml names, such as "3.10"."""
    text = (root / "pyproject.toml").read_text(encoding="utf-8")
    return re.findall(r'"Programming Language :: Python :: (3\.\d+)"', text)


def candidates(wanted: Iterable[str], environment: Mapping[str, str]) -> list[Path]:
    """Returns where interpreters may be: on PATH by name, and with the version managers."""
    home = Path(environment.get("HOME", "/"))
    pyenv = Path(environment.get("PYENV_ROOT") or home / ".pyenv") / "versions"
    shared = Path(environment.get("XDG_DATA_HOME") or home / ".local/share")
    uv = Path(environment.get("UV_PYTHON_INSTALL_DIR") or shared / "uv/python")
    names = ("python3", *(f"python{version}" for version in wanted))
    on_path = [Path(folder) / name for folder in environment.get("PATH", "").split(os.pathsep) if folder for name in names]
    managed = [path for folder in (pyenv, uv) if folder.is_dir() for path in sorted(folder.glob("*/bin/python3"))]
    return [path for path in (*on_path, *managed) if path.is_file()]


def find(wanted: Iterable[str], environment: Mapping[str, str]) -> dict[str, Path]:
    """Returns an interpreter for each wanted version that there is. Passed over is what is no
    CPython, what does not answer, such as the stand-in of a version that is not chosen, and a
    virtual environment, whose packages would hide what the sources lack.
    """
    found: dict[str, Path] = {}
    for path in candidates(wanted, environment):
        try:
            done = subprocess.run([path, "-I", "-c", _ASK], capture_output=True, text=True, timeout=LIMIT_S, check=False)
        except (OSError, subprocess.TimeoutExpired):
            continue
        answer = re.fullmatch(r"CPython (3\.\d+)\.\S+ own\s*", done.stdout) if done.returncode == 0 else None
        if answer and answer[1] in wanted:
            found.setdefault(answer[1], path)
    return found


def failure(python: Path, root: Path) -> str:
    """Returns what fails with this interpreter, empty where all passes."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    with tempfile.TemporaryDirectory() as folder:
        environment = {**kept, "PYTHONPYCACHEPREFIX": folder, "PYTHONNOUSERSITE": "1"}
        for command in COMMANDS:
            try:
                done = subprocess.run(
                    [python, *command], cwd=root, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                    text=True, timeout=LIMIT_S, check=False,
                )  # fmt: skip
            except subprocess.TimeoutExpired:
                return f"{' '.join(command)}: not done within {LIMIT_S:g} s"
            if done.returncode:
                return f"{' '.join(command)}: exit status {done.returncode}\n{done.stdout}"
    return ""


def summary(passed: list[str], failed: list[str], missing: list[str]) -> str:
    """Returns one line that says of each version what became of it."""
    parts = (("passed", passed), ("FAILED", failed), ("not on this machine, so not run", missing))
    return "Python: " + "; ".join(f"{', '.join(versions)} {what}" for what, versions in parts if versions)


def main(root: Path = ROOT, environment: Mapping[str, str] | None = None) -> int:
    """Runs all and prints what came of it; writes the summary to build/pythons.txt. Returns the
    exit status.
    """
    wanted = declared(root)
    pythons = find(wanted, os.environ if environment is None else environment)
    passed, failed = [], []
    for version, python in sorted(pythons.items(), key=lambda item: wanted.index(item[0])):
        wrong = failure(python, root)
        (failed if wrong else passed).append(version)
        print(f"{version} ({python}): {wrong or 'passed'}")
    line = summary(passed, failed, [version for version in wanted if version not in pythons])
    print(line)
    (root / "build").mkdir(exist_ok=True)
    (root / "build" / "pythons.txt").write_text(line + "\n", encoding="utf-8")
    return 1 if failed or not passed else 0


if __name__ == "__main__":
    sys.exit(main())
