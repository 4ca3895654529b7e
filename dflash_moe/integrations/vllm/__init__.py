"""Has our workers compute the routed experts of a model that vLLM serves. `dflash_moe_vllm`, which
vLLM finds by its entry point, calls `registration.register` in every process of vLLM.

SPDX-License-Identifier: Apache-2.0
"""
