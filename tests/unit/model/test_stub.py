"""Stubs of GGUF files: same bytes but for experts, NaN in their place in every format, little room
on disk; damage is found; nothing is written over; an interrupted one is no model.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_moe.cli.main import run
from dflash_moe.errors import CheckpointError, ConfigError, DflashError, UnsupportedError
from dflash_moe.model import stub as stub_module
from dflash_moe.model.checkpoint import Checkpoint
from dflash_moe.model.expert_tensors import expert_sources
from dflash_moe.model.formats.dequantize import dequantize
from dflash_moe.model.formats.gguf_header import BLOCK_TYPES
from dflash_moe.model.formats.stored_tensor import TensorInfo
from dflash_moe.model.formats.stub_pages import MAGIC, page, region
from dflash_moe.model.formats.weight_formats import FORMATS, STORED_NAMES
from dflash_moe.model.gguf_architectures.gguf_experts import gguf_experts
from dflash_moe.model.stub import write_stub
from tests.gguf_cases import write_experts

gguf = pytest.importorskip("gguf", reason="the gguf package is an extra of the tests")

# Every type of a GGUF file that our kernels read.
READ = sorted(STORED_NAMES[name] for name, _, _ in BLOCK_TYPES.values() if name in STORED_NAMES)
HOST = {
    "token_embd.weight": np.arange(64 * 300, dtype=np.float32).reshape(300, 64),
    "output_norm.weight": np.ones(64, np.float32),
}


def made(folder: Path, format_name: str = "f16", **more) -> Path:
    sizes = {"hidden_size": 256, "width": 256, "more": HOST} | more
    return write_experts(folder / "m.gguf", sizes.pop("architecture", "qwen3moe"), formats=(format_name, format_name), **sizes)


def expert_bytes(path: Path) -> np.ndarray:
    """Marks which bytes of the file belong to tensors that workers stand in for."""
    marks = np.zeros(path.stat().st_size, bool)
    for tensor in gguf_experts(path).tensors:
        if len(tensor.extents) > 1:
            marks[tensor.file_offset : tensor.file_offset + tensor.num_bytes] = True
    return marks


@pytest.mark.parametrize("format_name", READ)
def test_only_experts_differ_and_each_matrix_takes_a_page(tmp_path, format_name):
    source, target = made(tmp_path, format_name), tmp_path / "s.gguf"
    written = write_stub(source, target)
    full, short = (np.frombuffer(path.read_bytes(), np.uint8) for path in (source, target))
    marks = expert_bytes(source)
    assert full.size == short.size == written.apparent_bytes
    assert np.array_equal(full[~marks], short[~marks])
    num_matrices = 2 * 3 * 4
    assert (short[marks] != 0).sum() <= num_matrices * 4096
    # What is copied may begin and end within a block of the file system, once on each side.
    assert written.disk_bytes == target.stat().st_blocks * 512
    assert written.disk_bytes <= num_matrices * 4096 + (~marks).sum() + 3 * 4096
    checkpoint = Checkpoint.open(target)
    assert checkpoint.fingerprint() == Checkpoint.open(source).fingerprint()
    assert checkpoint.stored == Checkpoint.open(source).stored
    assert checkpoint.stub().tensors == {tensor.name for tensor in gguf_experts(source).tensors}


@pytest.mark.parametrize("format_name", READ)
def test_the_weights_of_a_page_are_not_finite_in_any_format(tmp_path, format_name):
    source, target = made(tmp_path, format_name), tmp_path / "s.gguf"
    write_stub(source, target)
    checkpoint = Checkpoint.open(target)
    shape = FORMATS[format_name]
    type_name = format_name.removeprefix("gguf_").upper()
    for tensor in gguf_experts(source).tensors:
        info = checkpoint.stored[tensor.name]
        outputs, inputs = info.shape[1:]
        step = info.num_bytes // info.shape[0]
        data = np.fromfile(target, np.uint8)
        for expert in range(info.shape[0]):
            own = data[info.offset + expert * step :][:step]
            begin, length = region(info, expert)
            # Blocks behind the header that lie wholly in the page.
            first = -(-(begin + 72 + len(tensor.name) - info.offset - expert * step) // shape.block_bytes)
            last = (begin + length - info.offset - expert * step) // shape.block_bytes
            assert last > first + 10
            ours = dequantize(format_name, own, outputs, inputs).reshape(-1)[first * shape.block : last * shape.block]
            assert ((ours == -2880) if format_name == "nvfp4" else np.isnan(ours)).all()
            with np.errstate(over="ignore"):
                theirs = gguf.dequantize(own.reshape(outputs, -1), gguf.GGMLQuantizationType[type_name])
            theirs = theirs.reshape(-1)[first * shape.block : last * shape.block]
            # The package has no NaN in MXFP4, as ggml has none: 2^128 x -6 overflows in both.
            is_shown = {"gguf_mxfp4": np.isneginf, "nvfp4": lambda values: values == -2880}.get(format_name, np.isnan)
            assert is_shown(theirs).all()


@pytest.mark.parametrize("format_name", [name for name in READ if name != "nvfp4"])
def test_a_page_makes_a_product_with_any_input_show_itself(format_name):
    """A row of 0xFF times any row of inputs, as a program would compute it."""
    shape = FORMATS[format_name]
    inputs = 512
    row = dequantize(format_name, np.full(inputs // shape.block * shape.block_bytes, 0xFF, np.uint8), 1, inputs)
    assert np.isnan(row @ np.zeros(inputs, np.float32)).all()


@settings(max_examples=300)
@given(st.integers(0, 1 << 40), st.integers(1, 20000), st.integers(1, 64), st.data())
def test_a_region_lies_in_its_expert_and_is_the_first_whole_page(offset, num_bytes, num_experts, data):
    info = TensorInfo(0, offset, "I8", (num_experts, num_bytes), num_experts * num_bytes)
    expert = data.draw(st.integers(0, num_experts - 1))
    begin, length = region(info, expert)
    first, end = offset + expert * num_bytes, offset + (expert + 1) * num_bytes
    assert first <= begin
    assert begin + length <= end
    pages = range(-(-first // 4096) * 4096, end - 4095, 4096)
    assert (begin, length) == ((pages[0], 4096) if pages else (first, num_bytes))


def test_the_layout_of_a_page_is_the_documented_one():
    name, fingerprint = "blk.7.ffn_up_exps.weight", bytes(range(32))
    made_page = page(fingerprint.hex(), name, 300, 4096)
    assert made_page[:16] == b"DFLASH-MOE-STUB1" == MAGIC
    assert made_page[16:48] == fingerprint
    assert made_page[48:56] == (300).to_bytes(4, "little") + (24).to_bytes(4, "little")
    assert made_page[56:80] == name.encode()
    assert made_page[80:] == b"\xff" * (4096 - 80)
    assert page(fingerprint.hex(), name, 300, 511) == b"\xff" * 511
    assert page(fingerprint.hex(), "x" * 256, 300, 512)[-200:] == b"\xff" * 200


def test_small_matrices_and_biases_are_filled_and_found(tmp_path):
    source = made(tmp_path, "f32", architecture="gpt-oss", has_biases=True, hidden_size=64, width=32)
    write_stub(source, tmp_path / "s.gguf")
    checkpoint = Checkpoint.open(tmp_path / "s.gguf")
    assert checkpoint.stub().tensors == {tensor.name for tensor in gguf_experts(source).tensors}
    assert checkpoint.fingerprint() == Checkpoint.open(source).fingerprint()
    info = checkpoint.stored["blk.1.ffn_gate_exps.bias"]
    data = (tmp_path / "s.gguf").read_bytes()
    assert data[info.offset : info.offset + info.num_bytes] == b"\xff" * info.num_bytes


def test_what_workers_cannot_compute_is_kept_whole(tmp_path):
    source = made(tmp_path, "f32", metadata={"block_count": 2, "nextn_predict_layers": 1})
    written = write_stub(source, tmp_path / "s.gguf")
    full, short = Checkpoint.open(source), Checkpoint.open(tmp_path / "s.gguf")
    assert set(written.left_out) == {f"blk.1.ffn_{part}_exps.weight" for part in ("gate", "up", "down")}
    for name in written.left_out:
        assert np.array_equal(full.values(name), short.values(name))
    with pytest.raises(CheckpointError, match="it holds no values of tensor 'blk.0.ffn_up_exps.weight'"):
        short.values("blk.0.ffn_up_exps.weight")
    with pytest.raises(CheckpointError, match="it holds no values of tensor 'blk.0.ffn_up_exps.weight'"):
        short.raw("blk.0.ffn_up_exps.weight")
    with pytest.raises(CheckpointError, match="it is a stub: it holds no experts; give the worker the full file"):
        expert_sources(short, gguf_experts(source).spec.layers[0].ffn, 0)
    assert np.array_equal(short.values("token_embd.weight"), HOST["token_embd.weight"])


@pytest.mark.parametrize("target", ["s.gguf", "s-00002-of-00003.gguf"])
def test_a_split_model_has_a_stub_of_every_part(tmp_path, target):
    from bench.models.gguf_files import split_gguf

    folder = tmp_path / "split"
    folder.mkdir()
    first = split_gguf(made(tmp_path), folder, 3)
    source = Checkpoint.open(first)
    written = write_stub(first, tmp_path / target)
    assert [path.name for path in written.files] == [f"s-0000{number}-of-00003.gguf" for number in (1, 2, 3)]
    short = Checkpoint.open(written.files[1])
    assert short.fingerprint() == source.fingerprint()
    assert short.stored == source.stored
    assert [path.stat().st_size for path in short.files] == [path.stat().st_size for path in source.files]
    assert len(short.stub().tensors) == 6


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> tuple[Path, bytes]:
    folder = tmp_path_factory.mktemp("stub")
    write_stub(made(folder), folder / "s.gguf")
    return folder, (folder / "s.gguf").read_bytes()


@settings(max_examples=60)
@given(st.data())
def test_any_changed_byte_of_any_page_is_found(whole, data):
    folder, content = whole
    checkpoint = Checkpoint.open(folder / "s.gguf")
    name = data.draw(st.sampled_from(sorted(checkpoint.stub().tensors)))
    expert = data.draw(st.integers(0, 3))
    begin, length = region(checkpoint.stored[name], expert)
    at = begin + data.draw(st.one_of(st.integers(0, 90), st.integers(0, length - 1)))
    damaged = bytearray(content)
    damaged[at] ^= data.draw(st.integers(1, 255))
    path = folder / "damaged.gguf"
    path.write_bytes(damaged)
    with pytest.raises(
        CheckpointError, match=r"damaged.gguf: it is a stub, but its page for expert \d of tensor '.*' is damaged"
    ):
        Checkpoint.open(path).fingerprint()


def test_pages_that_have_changed_places_and_holes_in_their_place_are_found(whole):
    folder, content = whole
    info = Checkpoint.open(folder / "s.gguf").stored["blk.1.ffn_down_exps.weight"]
    places = [region(info, expert)[0] for expert in range(4)]
    swapped, emptied = bytearray(content), bytearray(content)
    swapped[places[0] : places[0] + 4096], swapped[places[1] : places[1] + 4096] = (
        content[places[1] : places[1] + 4096], content[places[0] : places[0] + 4096],
    )  # fmt: skip
    emptied[places[3] : places[3] + 4096] = bytes(4096)
    for number, damaged in enumerate((swapped, emptied)):
        path = folder / f"pages{number}.gguf"
        path.write_bytes(damaged)
        with pytest.raises(CheckpointError, match="of tensor 'blk.1.ffn_down_exps.weight' is damaged; make it again"):
            Checkpoint.open(path).fingerprint()


def test_a_stub_that_is_cut_short_is_a_truncated_file(whole):
    folder, content = whole
    path = folder / "cut.gguf"
    path.write_bytes(content[:-5000])
    with pytest.raises(CheckpointError, match="it is truncated"):
        Checkpoint.open(path)


def test_nothing_is_written_over_or_of_a_stub_or_without_experts(tmp_path):
    source = made(tmp_path)
    before = source.read_bytes()
    with pytest.raises(ConfigError, match=r"m\.gguf: is the file to make a stub of; .* choose another name"):
        write_stub(source, source)
    (tmp_path / "there.gguf").write_bytes(b"mine")
    with pytest.raises(ConfigError, match=r"there\.gguf: is there already"):
        write_stub(source, tmp_path / "there.gguf")
    (tmp_path / "dangling.gguf").symlink_to(tmp_path / "nowhere.gguf")
    with pytest.raises(ConfigError, match=r"dangling\.gguf: is there already"):
        write_stub(source, tmp_path / "dangling.gguf")
    assert ((tmp_path / "there.gguf").read_bytes(), source.read_bytes()) == (b"mine", before)
    write_stub(source, tmp_path / "s.gguf")
    with pytest.raises(CheckpointError, match="it is a stub already"):
        write_stub(tmp_path / "s.gguf", tmp_path / "t.gguf")
    with pytest.raises(UnsupportedError, match="has no routed experts"):
        write_stub(write_experts(tmp_path / "dense.gguf", layers=(), more=HOST), tmp_path / "t.gguf")
    tiny = write_experts(tmp_path / "tiny.gguf", hidden_size=8, width=8)
    with pytest.raises(UnsupportedError, match="its experts have less than 512 bytes each"):
        write_stub(tiny, tmp_path / "t.gguf")
    for name, reason in (
        ("t.bin", "choose one that ends with .gguf"),
        ("t-00001-of-00002.gguf", "but the model is one file"),
    ):
        with pytest.raises(ConfigError, match=reason):
            write_stub(source, tmp_path / name)
    with pytest.raises(ConfigError, match="make the folder first"):
        write_stub(source, tmp_path / "none" / "t.gguf")
    assert not list(tmp_path.glob(".*"))


def test_a_full_disk_is_told_before_anything_is_written(tmp_path, monkeypatch):
    source = made(tmp_path)
    real = os.statvfs(tmp_path)
    monkeypatch.setattr(os, "statvfs", lambda path: os.statvfs_result((*real[:4], 10, *real[5:])))
    with pytest.raises(ConfigError, match=r"the stub takes [\d,]+ bytes on disk, and [\d,]+ are free; choose another folder"):
        write_stub(source, tmp_path / "s.gguf")
    assert {path.name for path in tmp_path.iterdir()} == {"m.gguf"}


@pytest.mark.parametrize("call", range(6))
def test_an_interrupted_stub_leaves_no_file(tmp_path, monkeypatch, call):
    """Whatever write fails, or Ctrl+C at whatever moment."""
    source, calls = made(tmp_path), []
    kinds = (OSError(28, "No space left on device"), KeyboardInterrupt())
    real = os.pwrite

    def failing(*arguments):
        calls.append(1)
        if len(calls) == 1 + 5 * call:
            raise kinds[call % 2]
        return real(*arguments)

    monkeypatch.setattr(stub_module.os, "pwrite", failing)
    with pytest.raises((DflashError, KeyboardInterrupt)):
        write_stub(source, tmp_path / "s.gguf")
    assert {path.name for path in tmp_path.iterdir()} == {"m.gguf"}


@pytest.mark.parametrize("has_links", [True, False])
def test_a_file_that_appears_meanwhile_stays_what_it_is(tmp_path, monkeypatch, has_links):
    source, target = made(tmp_path), tmp_path / "s.gguf"
    if not has_links:
        monkeypatch.setattr(os, "link", no_links)

    def report(done: int, total: int) -> None:
        if done == total:
            target.write_bytes(b"mine")

    with pytest.raises(ConfigError, match=r"s\.gguf: is there already"):
        write_stub(source, target, report)
    assert target.read_bytes() == b"mine"
    assert {path.name for path in tmp_path.iterdir()} == {"m.gguf", "s.gguf"}


def no_links(source: Path, target: Path) -> None:
    raise PermissionError(1, "Operation not permitted")


def test_a_file_system_without_links_gets_the_stub_as_well(tmp_path, monkeypatch):
    source = made(tmp_path)
    monkeypatch.setattr(os, "link", no_links)
    written = write_stub(source, tmp_path / "s.gguf")
    assert {path.name for path in tmp_path.iterdir()} == {"m.gguf", "s.gguf"}
    assert Checkpoint.open(written.files[0]).fingerprint() == Checkpoint.open(source).fingerprint()


def test_of_a_split_stub_that_cannot_be_finished_no_part_remains(tmp_path):
    from bench.models.gguf_files import split_gguf

    folder, out = tmp_path / "split", tmp_path / "out"
    folder.mkdir()
    out.mkdir()
    first = split_gguf(made(tmp_path), folder, 2)

    def report(done: int, total: int) -> None:
        if done == total:
            (out / "s-00001-of-00002.gguf").write_bytes(b"mine")

    with pytest.raises(ConfigError, match=r"s-00001-of-00002\.gguf: is there already"):
        write_stub(first, out / "s.gguf", report)
    assert {path.name: path.stat().st_size for path in out.iterdir()} == {"s-00001-of-00002.gguf": 4}


def test_no_byte_of_an_expert_is_read_but_for_the_fingerprint(tmp_path, monkeypatch):
    source, reads = made(tmp_path), []
    marks = expert_bytes(source)
    real = os.pread

    def watched(descriptor, count, offset):
        if os.readlink(f"/proc/self/fd/{descriptor}") == str(source):
            reads.append(int(marks[offset : offset + count].sum()))
        return real(descriptor, count, offset)

    monkeypatch.setattr(os, "pread", watched)
    write_stub(source, tmp_path / "s.gguf")
    # Two samples of a tensor for the fingerprint, and the place of the magic.
    assert max(reads) <= 32
    assert sum(reads) <= 6 * (2 * 32 + 16)


@pytest.mark.parametrize(("name", "said"), [("gone.gguf", "no such file"), ("a.txt", "this is not GGUF")])
def test_the_command_names_the_file_that_is_no_model(tmp_path, capsys, name, said):
    (tmp_path / "a.txt").write_text("x")
    assert run(["model", "stub", str(tmp_path / name), str(tmp_path / "s.gguf")]) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert said in last
    assert "--model" not in last


def test_the_command_writes_a_stub_and_says_both_sizes(tmp_path, capsys):
    source, target = made(tmp_path, metadata={"block_count": 2, "nextn_predict_layers": 1}), tmp_path / "s.gguf"
    assert run(["model", "stub", str(source), str(target)]) == 0
    captured = capsys.readouterr()
    size, blocks = target.stat().st_size, target.stat().st_blocks * 512
    assert captured.out == f"wrote {target}: {size:,} bytes apparent, {blocks:,} on disk, with pages in place of 3 tensors\n"
    assert captured.err.count("kept whole: blk.1.ffn_gate_exps.weight and 2 more: ") == 1
    assert run(["model", "stub", str(source), str(target)]) == 2
    assert "s.gguf: is there already" in capsys.readouterr().err
    assert run(["help", "model", "stub"]) == 0
    assert "`rsync -S`" in " ".join(capsys.readouterr().out.split())
