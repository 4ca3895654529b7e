"""Finds what `doctor` tells of the host's own operators: whether a model is taken over, by which
operators and in which numerics class, and the paged KV cache that it gets.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from typing import Any

from dflash_moe.config import Settings, format_bytes
from dflash_moe.errors import UnsupportedError
from dflash_moe.operators.report import OPERATORS
from dflash_moe.protocol.devices import DeviceChoice
from dflash_moe.protocol.identity import choose_numerics
from dflash_moe.topology import HOST, Topology
from dflash_moe.topology.numerics import DEFAULT_NUMERICS


def probe_host_operators(topology: Topology, settings: Settings, isa: str) -> dict[str, Any]:
    """Returns `taken`, or else the `reason` why torch's operators stay, the numerics class of
    linear layers on kernel set `isa`, the operators that are offered to every model, and the
    settings of the KV cache. Which modules of a model they take, `verify` says.
    """
    reason, numerics = _why_torch(topology, settings, isa), DEFAULT_NUMERICS
    if not reason:
        planned = topology.with_settings(settings)
        try:
            numerics = choose_numerics(planned.numerics_of(HOST), isa, name=HOST)[0]
        except UnsupportedError as error:
            # Those of the workers are a wish; those that were stated for the host are not.
            reason = str(error) if planned.host.activations is not None else ""
    budget = settings.kv_memory
    return {
        "setting": settings.host_operators,
        "device": topology.host.device,
        "taken": not reason,
        "reason": reason,
        "numerics": numerics,
        "operators": dict(OPERATORS),
        "kv": {
            "block_tokens": settings.block_tokens,
            "memory": format_bytes(budget.num_bytes) if budget.fraction is None else f"{budget.fraction * 100:g}%",
            "dtype": settings.kv_dtype or "auto",
        },
    }


def _why_torch(topology: Topology, settings: Settings, isa: str) -> str:
    if not DeviceChoice.of_host(topology.host).is_processor:
        return f"on {topology.host.device} the model keeps torch's"
    if settings.host_operators == "torch":
        return "host.operators: torch"
    if isa == "reference":
        return "kernel set reference has none"
    return ""


def host_operator_lines(found: dict[str, Any]) -> list[str]:
    """Returns the lines of the report on host operators and on the KV cache."""
    kv = found["kv"]
    on_card = "" if found["device"] in ("auto", "cpu") else f" on {found['device']}"
    where = f"of the memory that is free{on_card} after the weights" if kv["memory"].endswith("%") else f"at most{on_card}"
    dtype = "the model's dtype" if kv["dtype"] == "auto" else kv["dtype"]
    if not found["taken"]:
        return [
            f"operators  the model's own: {found['reason']}; its rows may depend on their batch: bit equality in company "
            "is not claimed",
            f"kv cache   pages of {kv['block_tokens']} tokens in {dtype}, with the buffer that torch's attention gathers them "
            f"into {kv['memory']} {where}",
        ]
    return [
        f"operators  {', '.join(found['operators'])} in {found['numerics']}, each where it is proven for a module; `verify` "
        "names the modules of a model that no form fits",
        f"kv cache   pages of {kv['block_tokens']} tokens in {dtype}, {kv['memory']} {where}",
    ]
