"""Checkpoints, batches and case tables that tests and benches share. Nothing else may import this
package.

SPDX-License-Identifier: Apache-2.0
"""
