"""The language of the control plane: frames, messages, authentication and keys. It knows no process
and no model.

docs/protocol.md is normative, and its tables are checked against `messages.py`.
SPDX-License-Identifier: Apache-2.0
"""
