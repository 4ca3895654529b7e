"""Logits become tokens: what a request asks for, masks and penalties, the draw, and which drafts
are accepted.

SPDX-License-Identifier: Apache-2.0
"""
