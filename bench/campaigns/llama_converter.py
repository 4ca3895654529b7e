"""Runs llama.cpp's own converter on checkpoints of the tests, and prints what that prints.

    python bench/campaigns/llama_converter.py LLAMA_SRC CHECKPOINT OPTION... [-- CHECKPOINT ...]

The options are those of the converter, which runs once for each checkpoint. It knows published
tokenizers by their digests, and ours is not among them. So the vocabulary alone is written here;
tensors and settings are the converter's.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import itertools
import runpy
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def main() -> None:
    """Does what the module text says."""
    source, *arguments = sys.argv[1:]
    # llama.cpp's own gguf package comes before the installed one, and this tree before all others.
    sys.path[:0] = [source, f"{source}/gguf-py", str(ROOT)]
    import conversion

    find = conversion.get_model_class

    def with_our_vocabulary(*names: Any, **options: Any) -> Any:
        converter = find(*names, **options)
        converter.set_vocab = _write_vocabulary
        return converter

    conversion.get_model_class = with_our_vocabulary
    for _, group in itertools.groupby(arguments, lambda argument: argument == "--"):
        if (given := list(group)) != ["--"]:
            sys.argv = [f"{source}/convert_hf_to_gguf.py", *given]
            runpy.run_path(sys.argv[0], run_name="__main__")


def _write_vocabulary(converter: Any) -> None:
    from bench.models.gguf_files import write_tokenizer

    write_tokenizer(converter.gguf_writer, converter.hparams["vocab_size"])


if __name__ == "__main__":
    main()
