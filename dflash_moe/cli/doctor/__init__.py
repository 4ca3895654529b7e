"""`dflash-moe doctor`.

SPDX-License-Identifier: Apache-2.0
"""
