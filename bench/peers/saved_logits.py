"""Has llama.cpp compute a prompt and save its logits, and reads what it saved.

`llama-perplexity --save-all-logits` writes the second half of a context: per position a scale, the
least log-probability, and 16 bits for each token (tools/perplexity/perplexity.cpp of llama.cpp).
What lies more than 16 below the largest logit is clamped there.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

MAGIC = b"_logits_"
TIMEOUT_S = 600.0


@dataclass(frozen=True, slots=True)
class SavedLogits:
    """The token ids of one context [num_tokens], and log-probabilities after those of `positions`
    [num_positions, vocab_size] in float64.
    """

    token_ids: tuple[int, ...]
    positions: range
    log_probs: Array


def saved_logits(bin_folder: Path, model: Path, text: Path, num_tokens: int, scratch: Path) -> SavedLogits:
    """Runs llama.cpp over the first `num_tokens` tokens of `text`, in float32 keys and values.
    Raises RuntimeError with its last lines where it fails.
    """
    out = scratch / "logits.bin"
    out.unlink(missing_ok=True)
    # It needs a text of two contexts, and computes one. Keys, values and attention are not rounded.
    command = [
        bin_folder / "llama-perplexity", "-m", model, "-f", text, "-c", num_tokens, "-b", num_tokens, "--chunks", 1,
        "--save-all-logits", out, "-t", 2, "-ctk", "f32", "-ctv", "f32", "-fa", "off", "-ngl", 0,
    ]  # fmt: skip
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    if done.returncode or not out.is_file():
        raise RuntimeError(f"llama-perplexity: {_complaint(done.stderr)}")
    return read_saved(out)


def _complaint(said: str) -> str:
    """Returns the assertion that ended the program, or else its last line, without paths."""
    lines = said.splitlines() or ["ended without a word"]
    asserted = [line[line.index("GGML_ASSERT") :] for line in lines if "GGML_ASSERT" in line]
    return asserted[0] if asserted else lines[-1]


def read_saved(path: Path) -> SavedLogits:
    """Reads such a file of one context. Raises ValueError for anything else."""
    data = path.read_bytes()
    if not data.startswith(MAGIC):
        raise ValueError(f"{path}: begins with {data[:8]!r}; expected {MAGIC!r}")
    num_tokens, vocab_size, num_chunks = np.frombuffer(data, np.int32, 3, len(MAGIC)).tolist()
    if num_chunks != 1:
        raise ValueError(f"{path}: has {num_chunks} contexts; expected 1")
    at = len(MAGIC) + 12
    token_ids = np.frombuffer(data, np.int32, num_tokens, at)
    at += token_ids.nbytes
    # The logits after the last token are left out, because nothing follows that could be judged.
    positions = range(num_tokens // 2, num_tokens - 1)
    width = 2 * ((vocab_size + 1) // 2) + 4
    rows = np.frombuffer(data, np.uint16, len(positions) * width, at).reshape(len(positions), width)
    scale, least = (np.ascontiguousarray(rows[:, place : place + 2]).view(np.float32).astype(np.float64) for place in (0, 2))
    return SavedLogits(tuple(token_ids.tolist()), positions, rows[:, 4 : 4 + vocab_size] * scale + least)
