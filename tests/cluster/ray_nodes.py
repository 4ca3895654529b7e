"""A cluster of Ray's with three nodes on this machine, until stdin ends: `python ray_nodes.py
FOLDER`. It prints its address and the ids of its nodes as JSON.

It leaves the process that has started it: Ray starts and ends processes as it likes, and a test run
counts its own descendants.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

CPUS_OF_A_NODE = 2
# A resource that the last node alone has.
NAMED = "quiet"
# The least that Ray takes for the store of objects, which nothing of ours uses.
STORE_BYTES = 80_000_000


def main(folder: str) -> None:
    from ray.cluster_utils import Cluster

    # Ray notes the address of a cluster that it starts in a folder of the machine, which a cluster
    # with a folder of its own does not make.
    os.environ["RAY_TMPDIR"] = folder
    Path(folder, "ray").mkdir()
    every = {"num_cpus": CPUS_OF_A_NODE, "num_gpus": 0, "object_store_memory": STORE_BYTES}
    cluster = Cluster(initialize_head=True, head_node_args={**every, "include_dashboard": False, "temp_dir": folder})
    nodes = [cluster.head_node, cluster.add_node(**every), cluster.add_node(**every, resources={NAMED: 1})]
    print(json.dumps({"address": cluster.address, "nodes": [node.node_id for node in nodes]}), flush=True)
    sys.stdin.read()
    cluster.shutdown()


if __name__ == "__main__":
    if os.fork():
        os._exit(0)
    os.setsid()
    main(sys.argv[1])
