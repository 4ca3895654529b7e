"""Tests of workers that a cluster starts and that register: `make cluster-check`.

SPDX-License-Identifier: Apache-2.0
"""
