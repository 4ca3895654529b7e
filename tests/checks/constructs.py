"""Checks that some constructs and names do not appear: code from data, names that say nothing, and
traces of one machine.

"The wire carries numbers, not behaviour" (no pickle, no eval, no unsafe YAML) is checked on the
syntax tree, so that a string or a comment about them is allowed.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

from tests.checks.sources import project_files

FORBIDDEN_MODULES = {"pickle", "cPickle", "_pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"}
FORBIDDEN_NAMES = {"eval", "exec", "__import__"}
FORBIDDEN_CALLS = {
    ("torch", "load"): "read safetensors",
    ("yaml", "unsafe_load"): "use the topology's safe loader",
    ("yaml", "full_load"): "use the topology's safe loader",
    ("os", "system"): "use subprocess with a list",
    ("os", "popen"): "use subprocess with a list",
}
BANNED_STEMS = {"utils", "util", "common", "helper", "helpers", "manager", "misc", "legacy", "data", "info", "stuff"}
_BANNED_ENDING = re.compile(r"(_v2|_new|_old|_legacy|_utils|_helpers?|_manager)$")
ALLOWED_STEMS = {"block_manager"}
# These are traces of the machine on which somebody worked, or of where packages come from.
_TRACES = re.compile(r"(?<![\w.])/(?:root|home|work|Users)/[\w.]|\b(?:pypi\.org|pythonhosted\.org|deb\.debian\.org)\b")
_TEXT = {".py", ".pyi", ".h", ".cc", ".md", ".toml", ".yaml", ".yml", ".json", ".txt", ".cmake", ""}


def find(root: Path) -> list[str]:
    """Returns a finding for every forbidden construct, file name and trace of a machine below
    `root`.
    """
    findings: list[str] = []
    for path in project_files(root):
        where = path.relative_to(root)
        findings += _findings_of_name(where)
        if path.suffix in _TEXT and path.name != "LICENSE" and "checks" not in where.parts:
            findings += _findings_of_text(path, where)
        if path.suffix == ".py" and "checks" not in where.parts:
            findings += _findings_of_tree(path, where)
    return findings


def _findings_of_name(where: Path) -> list[str]:
    findings = []
    for part in where.parts:
        stem = part.split(".")[0]
        if stem in ALLOWED_STEMS:
            continue
        if stem in BANNED_STEMS or _BANNED_ENDING.search(stem):
            findings.append(f"{where}: the name '{stem}' says nothing; name the concept it holds")
    return findings


def _findings_of_text(path: Path, where: Path) -> list[str]:
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return []
    return [
        f"{where}:{number}: '{match[0]}' belongs to one machine; leave it out"
        for number, line in enumerate(text.splitlines(), 1)
        if (match := _TRACES.search(line))
    ]


def _findings_of_tree(path: Path, where: Path) -> list[str]:
    findings = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), filename=str(path))):
        modules: list[str] = []
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            modules = [node.module]
        findings += [
            f"{where}:{node.lineno}: {module} turns bytes into behaviour; send numbers"  # type: ignore[attr-defined]
            for module in modules
            if module.split(".")[0] in FORBIDDEN_MODULES
        ]
        if isinstance(node, ast.Call) and (reason := _forbidden_call(node)):
            findings.append(f"{where}:{node.lineno}: {reason}")
    return findings


def _forbidden_call(node: ast.Call) -> str | None:
    keywords = {keyword.arg: keyword.value for keyword in node.keywords}
    for name in ("trust_remote_code", "allow_pickle", "shell"):
        value = keywords.get(name)
        if isinstance(value, ast.Constant) and value.value is True:
            return f"{name}=True runs code that came as data"
    if isinstance(node.func, ast.Name) and node.func.id in FORBIDDEN_NAMES:
        return f"{node.func.id}() runs code that came as data"
    if isinstance(node.func, ast.Attribute) and isinstance(node.func.value, ast.Name):
        called = (node.func.value.id, node.func.attr)
        if called in FORBIDDEN_CALLS:
            return f"{'.'.join(called)}() is forbidden: {FORBIDDEN_CALLS[called]}"
        if called == ("yaml", "load"):
            loader = keywords.get("Loader") or (node.args[1] if len(node.args) > 1 else None)
            if loader is None or "Safe" not in ast.unparse(loader):
                return "yaml.load() needs a Loader that is a SafeLoader and says so in its name"
    return None
