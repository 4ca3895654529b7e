"""docs/topology.md against the code: every setting and every key, with the words of the settings
table.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

from dflash_moe.cli import config_file
from dflash_moe.config import SETTINGS
from dflash_moe.topology import Topology, parse
from dflash_moe.topology.registration import REGISTRATION_KEYS
from tests.checks import documents
from tests.unit.cli.test_any_value import commands

TEXT = (Path(__file__).resolve().parents[3] / "docs/topology.md").read_text(encoding="utf-8")


def test_settings_of_the_document_are_those_of_the_table():
    expected = [
        [one.flag or "-", one.environment or "-", one.yaml or "-", one.allowed, one.default_text, one.help] for one in SETTINGS
    ]
    assert documents.table(TEXT, "settings") == expected


def test_everyday_options_of_the_document_are_those_of_the_config_file():
    rows = documents.table(TEXT, "everyday")
    assert rows is not None
    assert [row[0] for row in rows] == [*config_file.TEXTS, *config_file.SAMPLING]
    named = {option for parameter in commands()["chat",].params for option in parameter.opts}
    assert {row[1] for row in rows} <= named
    readers = {words[0] for words, one in commands().items() if getattr(one.callback, "reads_config", False)}
    assert set(re.findall("`([a-z]+)`", TEXT.partition("It counts for ")[2].partition(", where")[0])) == readers
    example = TEXT.partition("names (`none`: no file):\n\n")[2].partition("\n\n")[0]
    assert set(config_file.parse_options(textwrap.dedent(example), "example")) <= set(config_file.KEYS)


def test_keys_of_the_document_are_those_of_the_parser():
    rows = documents.table(TEXT, "keys")
    assert rows is not None
    found = {row[0] for row in rows}
    expected = {"version", "preset", "workers", "ipc.*", "engine.*", "failure.*", "cache.*", "host.experts.memory"}
    expected |= {f"host.{key}" for key in parse.HOST_KEYS if key != "experts"}
    expected |= {f"placement.{key}" for key in parse.PLACEMENT_KEYS}
    expected |= {f"registration.{key}" for key in REGISTRATION_KEYS}
    expected |= {f"workers[].{key}" for key in parse.WORKER_KEYS if key != "emulate"}
    expected |= {f"workers[].emulate.{key}" for key in parse.EMULATE_LIMITS}
    assert found == expected
    ranges = {row[0].rpartition(".")[2]: row[1] for row in rows if ".emulate." in row[0]}
    assert ranges == {key: f"{low:g}..{high:.0f}" for key, (low, high) in parse.EMULATE_LIMITS.items()}


def test_the_example_of_the_document_parses():
    example = TEXT.partition("    version: 1\n")[2].partition("\n\n")[0]
    assert len(Topology.parse("    version: 1\n" + example).workers) == 2
