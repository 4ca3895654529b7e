"""The places where a runtime meets other software: transformers models, generation, and parity with
the experts of the model itself.

SPDX-License-Identifier: Apache-2.0
"""
