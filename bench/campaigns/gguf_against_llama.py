"""The same GGUF files in llama.cpp and here: are the logits the same?

    python -m bench.campaigns.gguf_against_llama --llama-bin DIR [--llama-src DIR] [--only NAMES]
        [--json bench/results/gguf_against_llama.json]

Every weight format in the experts of a random Qwen3-MoE, that model as llama-quantize mixes formats
with an imatrix, and with --llama-src every architecture as llama.cpp's own converter writes it in
float32. 512 fixed token ids; the logits of the second half, which llama-perplexity saves, in a file
whose last norm is scaled until logits deviate by at least 2. Judged are float32 files against
llama.cpp, and all others against the eager model in float32
with the dequantised weights, where llama.cpp's own difference is the second bound. Three planted
errors - a wrong permutation, a norm without its 1, gate and up swapped - must each exceed the
bound. Exit status 1 where one of that is not so.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import argparse
import math
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bench.campaigns.harness import ROOT, command_line
from bench.peers.saved_logits import SavedLogits, saved_logits
from dflash_moe.bench.harness import Recorder
from dflash_moe.cli import options
from dflash_moe.topology import Topology

NUM_TOKENS = 512
# Differences are over the deviation of the eager model's logits, which is at least LEAST_DEVIATION.
LEAST_DEVIATION = 2.0
MOST_F32, MOST_OTHER = 1e-3, 1e-4
# K-quants have blocks of 256 inputs.
SHAPE = {"num_layers": 2, "hidden_size": 256, "num_experts": 8, "top_k": 2, "moe_intermediate_size": 256}
# Here llama.cpp computes something else than the published code, which is then the judge. With
# corners rounded, eager gpt-oss is 2e-5 from llama.cpp.
LLAMA_DIFFERS = {
    "arch gpt-oss": "rounds the corners of YaRN, which the published code does not",
    "arch phimoe": "weighs experts by a softmax, the published code by its sparse mixer",
}
# llama-quantize makes these mixtures of formats with the importance of each input, as people
# download them.
MIXES = ("Q3_K_M", "Q4_K_M", "IQ2_M")
CONVERTER = ROOT / "bench" / "campaigns" / "llama_converter.py"

Array = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True)
class Differences:
    """Root mean squares over the logits' deviation: ours and llama.cpp's from the eager model, and
    ours from llama.cpp's. Where llama.cpp cannot run the file, `failure` says why.
    """

    deviation: float
    ours: float
    llama: float | None
    between: float | None
    failure: str = ""

    @property
    def from_judge(self) -> float:
        """Ours from llama.cpp's, or from the eager model's where llama.cpp has none."""
        return self.ours if self.between is None else self.between


def main() -> int:
    """Does what the module text says, and returns the exit status."""
    given = _arguments()
    options.prepare_host(Topology.local(1))  # before torch is imported
    recorder = Recorder(given.json)
    result = recorder.begin("gguf_against_llama", {"tokens": NUM_TOKENS, **SHAPE}, interleaved=False)
    with tempfile.TemporaryDirectory() as scratch, recorder.recording():
        folder = Path(scratch)
        for name, make in _files(given, folder):
            path = make(folder / f"{name}.gguf")
            found = compare(given.llama_bin, path, path, folder)
            row = {"name": name, **_row(name, found)}
            result.rows.append(row)
            print(shown(row), flush=True)
            for error, plant in PLANTED.get(name, {}).items():
                wrong = plant(Path(shutil.copy(path, folder / "planted.gguf")))
                found = compare(given.llama_bin, path, wrong, folder)
                row = {"name": f"{name}, {error}", "planted": error, **_differences(found)}
                row |= {"at_least": MOST_F32, "met": found.from_judge > MOST_F32}
                result.rows.append(row)
                print(shown(row), flush=True)
            recorder.save()
            path.unlink()
    return 0 if all(row["met"] for row in result.rows) else 1


def _row(name: str, found: Differences) -> dict[str, Any]:
    if name in LLAMA_DIFFERS:
        return _differences(found) | {"llama_differs": LLAMA_DIFFERS[name], "at_most": MOST_F32, "met": found.ours <= MOST_F32}
    if name.startswith(("f32", "arch ")):
        return _differences(found) | {"at_most": MOST_F32, "met": found.from_judge <= MOST_F32}
    is_nearer = found.llama is None or found.ours <= found.llama
    return _differences(found) | {"at_most": MOST_OTHER, "met": found.ours <= MOST_OTHER and is_nearer}


def _differences(found: Differences) -> dict[str, Any]:
    named = {"ours_from_eager": found.ours, "llama_from_eager": found.llama, "ours_from_llama": found.between}
    return {"deviation": found.deviation, **named} | ({"llama_failure": found.failure} if found.failure else {})


def shown(row: dict[str, Any]) -> str:
    """Returns a line for a row."""
    figures = f"ours {row['ours_from_eager']:.1e} from eager"
    if row["llama_from_eager"] is None:
        figures += f", llama.cpp cannot run it ({row['llama_failure']})"
    else:
        figures += f", llama.cpp {row['llama_from_eager']:.1e}; {row['ours_from_llama']:.1e} apart"
    return f"{row['name']:>40}: {figures}; {'as it must be' if row['met'] else 'NOT as it must be'}"


def compare(bin_folder: Path, theirs: Path, ours: Path, scratch: Path) -> Differences:
    """Computes one context in llama.cpp over `theirs`, and here over `ours`, which is the same file
    unless an error is planted there. Both are scaled alike.
    """
    asked = Asked(bin_folder, scratch)
    first = asked.logits(theirs)
    eager = eager_logits(theirs, first)
    if (deviation := float(eager.std())) < LEAST_DEVIATION:
        factor = 2.0 ** math.ceil(math.log2(LEAST_DEVIATION / deviation))
        for path in {theirs, ours}:
            change(path, {"output_norm.weight": lambda value: value * factor})
        first = asked.logits(theirs)
        eager = eager_logits(theirs, first)
    found, truth, deviation = log_softmax(engine_logits(ours, first)), log_softmax(eager), float(eager.std())
    if asked.failure:
        return Differences(deviation, rms(found - truth) / deviation, None, None, asked.failure)
    # The file's least value of a position may stand for any that is lower.
    is_kept = first.log_probs > first.log_probs.min(axis=1, keepdims=True)

    def apart(one: Array, other: Array) -> float:
        return rms((one - other)[is_kept]) / deviation

    return Differences(deviation, apart(found, truth), apart(first.log_probs, truth), apart(found, first.log_probs))


def rms(values: Array) -> float:
    """Returns the root of the mean square."""
    return float(np.sqrt(np.mean(values**2)))


class Asked:
    """Asks llama.cpp for logits. `failure` is what it said where it could not run the last file."""

    def __init__(self, bin_folder: Path, scratch: Path) -> None:
        self._bin_folder = bin_folder
        self._scratch = scratch
        self._text = scratch / "text.txt"
        self._text.write_text(_text(), encoding="utf-8")
        self.failure = ""

    def logits(self, model: Path) -> SavedLogits:
        """Returns llama.cpp's logits, or where it fails the token ids alone."""
        try:
            return saved_logits(self._bin_folder, model, self._text, NUM_TOKENS, self._scratch)
        except RuntimeError as error:
            from dflash_moe.integrations.tokenizer import load_tokenizer

            self.failure = str(error)
            token_ids = load_tokenizer(model)(_text())["input_ids"][:NUM_TOKENS]
            return SavedLogits(tuple(token_ids), range(NUM_TOKENS // 2, NUM_TOKENS - 1), np.empty((0, 0)))


def eager_logits(path: Path, asked: SavedLogits) -> Array:
    """Returns the logits of the eager transformers model with the file's weights in float32."""
    import torch

    from bench.models.gguf_goldens import load_eager_model

    with torch.inference_mode():
        model = load_eager_model(path)
        logits = model(input_ids=torch.tensor([asked.token_ids]), use_cache=False).logits[0]
    return np.asarray(logits[asked.positions.start : asked.positions.stop].double().numpy())


def engine_logits(path: Path, asked: SavedLogits) -> Array:
    """Returns the logits of our host over one worker, in float32 throughout."""
    import torch

    from dflash_moe.experts.expert_runtime import ExpertRuntime
    from dflash_moe.forward.forward import StepRows
    from dflash_moe.forward.host_model import open_host
    from dflash_moe.model.spec import model_spec

    token_ids = list(asked.token_ids)
    spec = model_spec(path, "f32")
    with ExpertRuntime.start(Topology.local(1), model=spec, dtype="f32") as runtime, torch.inference_mode():
        host = open_host(path, runtime)
        if host.packed is None:
            logits = host.model(input_ids=torch.tensor([token_ids]), use_cache=False).logits[0]
        else:
            sequence = host.packed.admit(len(token_ids))
            logits = host.packed.forward([StepRows(sequence, token_ids, num_logits=len(token_ids))])
        if runtime.stats()["totals"]["calls"] == 0:
            raise RuntimeError(f"{path.name}: no call went to the worker; the model computed its experts itself")
        return np.array(logits[asked.positions.start : asked.positions.stop].double().cpu().numpy())


def log_softmax(logits: Array) -> Array:
    """Returns the logarithms of the probabilities of each row, in float64."""
    shifted = logits - logits.max(axis=1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True)))


def change(path: Path, changes: dict[str, Callable[[Array], Array]]) -> Path:
    """Changes float32 tensors of a GGUF file in place, by name, and returns the path. Raises
    KeyError naming a tensor that the file lacks.
    """
    import gguf

    reader = gguf.GGUFReader(str(path), "r+")
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    for name, changed in changes.items():
        tensors[name].data[...] = changed(np.array(tensors[name].data))
    reader.data.flush()
    return path


def _unpermuted(path: Path) -> Path:
    """Plants a permutation that the converter did not make: halves of a head's rows take turns."""
    return change(
        path, {"blk.0.attn_q.weight": lambda value: value.reshape(-1, 2, 8, value.shape[1]).swapaxes(1, 2).reshape(value.shape)}
    )


def _without_one(path: Path) -> Path:
    return change(path, {"blk.0.attn_norm.weight": lambda value: value - 1})


def _swapped(path: Path) -> Path:
    """Plants the gate of the first layer in the place of its up, and the other way round."""
    import gguf

    tensors = {tensor.name: np.array(tensor.data) for tensor in gguf.GGUFReader(str(path)).tensors}
    gate, up = "blk.0.ffn_gate_exps.weight", "blk.0.ffn_up_exps.weight"
    return change(path, {gate: lambda _old: tensors[up], up: lambda _old: tensors[gate]})


# By the file in which they are planted. The converter permutes the rows of llama's queries, and
# adds 1 to the norms of qwen35moe.
PLANTED: dict[str, dict[str, Callable[[Path], Path]]] = {
    "arch llama": {"wrong permutation": _unpermuted},
    "arch qwen35moe": {"norm without its 1": _without_one},
    "arch qwen3moe": {"gate and up swapped": _swapped},
}


def _files(given: argparse.Namespace, folder: Path) -> Iterator[tuple[str, Callable[[Path], Path]]]:
    """Yields the name of each file with what writes it."""
    from bench.models.gguf_files import write_gguf
    from dflash_moe.model.formats.gguf_header import BLOCK_TYPES
    from dflash_moe.model.formats.weight_formats import STORED_NAMES
    from dflash_moe.model.make import MakeOptions, make_checkpoint

    names = [STORED_NAMES[name] for name, _, _ in BLOCK_TYPES.values() if name in STORED_NAMES]
    wanted = set(given.only.split(",")) if given.only else None
    source = folder / "source"
    if wanted is None or wanted & {*names, *MIXES}:
        make_checkpoint(MakeOptions(arch="qwen3_moe", dtype="f32", seed=0, **SHAPE), source)
    for name in names:
        if wanted is None or name in wanted:
            yield name, lambda path, name=name: write_gguf(source, path, name)
    for mix in MIXES:
        if wanted is None or mix in wanted:
            yield f"mix {mix}", lambda path, mix=mix: _quantised(given.llama_bin, source, mix, path, folder)
    if given.llama_src is not None:
        from bench.models.gguf_sources import SOURCES

        for name in SOURCES:
            if wanted is None or name in wanted:
                yield f"arch {name}", lambda path, name=name: _converted(given.llama_src, name, path, folder)


def _quantised(bin_folder: Path, source: Path, mix: str, path: Path, folder: Path) -> Path:
    from bench.models.gguf_files import write_gguf

    plain, text, importance = folder / "plain.gguf", folder / "text.txt", folder / "importance.gguf"
    if not importance.is_file():
        write_gguf(source, plain, "f32")
        text.write_text(_text(), encoding="utf-8")
        counts = ["-c", NUM_TOKENS, "-b", NUM_TOKENS, "-t", 1, "-ngl", 0]
        _run_llama(bin_folder / "llama-imatrix", "-m", plain, "-f", text, "-o", importance, *counts)
    _run_llama(bin_folder / "llama-quantize", "--imatrix", importance, plain, path, mix, 1)
    return path


def _run_llama(*command: object) -> None:
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=300, check=False)
    if done.returncode:
        raise RuntimeError(f"{Path(str(command[0])).name} failed: {' | '.join(done.stderr.splitlines()[-3:])}")


def _converted(llama_src: Path, name: str, path: Path, folder: Path) -> Path:
    from bench.models.gguf_sources import SOURCES, write_source

    checkpoint = folder / f"{name}-source"
    write_source(name, checkpoint)
    command = [
        sys.executable,
        CONVERTER,
        llama_src,
        "--",
        checkpoint,
        "--outfile",
        path,
        "--outtype",
        "f32",
        *SOURCES[name].options,
    ]
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=300, check=False)
    if done.returncode:
        raise RuntimeError(f"{name}: llama.cpp's converter failed: {' | '.join(done.stderr.splitlines()[-3:])}")
    return path


def _text() -> str:
    """Returns ASCII text of more than two contexts, always the same, of which each character is a
    token.
    """
    letters = "abcdefgijklmnopqrsuvwxyz ABCDEFGIJKLMNOPQRSUVWXYZ,."
    drawn = np.random.default_rng(0).integers(0, len(letters), 3 * NUM_TOKENS)
    return "".join(letters[number] for number in drawn)


def _arguments() -> argparse.Namespace:
    parser = command_line(__doc__, "gguf_against_llama")
    parser.add_argument("--llama-bin", type=Path, required=True, help="the folder with llama.cpp's built llama-perplexity")
    parser.add_argument("--llama-src", type=Path, help="llama.cpp's sources, whose converter writes architectures [none]")
    parser.add_argument("--only", default="", help="comma-separated formats and architectures [all]")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
