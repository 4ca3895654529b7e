"""`dflash-moe bench ...`.

SPDX-License-Identifier: Apache-2.0
"""
