"""The engine runs many requests of one model at once. So far it has the books of its paged KV
cache: which blocks there are, whose they are, and what one packed step does to them.

SPDX-License-Identifier: Apache-2.0
"""
