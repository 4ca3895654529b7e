"""The engine runs many requests of one model at once: it plans steps, runs each as one packed
forward pass over paged memory, samples, and delivers tokens to whoever asked. `LLM` is its face.

SPDX-License-Identifier: Apache-2.0
"""
