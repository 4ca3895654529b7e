"""Checkpoints, batches and case tables shared by tests and benches. Nothing else may import this
package.

SPDX-License-Identifier: Apache-2.0
"""
