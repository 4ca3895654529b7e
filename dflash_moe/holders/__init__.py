"""Who holds which shard of the experts, and how a holder starts, joins, fails, returns, leaves.

One `Holder` (holder.py) is all that is known of one. What happens to it comes through one queue
(events.py), whose one consumer is the thread of `worker_keeper`; what to do then says
`membership`, a state machine without clock and I/O: how often a worker is started again, after
which pause, and when it is left alone.

- A start: `placed_experts` carries out a placement over a `fleet`, which owns every process and
  connection. `launcher` starts children, `dialing` reaches workers by hand, over the transport
  that `transports` chooses by address and setting (table: protocol/paths.py); `session` and
  `conversation` are the host's end of the control connection, `local_worker` is one in this
  process. Who may connect to a listening worker is decided at its end: workers/listener.py,
  protocol/auth.py.
- Loading: `memory_check` asks first whether all of it fits; `loaded_shards` loads, and compares.
- A path: `path_keeper` attaches, renews and revives; each renewal is a `renewal`.
- A loss: the client judges (`csrc/client/losses.h`), by time in which the worker could have
  answered. Without progress it is suspected after `failure.suspect_ms` and lost after
  `ipc.stall_timeout_s`, as without a pulse; without answers after one and two
  `ipc.call_timeout_s`. `client_calls` hears of it, `worker_keeper` ends,
  starts and loads, and meanwhile `host_fallback` computes on the host from the mapped checkpoint,
  unless `host.fallback: none` or another setting of config/remedies.py forbids it.
- A change while calls go on: `elastic` adds, drains, removes and restarts, one at a time, and
  refuses to take a shard's last holder; `control` takes such orders from the command line;
  `holder_lists` tells the client who is asked first.
- Wrong numbers: `audit` has the questions and answers, `row_audit` asks them of a running host. A
  holder that is outvoted, by others or by the host's own computation, is taken out.

`owner` keeps all this from a forked child, `threads` shares cores.

SPDX-License-Identifier: Apache-2.0
"""
