"""A host's own operators in place of those of torch: which modules of a model they stand in for,
and the proof that they may.

- `takeover` walks a model and takes modules one by one: `linear`, `norms`, `activations`,
  `routers`, each only where it is proven to compute the same within its bound (`bounds`,
  `probes`). What stays in torch stays with its reason, a line of `report`, which is logged when a
  model is opened and printed by `dflash-moe verify`. `stored_weights` takes what a checkpoint
  stores quantised as it is.
- `attention_probe` finds out whether attention can be paged at all. It cannot where a layer has
  none on transformers' interface, reads keys that another layer stored, asks the cache for a
  length, or masks otherwise than by a window, nor where latent heads are not proven. Then the whole
  model stays in torch and runs one sequence at a time; the report says why. `paged_attention` and,
  with torch's operators, `gathered_attention` are the two ways of reading pages, which modules call
  by transformers' interface (`attention_interface`); `latent_proof` is about latent heads.
- `layers` takes whole decoder layers (block_forms.py decides), in steps whose context modules of
  the model's own find in one documented slot (`step_context`).
- `looks` and `notable_positions` are what a proof must have looked at: lengths and positions at
  which code may begin to compute something else. What it covers and what it cannot:
  docs/numerics.md.

SPDX-License-Identifier: Apache-2.0
"""
