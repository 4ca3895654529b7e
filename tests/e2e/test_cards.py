"""Real cards, where there are any: the bits of the reference, alone and beside the processor in one
layer.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import numpy as np
import pytest

from dflash_moe import ExpertRuntime, Topology, _core
from dflash_moe.testing.tiny import routed_batch, tiny_checkpoint
from tests.expert_cases import Batch, Expected

NUM_EXPERTS, TOP_K, HIDDEN = 8, 3, 96
CARDS = [
    f"{backend}:{index}"
    for backend in ("cuda", "hip")
    for index, device in enumerate(_core.probe_backend(backend)["devices"])
    if not device["reason"]
]

pytestmark = pytest.mark.skipif(not CARDS, reason="this machine has no card that a built plug-in can use")


@pytest.fixture(scope="module", params=["f32", "f16", "bf16"])
def spec(request, tmp_path_factory):
    directory = tmp_path_factory.mktemp("real_cards")
    return tiny_checkpoint(directory, hidden_size=HIDDEN, num_experts=NUM_EXPERTS, top_k=TOP_K, dtype=request.param)


@pytest.mark.parametrize("card", CARDS)
def test_a_card_beside_the_processor_gives_the_reference_bits(spec, card):
    backend, _, index = card.partition(":")
    topology = Topology.parse(
        "version: 1\nplacement: {policy: explicit}\nworkers:\n"
        f"  - {{name: card, backend: {backend}, device: {index}, experts: {{'*': '0-4'}}}}\n"
        "  - {name: helper, backend: cpu, threads: 1, experts: {'*': '5-7'}}\n"
    )
    with ExpertRuntime.start(topology, model=spec, dtype="f32") as runtime:
        twin = Expected(runtime.placement, spec, weight_dtype=spec.dtype, isa="reference")
        for layer, tokens in ((0, 1), (1, 40), (0, 500)):
            batch = Batch(*routed_batch(tokens, HIDDEN, NUM_EXPERTS, TOP_K, seed=tokens))
            found = runtime.experts(layer, batch.hidden_states, batch.topk_ids, batch.topk_weights)
            assert np.asarray(found).tobytes() == twin.experts(layer, batch).tobytes()
        assert runtime.stats()["workers"]["card"]["calls"] > 0
