"""A host's own operators in place of those of torch: which modules of a model they stand in for,
and the proof that they may.

SPDX-License-Identifier: Apache-2.0
"""
