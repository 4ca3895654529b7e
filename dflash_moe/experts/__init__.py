"""The way of one call of a layer's routed experts: tensors in, a batch for the workers, the client,
the result. `ExpertRuntime` is its face.

SPDX-License-Identifier: Apache-2.0
"""
