"""A step in two halves, so that the host computes one while workers have the other's experts: how
rows are cut, who has the turn, and when it is worth it.

SPDX-License-Identifier: Apache-2.0
"""
