"""Whole decoder layers over packed operators: their forms, the proof of each, and the calls of the
core.

SPDX-License-Identifier: Apache-2.0
"""
