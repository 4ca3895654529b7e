"""A model's forward pass over paged memory. It knows nothing of requests and sampling.

- `host_model` opens a model: host operators where they are proven (`take_layers`), and else
  torch's (`torch_model`); where attention is not paged, `one_sequence`. `independence` proves that
  what stays in torch computes each row by itself. `fitted` fits a model to this machine without a
  topology.
- `forward` runs a step: rows of any sequences, a `StepContext` that is made once and passed, and
  at the end all tokens stored or none (`step_blocks` rolls back). `layer_loop` goes through the
  layers.
- Pages: `blocks` counts who uses which block, `sequence` has a table of them, `block_hashes` and
  `prefix_cache` find what begins alike: full blocks, never the last token. `kv_budget` says how
  many there are (`engine.kv_memory`) and what does not fit. `paged_cache` and `torch_cache` are
  the memory.
- `halves/micro_batches` computes a step in two halves on two threads, where
  `halves/split_forecast` expects that to be faster.
- `rotary_tables` makes cosines and sines of each sequence by itself; `residuals` shows the stream
  between layers to whoever looks.

SPDX-License-Identifier: Apache-2.0
"""
