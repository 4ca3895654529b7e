"""`dflash-moe generate`: what it reads, the command, and what it says of its results.

SPDX-License-Identifier: Apache-2.0
"""
