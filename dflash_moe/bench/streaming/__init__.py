"""`bench streaming`: a server that streams tokens, under a schedule of arrivals.

SPDX-License-Identifier: Apache-2.0
"""
