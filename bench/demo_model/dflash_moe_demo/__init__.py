"""The model and the long prompt of `dflash-moe demo`: data, kept out of the package that a worker
installs.

SPDX-License-Identifier: Apache-2.0
"""
