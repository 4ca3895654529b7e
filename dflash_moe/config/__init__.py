"""Settings: the one table of them, what their values may look like, and how they are resolved.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from dflash_moe.config.activations import ACTIVATIONS
from dflash_moe.config.cache import NO_CACHE, CacheSettings
from dflash_moe.config.remedies import on_worker_loss
from dflash_moe.config.resolve import check_environment, resolve_settings, stated_settings
from dflash_moe.config.setting import SECTIONS, Setting
from dflash_moe.config.settings import (
    BLOCK_TOKENS,
    DTYPES,
    ISAS,
    MAX_REQUESTS,
    MAX_THREADS,
    SETTINGS,
    SETTINGS_BY_NAME,
    Settings,
)
from dflash_moe.config.values import (
    MAX_BYTES,
    SIZE_FORMS,
    MemoryBudget,
    did_you_mean,
    format_bytes,
    parse_budget,
    parse_bytes,
)

__all__ = [
    "ACTIVATIONS",
    "BLOCK_TOKENS",
    "DTYPES",
    "ISAS",
    "MAX_BYTES",
    "MAX_REQUESTS",
    "MAX_THREADS",
    "NO_CACHE",
    "SECTIONS",
    "SETTINGS",
    "SETTINGS_BY_NAME",
    "SIZE_FORMS",
    "CacheSettings",
    "MemoryBudget",
    "Setting",
    "Settings",
    "check_environment",
    "did_you_mean",
    "format_bytes",
    "on_worker_loss",
    "parse_budget",
    "parse_bytes",
    "resolve_settings",
    "stated_settings",
]
