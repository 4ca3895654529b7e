"""Proofs of what was computed: `verify`, `diff`, receipts and their replay, each by comparing two
passes.

SPDX-License-Identifier: Apache-2.0
"""
