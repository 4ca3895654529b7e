"""The way of one call of a layer's routed experts: tensors in, a batch for the workers, the client,
the result. `ExpertRuntime` (expert_runtime.py) is its face and holds no logic.

- `runtime_parts` builds what a runtime consists of, starts it in one order and ends it in another:
  the client, holders with their keepers, calls, reports.
- `expert_calls` takes calls. `layer_table` finds the layer, `tensors` binds what the processor
  has, `device_tensors` stages what a card has; `expert_call` is a call that its caller awaits.
- `device_step` leaves the processor out for a whole decode step, and `step_replay` computes a step
  anew that a worker spoilt.
- `mode_switch` changes `batched`, `stream` and `auto` while calls go on; `auto` says in words and
  numbers what the client has learned for it. `csrc/client/slicing.cc` says into how many slices
  a call is cut, `cut.cc` cuts it.
- `observe` tells what happened, `readiness` whether a call would be computed now.

A call's deadline is the client's: `ipc.call_timeout_s`, 30 s where nobody says otherwise. It is
extended where four times what is predicted for its own rows is longer, where another holder takes a
slice over, and while a worker is about to be judged, to 20 times that at most
(`csrc/client/calls.h`).

Bits: a holder adds a row's experts ascending in float32 and rounds once; the host adds shards
ascending and rounds once. How products are rounded before is the numerics class of a shard: equal
classes give equal bits (docs/numerics.md). A reply counts only where all its fields and its
checksum are those of what was asked in its slot: a late one frees its slot and nothing else, and
one that does not match ends its worker.

Who wins, the caller over environment over topology over a command's config file over default, is
`config/resolve.py`, which refuses unknown names; the settings are the table of
`config/settings.py`, and `config/setting.py` refuses bad values.

SPDX-License-Identifier: Apache-2.0
"""
