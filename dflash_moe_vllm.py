"""The plug-in of vLLM, which vLLM finds by its entry point and calls in each of its processes. With
DFLASH_MOE_TOPOLOGY, the path of a topology, our workers compute the routed experts of the model
that vLLM serves; without it nothing happens, and nothing else of ours is imported.

SPDX-License-Identifier: Apache-2.0
"""

import os


def register() -> None:
    """Does what the module says. Raises the errors of dflash_moe.integrations.vllm, which vLLM does
    not catch: an error of the import above would only be logged.
    """
    topology = os.environ.get("DFLASH_MOE_TOPOLOGY")
    if topology is None:
        return
    from dflash_moe.integrations.vllm.registration import register as register_layers

    register_layers(topology)
