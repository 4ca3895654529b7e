"""Pictures of results: one painter for each case, and `plot`, which chooses it.

SPDX-License-Identifier: Apache-2.0
"""
