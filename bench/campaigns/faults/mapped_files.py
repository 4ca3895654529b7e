"""Checkpoints that change while a worker or the host computes from them: cut off, a bit flipped,
the times alone. What is answered has the right bits, nobody ends, errors name the file, and all is
well once it has its bytes again, without anybody's help.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
from functools import partial
from pathlib import Path

from bench.campaigns.faults.campaign import Run
from bench.campaigns.faults.damage import FILE, Found, all_right, damage_in_place, restore_in_place, use_while_damaged
from bench.campaigns.faults.load import ALONE, Load, make_model, pids_of, start, wait_until
from dflash_moe.config.settings import MAX_DEATHS
from dflash_moe.experts.expert_runtime import ExpertRuntime
from dflash_moe.model.ffn import FfnSpec
from dflash_moe.model.spec import ModelSpec
from dflash_moe.testing.tiny import tiny_checkpoint
from dflash_moe.topology import Topology

WAYS = ("flipped", "truncated", "touched", "flipped, times kept")
# Who holds both replicas, where the second one computes from the file.
LAYOUTS = (("packed", "mapped"), ("mapped", "mapped"))


def run(given: Run, found: Found) -> None:
    """Damages files under use `given.size` times for each kind of weights and of holders: two
    workers, one or both of which compute from the file, and the host that stands in for them.
    """
    for kind, spec in (("plain", make_model(given.folder / "read")), ("transposed", _transposed(given.folder / "mapped"))):
        for layouts in LAYOUTS:
            with start_laid_out(spec, layouts) as runtime:
                _under_use(given, runtime, found, f"{kind}, {' and '.join(layouts)}", has_other="packed" in layouts)
        with start(spec, replicas=1, host_fallback="mapped", restart=False) as runtime:
            load = Load.quiet(runtime)
            for pid in pids_of(runtime).values():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            wait_until(partial(all_right, load))
            _under_use(given, runtime, found, f"{kind}, stand-ins of the host", has_other=False)


def start_laid_out(spec: ModelSpec, layouts: tuple[str, str]) -> ExpertRuntime:
    """Starts two holders of all shards, with these layouts of weights."""
    lines = "".join(f"  - {{name: w{one}, threads: 1, weights_layout: {layout}}}\n" for one, layout in enumerate(layouts))
    topology = Topology.parse(f"version: 1\nplacement: {{replicas: 2}}\nworkers:\n{lines}")
    return ExpertRuntime.start(topology, model=spec, restart_deaths=MAX_DEATHS, **ALONE)


def _under_use(given: Run, runtime: ExpertRuntime, found: Found, who: str, *, has_other: bool) -> None:
    file = Path(runtime.spec.path) / FILE
    whole = file.read_bytes()
    load = Load.quiet(runtime, seed=given.seed)
    for number in range(given.size):
        way = WAYS[number % len(WAYS)]
        use_while_damaged(
            given, load, found, f"{way} under use: {who}", harm=partial(damage_in_place, given, file, whole, way),
            mend=partial(restore_in_place, file, whole), is_seen=way != "touched", has_other=has_other,
            is_named=lambda text: str(file) in text,
        )  # fmt: skip
    found.wrong_results += load.wrong


def _transposed(folder: Path) -> ModelSpec:
    """Writes square experts that count as transposed, which are read through the mapping: a page of
    it that is gone is no error of a read, but SIGBUS.
    """
    spec = tiny_checkpoint(folder, hidden_size=160, moe_intermediate_size=160, num_experts=16, top_k=4, num_layers=2)
    return dataclasses.replace(
        spec, layers=tuple(dataclasses.replace(layer, ffn=_turned(layer.ffn)) for layer in spec.layers)
    )  # fmt: skip


def _turned(ffn: FfnSpec) -> FfnSpec:
    turned = {
        name: dataclasses.replace(getattr(ffn, name), is_transposed=True)
        for name in ("gate_tensor", "up_tensor", "down_tensor")
    }  # fmt: skip
    return dataclasses.replace(ffn, **turned)
