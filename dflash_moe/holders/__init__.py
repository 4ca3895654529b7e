"""Who holds which shard of the experts, and how a holder starts, joins, fails, returns, leaves.

One `Holder` (holder.py) is all that is known of one. What happens to it comes through one queue
(events.py) to the thread of `worker_keeper`; what to do then says `membership`, a state machine
without clock and I/O: how often a worker is started again, after which pause, and when it is left
alone. `Holder.life` counts deaths; one that people start is dialled as long as it is out of reach.

- A start: `placed_experts` carries out a placement over a `fleet`, which owns every process and
  connection. `launcher` starts children, `dialing` reaches workers by hand, over the transport
  that `transports` chooses by address and setting (table: csrc/transport/kinds.cc); `session` and
  `conversation` are the host's end of the control connection, `local_worker` is one in this
  process. Who may connect to a listening worker is decided at its end (workers/listener.py,
  protocol/auth.py): over TCP whoever has the key file, over a Unix socket the same user.
  `memory_check` asks first whether all of it fits; `loaded_shards` loads, and compares.
- A path: `path_keeper` attaches, renews (`renewal`) and revives.
- A loss: the client judges (`csrc/client/losses.h`), by time in which the worker could have
  answered. Without progress it is suspected after `failure.suspect_ms` and lost after
  `ipc.stall_timeout_s`; without answers after one and two `ipc.call_timeout_s`. A pulse
  connection that hangs up is a loss at once. `client_calls` hears of it. Where nobody else holds
  the shard, `host_fallback` computes here from the mapped checkpoint, if it has the class and these
  weights, unless `host.fallback: none` or another setting of config/remedies.py forbids it.
- A change while calls go on: `elastic` adds, drains, removes and restarts, one at a time, and never
  takes a shard's last holder; `control` takes such orders, `holder_lists` tells the client.
- Wrong numbers: at a start every holder is asked for golden rows (`audit`), and who answers them
  wrongly never joins. While calls go on, `row_audit` computes a share of their rows again
  (`audit.cpu`): a worker against which a second opinion and the host's own reference agree is
  ended, tried once more, and then left alone. Without a reference it is only logged.
- `owner` keeps all this from a forked child, `threads` shares cores.

SPDX-License-Identifier: Apache-2.0
"""
