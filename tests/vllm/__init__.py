"""Tests of the plug-in within a vLLM: `make vllm-check`.

SPDX-License-Identifier: Apache-2.0
"""
