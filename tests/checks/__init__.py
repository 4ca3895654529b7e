"""Contracts of the project that no compiler checks; `make check` runs them as `python -m
tests.checks`.

Each module offers `find(root) -> list[str]`: one line per violation, naming file and line and what
to do. Nothing here depends on the product, except `stub_parity`, `stubs` and `message_tables`,
which look at the built package.
SPDX-License-Identifier: Apache-2.0
"""
