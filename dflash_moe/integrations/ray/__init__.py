"""Has Ray place, start and restart workers that register at their host. It is used by
`dflash-moe launch ray` alone: a host knows nothing of it, and no call passes through Ray.

SPDX-License-Identifier: Apache-2.0
"""
