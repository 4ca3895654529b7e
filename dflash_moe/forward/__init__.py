"""A model's forward pass over paged memory. It knows nothing of requests and sampling.

- `host_model` opens a model. On a card, with `host.operators: torch` and for kernel set reference
  all of it stays in torch (`torch_model`). Else modules and whole layers are taken one by one where
  they are proven (operators/takeover, `take_layers`). Where attention cannot be paged, nothing is
  taken, and `one_sequence` runs the model. `independence` proves that what stays in torch computes
  each row by itself. `kept_proofs` has what an earlier start proved. `fitted` fits a model to this
  machine without a topology.
- `forward` runs a step: rows of any sequences, a `StepContext` that is made once and passed, and
  at the end all tokens stored or none (`step_blocks` rolls back). `layer_loop` goes through the
  layers.
- Pages: `blocks` counts who uses which block, `sequence` has a table of them, `block_hashes` and
  `prefix_cache` find what begins alike: full blocks of 16 tokens, never the last token, from the
  end of the step that filled a block until its place is needed, the longest unused first. They find
  nothing with `engine.prefix_cache: off` and in `one_sequence`, and no block that is rotated
  otherwise because the length of prompt and max_tokens together is another.
- Memory: `kv_budget` says how many blocks there are (`engine.kv_memory`, by default a quarter of
  what is free after the weights) and what does not fit. It comes last of three who ask for memory:
  placement/plan fits shards to each worker's `memory:`, holders/memory_check compares them with
  what is free, and blocks get what is left once they are loaded. Their refusals have the numbers
  and begin with the topology's line, with `memory:` and with `engine.kv_memory:`; `LLM.stats()` has
  the blocks. `paged_cache` and `torch_cache` are the memory.
- `halves/micro_batches` computes a step in two halves on two threads, where
  `halves/split_forecast` expects that to be faster.
- `rotary_tables` makes cosines and sines of each sequence by itself; `residuals` shows the stream
  between layers to whoever looks.

SPDX-License-Identifier: Apache-2.0
"""
