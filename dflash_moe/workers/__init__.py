"""The worker process: its listener, its session with one host, its loader. It needs neither torch
nor transformers.

SPDX-License-Identifier: Apache-2.0
"""
