"""Who holds which shard of the experts, and how a holder starts, joins, fails, returns, leaves.

SPDX-License-Identifier: Apache-2.0
"""
