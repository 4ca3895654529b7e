"""What each weight format moves in the experts' output: the shipped model's weights rounded to it,
on its own hidden states.

    python -m bench.campaigns.weight_errors [--json bench/results/weight_errors.json]

Per format and layer: rms difference of the experts' output in float64 from that with the weights as
they are, over its standard deviation. For formats with a quantiser in Python, which llama.cpp's
K-quants lack. Formats that numerics class int8-groups takes have a second row,
`<format>_int8-groups`: there the inputs of every product are rounded as well, to int8 per row and
32 inputs. Needs the gguf package; two minutes.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from typing import Any

import gguf
import numpy as np
import torch
from transformers import AutoTokenizer

from bench.campaigns.harness import ROOT, command_line
from bench.models.quantised_files import quantise_fp8, quantise_mxfp4
from dflash_moe.bench.results import BenchResult
from dflash_moe.integrations.host_weights import load_weights
from dflash_moe.model.architecture import find_model_class, load_config
from dflash_moe.model.capture import ExpertsCall, capture_calls
from dflash_moe.model.checkpoint import Checkpoint
from dflash_moe.model.formats.dequantize import dequantize, requantized
from dflash_moe.model.formats.weight_formats import FORMATS
from dflash_moe.proofs.rounded_inputs import inputs_rounded

DEMO = ROOT / "bench" / "demo_model" / "dflash_moe_demo"
NUMERICS = ("f32-canonical", "int8-groups")
# The values of these formats are no integers times a scale, so that int8-groups does not take them.
FLOAT_VALUES = ("fp8_e4m3_b128",)
GGUF_KINDS = {"q8_0": "Q8_0", "q4_0": "Q4_0", "gguf_mxfp4": "MXFP4"}

Array = np.ndarray[Any, Any]


def main() -> int:
    """Does what the module text says, and returns the exit status."""
    parser = command_line(__doc__, "weight_errors")
    parser.add_argument("--formats", default="", help="comma-separated [all that Python can quantise to]")
    arguments = parser.parse_args()
    result = measure(tuple(arguments.formats.split(",")) if arguments.formats else ())
    result.write(arguments.json)
    for row in result.rows:
        print(f"{row['name']:>24}: {row['bits_per_weight']:5.2f} bits, output moves by {row['error_rms']:.2e}", file=sys.stderr)
    return 0


def measure(chosen: tuple[str, ...] = ()) -> BenchResult:
    """Measures a row for each format and class. An empty `chosen` stands for all formats."""
    model = shipped_model()
    text = (DEMO / "prompt.txt").read_text(encoding="utf-8")
    tokens = AutoTokenizer.from_pretrained(DEMO / "model", local_files_only=True)(text, return_tensors="pt")["input_ids"]
    calls: list[ExpertsCall] = []
    with torch.inference_mode():
        with capture_calls(model, calls.append):
            model(input_ids=tokens, use_cache=False)
        params = {"model": "the shipped model", "tokens": int(tokens.shape[1]), "layers": len(calls)}
        result = BenchResult("weight_errors", params)
        truths = [output(model.get_submodule(call.name), call) for call in calls]
        for name, rounded in ((name, rounded) for name, rounded in _formats().items() if not chosen or name in chosen):
            modules = [_with_weights(model.get_submodule(call.name), rounded) for call in calls]
            for numerics in NUMERICS[:1] if name in FLOAT_VALUES else NUMERICS:
                with inputs_rounded(numerics):
                    found = [output(module, call) for module, call in zip(modules, calls, strict=True)]
                result.rows.append(_row(name, numerics, [error(*pair) for pair in zip(found, truths, strict=True)]))
    result.complete = True
    return result


def _row(name: str, numerics: str, errors: list[float]) -> dict[str, Any]:
    """Returns a row. There is one error for each layer."""
    bits = 8 * FORMATS[name].stored_bytes(256, 256) / 256**2
    row = {"name": name if numerics == NUMERICS[0] else f"{name}_{numerics}", "format": name, "numerics": numerics}
    return row | {
        "bits_per_weight": bits,
        "errors_rms": errors,
        "error_rms": sum(errors) / len(errors),
        "error_worst": max(errors),
    }


def shipped_model() -> Any:
    """Loads the shipped model with its own eager experts, in float32."""
    checkpoint = Checkpoint.open(DEMO / "model")
    model_class = find_model_class(load_config(checkpoint))
    options = {"has_experts": True, "dtype": torch.float32, "experts_implementation": "eager"}
    return load_weights(model_class, checkpoint, **options)[0].eval()


def _formats() -> dict[str, Callable[[Array], Array]]:
    """Returns for each format the function that sends weights [outputs, inputs] through it and
    back.
    """

    def fp8(values: Array) -> Array:
        codes, scales = quantise_fp8(values)
        return dequantize("fp8_e4m3_b128", codes, *values.shape, scales)

    def mxfp4(values: Array) -> Array:
        blocks, scales = quantise_mxfp4(values)
        return dequantize("mxfp4", blocks, *values.shape, scales)

    def of_gguf(name: str) -> Callable[[Array], Array]:
        kind = gguf.GGMLQuantizationType[GGUF_KINDS[name]]
        return lambda values: dequantize(name, gguf.quantize(values, kind), *values.shape)

    made = {name: (lambda values, name=name: requantized(values, name)) for name in ("int8_g32", "int4_g32")}
    return {**made, "fp8_e4m3_b128": fp8, "mxfp4": mxfp4, **{name: of_gguf(name) for name in GGUF_KINDS}}


def _with_weights(module: Any, rounded: Callable[[Array], Array]) -> Any:
    changed = copy.deepcopy(module)
    for name in ("gate_up_proj", "down_proj"):
        for matrix in changed._parameters[name].data:
            oriented = matrix.T if changed.is_transposed else matrix
            oriented.copy_(torch.from_numpy(rounded(oriented.contiguous().numpy())))
    return changed


def output(module: Any, call: ExpertsCall) -> Any:
    """Computes what the experts give for a call, in float64."""
    return copy.deepcopy(module).double()(call.hidden_states.double(), call.topk_ids, call.topk_weights.double())


def error(found: Any, truth: Any) -> float:
    """Returns the rms difference over the standard deviation of the truth."""
    return float((found - truth).square().mean().sqrt() / truth.std())


if __name__ == "__main__":
    sys.exit(main())
