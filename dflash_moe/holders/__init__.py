"""Who holds which shard of the experts, and how a holder starts, joins, fails, returns, leaves.

One `Holder` (holder.py) is all that is known of one. What happens to it comes through one queue
(events.py) to the thread of `worker_keeper`; what to do then says `membership`, a state machine
without clock and I/O: how often a worker is started again, after which pause, and when it is left
alone until somebody releases it. By default that is after 5 deaths within 60 s (the keys of
`failure.restart`); at once where it will not do, such as with other weights, or where
`failure.restart` is off or `failure.order` has no reconnect. `Holder.life` counts deaths; one that
people start is dialled as long as it is out of reach.

- A start: `placed_experts` carries out a placement over a `fleet`, which owns every process and
  connection. `launcher` starts children, `dialing` reaches workers by hand, over the transport that
  `transports` chooses by address and setting (table: csrc/transport/kinds.cc); `session` and
  `conversation` are the host's end of the control connection, `local_worker` is one in this
  process. Who may connect to a listening worker is decided at its end (workers/listener.py,
  protocol/auth.py): over TCP whoever has the key file, over a Unix socket the same user or root,
  and only with the key where the worker was given one. `memory_check` asks first whether all of it
  fits; `loaded_shards` loads, and compares.
- A path: `path_keeper` attaches, renews (`renewal`) and revives.
- A loss: the client judges (`csrc/client/losses.h`), by time in which the worker could have
  answered. Without progress it is suspected after `failure.suspect_ms` and lost after
  `ipc.stall_timeout_s`; without answers after one and two `ipc.call_timeout_s`, later where more is
  predicted. A connection that hangs up or a process that ends is a loss at once, which
  `worker_keeper` sees too. `client_calls` hears of it. Where nobody else holds the shard,
  `host_fallback` computes here from the mapped checkpoint, if it has the class and these weights,
  unless `host.fallback: none` or another setting of config/remedies.py forbids it.
- A change while calls go on: `elastic` adds, removes and restarts, and lets go only what has
  drained or had its time to. It refuses a change while another is under way, to take a shard's last
  ready holder unless `force` is said, to restart a worker that people start, and to add or remove
  one where `host.device` is no processor. `control` takes such orders, `holder_lists` tells the
  client.
- Wrong numbers: a holder that joins is asked for golden rows (`audit`), and kept out where it
  answers them wrongly. While calls go on, `row_audit` computes a share of their rows again
  (`audit.cpu`): a worker against which a second opinion and the host's own reference agree is
  ended, tried once more, and then left alone. Without a reference it is only logged. Weights that
  have changed in a worker's memory are found by its own scrub (`audit.scrub_s`) and loaded again;
  where that fails it is ended likewise, and for a second change within a day it is left alone at
  once.
- `owner` keeps all this from a forked child, `threads` shares cores.

SPDX-License-Identifier: Apache-2.0
"""
