"""The tiny checkpoint of nothing but experts that `bench ipc`, `bench fault` and tests use.

SPDX-License-Identifier: Apache-2.0
"""
