"""A model's forward pass over paged memory: layers taken over, rotary tables, pages of keys and
values, micro-batches. It knows nothing of requests.

SPDX-License-Identifier: Apache-2.0
"""
