"""Has our workers compute the routed experts of a model that SGLang serves. `dflash_moe_sglang`,
which SGLang finds by its entry point, calls `registration.register` in every process of SGLang.

No build of SGLang runs without a card, so that this was compared with SGLang's source
(tests/contracts/sglang.py) and never run.
SPDX-License-Identifier: Apache-2.0
"""
