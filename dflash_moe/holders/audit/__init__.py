"""Whether a holder computes the right numbers: golden rows that all are asked when they join
(`golden`), checksums of the bytes that they loaded (`contents`, learned in the background by
`contents_learner`, compared for copies by `mapped_holders`), and rows of calls that are asked again
(`row_questions`) of another holder or of the host itself (`host_twin`). Who is outvoted is taken
out. It knows nothing of how workers are started.

SPDX-License-Identifier: Apache-2.0
"""
