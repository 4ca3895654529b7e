"""The worker process: its listener, its sessions with a host each, its loader. It needs neither
torch nor transformers.

SPDX-License-Identifier: Apache-2.0
"""
