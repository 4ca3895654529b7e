"""What each numerics class moves in the experts' output: the shipped model's experts in float64,
with what the class rounds rounded before each product.

    python -m bench.campaigns.class_errors [--json bench/results/class_errors.json]

Per class and layer: rms difference of the output from that without rounding, over its standard
deviation, on the shipped model's own hidden states and weights (bf16). It is the definition that is
measured and not a kernel, so that it needs no card and no special processor. The means are also
data of the package (dflash_moe/placement/class_errors.json), which a test compares. A minute.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import sys

import torch
from transformers import AutoTokenizer

from bench.campaigns.harness import command_line
from bench.campaigns.weight_errors import DEMO, error, output, shipped_model
from dflash_moe.bench.results import BenchResult
from dflash_moe.model.capture import ExpertsCall, capture_calls
from dflash_moe.proofs.rounded_inputs import inputs_rounded
from dflash_moe.topology.numerics import CLASSES


def main() -> int:
    """Does what the module text says, and returns the exit status."""
    parser = command_line(__doc__, "class_errors")
    parser.add_argument("--classes", default="", help="comma-separated [all]")
    arguments = parser.parse_args()
    result = measure(tuple(arguments.classes.split(",")) if arguments.classes else tuple(CLASSES))
    result.write(arguments.json)
    for row in result.rows:
        print(f"{row['name']:>24}: output moves by {row['error_rms']:.2e}", file=sys.stderr)
    return 0


def measure(names: tuple[str, ...]) -> BenchResult:
    """Measures a row for each class."""
    model = shipped_model()
    text = (DEMO / "prompt.txt").read_text(encoding="utf-8")
    tokens = AutoTokenizer.from_pretrained(DEMO / "model", local_files_only=True)(text, return_tensors="pt")["input_ids"]
    calls: list[ExpertsCall] = []
    with torch.inference_mode():
        with capture_calls(model, calls.append):
            model(input_ids=tokens, use_cache=False)
        result = BenchResult(
            "class_errors", {"model": "the shipped model", "tokens": int(tokens.shape[1]), "layers": len(calls)}
        )
        modules = [model.get_submodule(call.name) for call in calls]
        truths = [output(*pair) for pair in zip(modules, calls, strict=True)]
        for name in names:
            with inputs_rounded(name):
                found = [output(*pair) for pair in zip(modules, calls, strict=True)]
            errors = [error(*pair) for pair in zip(found, truths, strict=True)]
            row = {"name": name, "activations": CLASSES[name].activations, "errors_rms": errors}
            result.rows.append(row | {"error_rms": sum(errors) / len(errors), "error_worst": max(errors)})
    result.complete = True
    return result


if __name__ == "__main__":
    sys.exit(main())
