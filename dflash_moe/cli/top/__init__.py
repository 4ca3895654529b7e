"""`dflash-moe top`: the command, and the rates that it shows.

SPDX-License-Identifier: Apache-2.0
"""
