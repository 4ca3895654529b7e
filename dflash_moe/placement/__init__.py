"""Placement says who holds which experts: arithmetic over the sizes of layers and a topology, which
knows no process and no file.

- `policies` assigns experts to holders in runs of ascending ids, the host's own first and then
  workers in the topology's order: `even` (equal numbers), `memory` (in proportion to what `memory:`
  leaves after earlier layers), `explicit` (as the topology says; the host gets what it leaves out).
  `host.experts.memory` says how much the host may get; what exceeds it under `explicit` is refused.
- `plan` makes shards of that, with replicas (`replicas`), packed or mapped layouts, and checks the
  memory of each holder. `imposed` takes a shard map that is fixed already, `elastic` says what a
  worker that is added takes.
- `numerics` and `formats` check that classes and formats of a layer's holders fit together;
  `preset` chooses classes for who asked for none. `remedies` and `fallback` say who answers once a
  holder is lost, and why others do not.
- `fit` is what happens without a topology: whole layers, moved until they fit; `fit_text` says so.
- `held_shards` is the result as holders see it.

The shard map decides bits, a holder decides none.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from dflash_moe.placement.plan import plan_placement
from dflash_moe.placement.shards import PlacedLayer, Placement, Shard
from dflash_moe.topology import HOST

__all__ = ["HOST", "PlacedLayer", "Placement", "Shard", "plan_placement"]
