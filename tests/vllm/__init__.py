"""Tests of the plug-in within a vLLM: `make vllm-check`."""
