"""Benchmarks that users run on their own machines. Each case has a file, and all share one harness
and one format of results.

The command line (cli/bench/bench.py) is a thin layer over the `run_*` functions here.
SPDX-License-Identifier: Apache-2.0
"""
