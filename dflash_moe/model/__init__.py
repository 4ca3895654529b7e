"""Describes the experts of a model: their formula, their tensors in a checkpoint, and how both are
derived from the model.

A worker uses `ffn` and `checkpoint`, which need neither torch nor transformers. The host uses
`spec` to derive them.
SPDX-License-Identifier: Apache-2.0
"""
