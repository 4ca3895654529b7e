"""Whether a holder computes the right numbers: golden rows, checksums of contents, rows that are
asked again. It knows nothing of how workers are started.

SPDX-License-Identifier: Apache-2.0
"""
