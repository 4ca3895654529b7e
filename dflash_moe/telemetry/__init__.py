"""What can be observed: the machine, the memory of processes, logs and call counters. This room
depends on nothing of the package but errors.

SPDX-License-Identifier: Apache-2.0
"""
