"""The command line. Each module of a command has `register(app)`, and nothing here imports torch
before a command needs it.

SPDX-License-Identifier: Apache-2.0
"""
