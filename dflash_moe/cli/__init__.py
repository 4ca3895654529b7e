"""The command line. Each command module has `register(app)`; nothing here imports torch before a
command needs it.

SPDX-License-Identifier: Apache-2.0
"""
