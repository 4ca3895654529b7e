"""The version of the package: of its wheel, its core and its plug-ins, and what both ends of a
connection tell each other.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

__version__ = "0.1.0"
