"""The way of one call of a layer's routed experts: tensors in, a batch for the workers, the client,
the result. `ExpertRuntime` (expert_runtime.py) is its face and holds no logic.

- `runtime_parts` builds what a runtime consists of, starts it in one order and ends it in another:
  the client, holders with their keepers, calls, reports.
- `expert_calls` takes calls. `layer_table` finds the layer, `tensors` binds what the processor
  has, `device_tensors` stages what a card has; `expert_call` is a call that its caller awaits.
- `device_step` leaves the processor out for a whole decode step, and `step_replay` computes a step
  anew that a worker spoilt.
- `mode_switch` changes `batched`, `stream` and `auto` while calls go on; `auto` says in words and
  numbers what the client has learned for it. Who cuts calls is `csrc/client/slicing.cc`.
- `observe` tells what happened, `readiness` whether a call would be computed now.

A call's deadline is the client's: `ipc.call_timeout_s`, extended where its own rows must take
longer, never beyond a multiple of it (`csrc/client/calls.h`). Bits: a holder adds a row's experts
ascending in float32 and rounds once; the host adds shards ascending and rounds once. A reply
counts only where all its fields and its checksum are those of what was asked in its slot, so that
a late or damaged one costs time and never a bit.

What a setting is and who wins, the caller over environment over topology over default, is
`config/resolve.py`, over the table of `config/settings.py`, which also refuses bad values.

SPDX-License-Identifier: Apache-2.0
"""
