"""Benchmarks users run on their own machines: one file per case, one harness, one result format.

Depends on runtime and integrations; the CLI (cli/bench.py) is a thin layer over the `run_*`
functions here.
SPDX-License-Identifier: Apache-2.0
"""
