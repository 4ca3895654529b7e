"""Describes a model: where its tensors lie, what its experts compute, how much it takes. A worker
uses `ffn`, `checkpoint` and what they need, without torch and transformers; the host uses the rest.

- `checkpoint` maps files, checks headers and names weights by a fingerprint; `formats` are the
  formats that files have, `gguf_architectures` what GGUF's architectures mean.
- `spec` derives the layers with routed experts by running transformers' own loader and experts
  class on toys (`tensor_names`, `probe`, `gates`, `shrink`);
  `gguf_architectures/gguf_experts` reads them off a GGUF file. `ffn` is the formula of an expert.
- `expert_tensors` finds the matrices of one expert, `expert_loading` loads experts into a resident
  shard (a worker's way there is workers/loader.py), `expert_store` lends it, `scrub` reads it again
  to find flipped bits. In which format weights are kept says `workers[].weights`, by the table of
  model/formats/weight_formats.py; whether packed or mapped, placement/plan.py.
- `host_size`, `dense_tensors` and `sizing` are the host's own part, for `plan` and for loading.
- `refusals`, `first_look` and `config_limits` are what is said of files that will not do.

SPDX-License-Identifier: Apache-2.0
"""
