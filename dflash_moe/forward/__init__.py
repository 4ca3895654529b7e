"""A model's forward pass over paged memory. It knows nothing of requests and sampling.

- `host_model` opens a model. On a card, with `host.operators: torch` and for kernel set reference
  all of it stays in torch (`torch_model`). Else modules and whole layers are taken one by one where
  they are proven (operators/takeover, `take_layers`); where attention cannot be paged,
  `one_sequence`. `independence` proves that what stays in torch computes each row by itself.
  `fitted` fits a model to this machine without a topology.
- `forward` runs a step: rows of any sequences, a `StepContext` that is made once and passed, and
  at the end all tokens stored or none (`step_blocks` rolls back). `layer_loop` goes through the
  layers.
- Pages: `blocks` counts who uses which block, `sequence` has a table of them, `block_hashes` and
  `prefix_cache` find what begins alike: full blocks, never the last token; not with
  `engine.prefix_cache: off`, in `one_sequence`, or where rotation depends on a length that differs.
  `kv_budget` says how many there are (`engine.kv_memory`) and what does not fit. It comes
  last of three who ask for memory: placement/plan fits shards to each worker's `memory:`,
  holders/memory_check compares them with what is free, and blocks get what is left once they are
  loaded. `paged_cache` and `torch_cache` are the memory.
- `halves/micro_batches` computes a step in two halves on two threads, where
  `halves/split_forecast` expects that to be faster.
- `rotary_tables` makes cosines and sines of each sequence by itself; `residuals` shows the stream
  between layers to whoever looks.

SPDX-License-Identifier: Apache-2.0
"""
