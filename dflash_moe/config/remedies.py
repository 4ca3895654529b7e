"""What is done where a worker is lost, and in which order, as the settings have it.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dflash_moe.config.values import HOST_FALLBACK, RECONNECT, REPLICA

if TYPE_CHECKING:
    from dflash_moe.config.settings import Settings


def brings_workers_back(settings: Settings) -> bool:
    """Whether lost workers are started or dialled again."""
    return settings.restart and RECONNECT in settings.failure_order


def host_grace_ms(settings: Settings) -> float:
    """Returns for how many milliseconds a lost worker is waited for before the host computes: none
    where the order names the host first.
    """
    order = settings.failure_order
    is_host_first = HOST_FALLBACK in order and RECONNECT in order[order.index(HOST_FALLBACK) :]
    return 0.0 if is_host_first else settings.reconnect_grace_ms


def fallback_is_off(settings: Settings) -> str:
    """Returns the setting that forbids the host to compute a lost worker's experts, empty where
    none does.
    """
    if settings.required:
        return "ipc.required is 1"
    if settings.host_fallback == "none":
        return "host.fallback is none"
    if HOST_FALLBACK not in settings.failure_order:
        return "failure.order has no host"
    return ""


def on_worker_loss(settings: Settings) -> str:
    """Returns a sentence that says what becomes of the experts of a worker that is lost. A runtime
    logs it when it starts, and `doctor` shows it.
    """
    back = "started or dialled again" if brings_workers_back(settings) else ""
    missing = "failure.order has no reconnect" if settings.restart else "failure.restart is off"
    kept_away = fallback_is_off(settings)
    parts = ["calls go to another worker with the same experts"] if REPLICA in settings.failure_order else []
    if back:
        parts.append(f"wait {settings.park_s:g} s for the lost one to be {back}")
    if not kept_away:
        grace = f", which begins {host_grace_ms(settings):g} ms after the loss" if back else ""
        parts.append(f"are computed by the host's processor where that gives the same bits{grace}")
    parts.append(
        "else raise WorkerLost until it is back" if back else f"else raise WorkerLost until it is released ({missing})"
    )
    return ", ".join(parts) + (f" (the host does not compute them: {kept_away})" if kept_away else "")
