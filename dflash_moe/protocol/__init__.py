"""The control plane's language: frames, messages, authentication, addresses, keys. Knows no process
and no model.

docs/protocol.md is normative; its tables are checked against `messages.py`.
SPDX-License-Identifier: Apache-2.0
"""
