"""How tensors are stored in files: the formats of weights, their headers, and their values in
NumPy.

SPDX-License-Identifier: Apache-2.0
"""
