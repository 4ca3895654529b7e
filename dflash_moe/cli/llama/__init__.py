"""`dflash-moe llama`.

SPDX-License-Identifier: Apache-2.0
"""
