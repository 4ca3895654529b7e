"""What may not be shown is not, and what may stays as it is.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import getpass
import os
import socket

import pytest

from dflash_moe.bench.redaction import Redaction

ME = Redaction({"node7": "<host>", "far.yaml": "<path>"})


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("tcp://10.0.0.2:7171", "tcp://<host>"),
        ("https://me:secret@cluster.example:8000/v1/models?x=1", "https://<host>"),
        ("unix:///run/worker.sock", "unix://<path>"),
        ("10.1.2.3", "<host>"),
        ("at [fe80::1%eth0]:7171, and", "at <host>:7171, and"),
        ("fe80::1:2:3", "<host>"),
        ("2001:db8:0:0:0:0:0:1", "<host>"),
        ("ann@node9.example", "<user>@<host>"),
        ("--model /data/models/secret-model --json -", "--model <path> --json -"),
        ("~/models/x, ../up and ./here/x", "<path>, <path> and <path>"),
        ("/a/b:/c/d", "<path>"),
        ("node7 and node77, far.yaml", "<host> and node77, <path>"),
        ("12.5 tokens/s at 5.23.0, 3/4 of 09:41:07", "12.5 tokens/s at 5.23.0, 3/4 of 09:41:07"),
        ("PASSIVE", "PASSIVE"),
        ("", ""),
    ],
)
def test_texts_lose_what_tells_a_place(text, shown):
    assert ME.text(text) == shown


def test_what_this_machine_is_called_is_known():
    found = ME.text(f"{getpass.getuser()} at {socket.gethostname()}, in {os.path.expanduser('~')}/x")
    assert found == "<user> at <host>, in <path>"


def test_a_variable_is_judged_by_its_name_too():
    given = {
        "DFLASH_MOE_KEY_FILE": "k", "HF_TOKEN": "hf_abc", "MASTER_ADDR": "ten", "USER": "ann", "PYTHONPATH": "src",
        "OMP_NUM_THREADS": "4", "GOMP_CPU_AFFINITY": "0-3", "EMPTY_TOKEN": "", "NOTE": "see tcp://h:1",
    }  # fmt: skip
    assert ME.environment(given) == {
        "DFLASH_MOE_KEY_FILE": "<key>", "HF_TOKEN": "<key>", "MASTER_ADDR": "<host>", "USER": "<user>", "PYTHONPATH": "<path>",
        "OMP_NUM_THREADS": "4", "GOMP_CPU_AFFINITY": "0-3", "EMPTY_TOKEN": "", "NOTE": "see tcp://<host>",
    }  # fmt: skip


def test_plain_values_are_gone_through_and_nothing_else_changes():
    assert ME.all_of({"a": [1, None, True, "/x/y", {"/p/q": 2.5}]}) == {"a": [1, None, True, "<path>", {"<path>": 2.5}]}
