"""What a user names and is no file is refused in one sentence, and nothing waits for it.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dflash_moe.bench.results import read_result
from dflash_moe.cli.config_file import read_config_file
from dflash_moe.cli.generate.prompt_files import given_prompts
from dflash_moe.engine.sampling.sampling_params import SamplingParams
from dflash_moe.errors import DflashError
from dflash_moe.model.checkpoint import Checkpoint
from dflash_moe.named_files import open_named
from dflash_moe.proofs.receipt import read_receipt
from dflash_moe.protocol.keys import read_key_file
from dflash_moe.topology import Topology

# Whoever would wait for a writer gets one after this time, which writes nothing.
UNBLOCKED_S = 5.0
FIFO = "it is a FIFO and not a regular file"


@pytest.fixture
def fifo(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "pipe"
    os.mkfifo(path, 0o600)

    def unblock() -> None:
        with contextlib.suppress(OSError):  # nobody waits
            os.close(os.open(path, os.O_WRONLY | os.O_NONBLOCK))

    timer = threading.Timer(UNBLOCKED_S, unblock)
    timer.start()
    yield path
    timer.cancel()
    timer.join()


READERS: dict[str, tuple[Callable[[Path], object], str]] = {
    "topology": (Topology.load, "{path}:1: the topology file cannot be read: {what}; name a file of YAML"),
    "key": (read_key_file, "key file {path} cannot be read: {what}; `dflash-moe key make FILE` makes one"),
    "options": (
        lambda path: read_config_file({"DFLASH_MOE_CONFIG": str(path)}),
        "DFLASH_MOE_CONFIG={path}: '{path}' cannot be read: {what}; name a file of options, or DFLASH_MOE_CONFIG=none",
    ),
    "prompt": (
        lambda path: given_prompts(None, path, SamplingParams()),
        "--prompt-file {path}: cannot be read as UTF-8 text: {what}; name a text file, or use --prompt",
    ),
    "receipt": (read_receipt, "{path}: cannot be read ({what}); give the file that `generate --receipt` wrote"),
    "result": (read_result, "{path}: cannot be read ({what}); pass a result file of `dflash-moe bench`"),
}


@pytest.mark.parametrize("reader", READERS)
def test_a_fifo_is_refused_in_one_sentence_and_not_waited_for(fifo: Path, reader: str) -> None:
    read, sentence = READERS[reader]
    with pytest.raises(DflashError) as caught:
        read(fifo)
    assert str(caught.value) == sentence.format(path=fifo, what=FIFO)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "model.safetensors.index.json", "model.gguf"])
def test_a_fifo_in_a_checkpoint_is_not_waited_for(fifo: Path, name: str) -> None:
    if name == "model.safetensors":
        (fifo.parent / "config.json").write_text("{}")
    fifo.rename(fifo.parent / name)
    (fifo.parent / "pipe").symlink_to(name)
    with pytest.raises(DflashError, match=str(fifo.parent)) as caught:
        Checkpoint.open(fifo.parent / name if name.endswith("gguf") else fifo.parent)
    assert "\n" not in str(caught.value)


def test_each_kind_of_no_file_is_named(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / "socket"))
        kinds = {"/dev/zero": "a device", str(tmp_path): "a folder", str(tmp_path / "socket"): "a socket"}
        for path, kind in kinds.items():
            with pytest.raises(OSError, match=f"it is {kind} and not a regular file"):
                open_named(path)
    with pytest.raises(FileNotFoundError):
        open_named(tmp_path / "absent")


def test_a_file_and_a_link_to_it_are_read(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"text")
    (tmp_path / "link").symlink_to("file")
    for name in ("file", "link"):
        with open_named(tmp_path / name) as file:
            assert file.read() == b"text"
            assert not os.get_inheritable(file.fileno())
