"""What can be observed: machine, process memory, logs, call counters. Depends on nothing of this
package but errors.

SPDX-License-Identifier: Apache-2.0
"""
