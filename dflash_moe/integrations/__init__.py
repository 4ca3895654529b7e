"""Where a runtime meets other software: transformers models, generation, parity with a model's own
experts.

SPDX-License-Identifier: Apache-2.0
"""
