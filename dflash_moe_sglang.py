"""The plug-in of SGLang, which SGLang finds by its entry point and calls in each of its processes.
With DFLASH_MOE_TOPOLOGY, the path of a topology, our workers compute the routed experts of the
model that SGLang serves; without it nothing happens, and nothing else of ours is imported.

SPDX-License-Identifier: Apache-2.0
"""

import os


def register() -> None:
    """Does what the module says. What is wrong is raised when the first layer is built, since
    SGLang only logs an error of this call.
    """
    topology = os.environ.get("DFLASH_MOE_TOPOLOGY")
    if topology is None:
        return
    from dflash_moe.integrations.sglang.registration import register as register_layers

    register_layers(topology)
