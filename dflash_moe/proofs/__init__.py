"""Proofs of what was computed: `verify`, `diff`, receipts and their replay, each by comparing two
passes.

- `one_pass` opens a model over its workers and runs one sequence through it; `two_passes` says
  whether bits or differences are compared, within which bounds, and where two passes part.
- `verify` compares with the model's own code: `eager_pass` runs it, `streamed_eager` with one layer
  in memory at a time; `layer_parity` judges the experts of a layer against `expert_truths` in
  float64, for which `rounded_inputs` rounds as a numerics class does; `verify_report` has the
  bounds that are exceeded.
- `diff` compares two checkpoints, or one in two ways: `layer_record` keeps what each layer was
  given and gave, `diff_prompt` says whether that can be compared, `diff_report` where they part.
- `replay` proves a `receipt` again, which `receipt_record` makes and `receipt_fields` reads.

SPDX-License-Identifier: Apache-2.0
"""
