"""Whole decoder layers over packed operators: which forms there are (`block_candidates`), which one
a layer is (`block_forms`, proven by `layer_proof` against `exact_layer`), and the calls of the core
that compute it (`blocks`, `attention_block`, `bound_calls`, `step_program`).

SPDX-License-Identifier: Apache-2.0
"""
