"""The command line. The module of a command has a function of the same name, that of a group has
`register(app)`, and nothing here imports torch before a command needs it.

SPDX-License-Identifier: Apache-2.0
"""
