"""What this machine keeps on disk so that a model starts without packing: files of panels, which a
worker maps in place of the memory that it would pack into, and what a host derived of the model.

- `folder` says whose the folder may be, and how a file gets into it: whole or not at all.
- `panel_file` is the format of a file of panels, named by the BLAKE3 of its header.
- `panel_index` names the files that belong to a checkpoint as it is now, so that nothing is read
  to find them.
- `kept_spec` gives a host its `ModelSpec`, by files whose names `spec_file` makes of all from which
  one is derived.
- `proof_file` is the same for what a host proved of a model (forward/kept_proofs).
- `closed_json` and `closed_file` read the JSON of these.
- `panel_store` is what others call. It finds, writes and sets aside files, and keeps the budget;
  `upkeep` lists, checks and removes them, for it and for `dflash-moe store`.
- `stored_experts` has the experts of one checkpoint there, which a `machine_panels` maps for one
  store of experts, and its `panel_writer` writes; `warming` writes them before any start.

SPDX-License-Identifier: Apache-2.0
"""
