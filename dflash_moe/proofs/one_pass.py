"""One of the two passes that are compared: the model over its workers is opened, runs the tokens of
one sequence, and is let go.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from dflash_moe.experts.expert_runtime import ExpertRuntime
from dflash_moe.forward.forward import Forward, StepRows
from dflash_moe.forward.host_model import HostModel, open_host
from dflash_moe.model.architecture import load_config
from dflash_moe.model.checkpoint import Checkpoint

if TYPE_CHECKING:
    from dflash_moe.holders.fleet import LoadingReport
    from dflash_moe.model.spec import ModelSpec
    from dflash_moe.topology import Topology

# So many tokens are computed where nobody gives a prompt. That is longer than any window of a few
# tokens, and takes one core little time.
NUM_TOKENS = 96


@dataclass(frozen=True, slots=True)
class OpenedPass:
    """A model over its workers, and what computes its steps."""

    runtime: ExpertRuntime
    host: HostModel
    forward: Forward


@contextmanager
def opened_pass(
    path: str | Path,
    spec: ModelSpec,
    topology: Topology,
    overrides: Mapping[str, Any],
    *,
    on_loading: LoadingReport | None,
    micro_batches: str | None = None,
) -> Iterator[OpenedPass]:
    """Opens a model for the block. `overrides` are settings. Errors are those of
    `ExpertRuntime.start` and `open_host`.
    """
    with torch_threads_kept(), ExpertRuntime.start(topology, spec, on_loading=on_loading, **overrides) as runtime:
        host = open_host(path, runtime, micro_batches=micro_batches)
        with closing(host.engine_forward(runtime.settings.kv_memory)) as forward:
            yield OpenedPass(runtime, host, forward)


@contextmanager
def torch_threads_kept() -> Iterator[None]:
    """Gives torch its threads back after the block: an engine leaves it one."""
    before = torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads(before)


def sequence_logits(
    forward: Forward, token_ids: Sequence[int], *, num_logits: int | None = None, max_tokens: int = 0, max_rows: int = 0
) -> torch.Tensor:
    """Computes tokens as one sequence, and returns float32 [num_logits, vocab_size], the logits of
    the last ones, by default of all, on the processor. The sequence may have `max_tokens` in all,
    which some rotary tables depend on, and its steps have at most `max_rows` rows; where these are
    0, as many as there are tokens. Errors are those of `Forward.admit` and `Forward.begin`.
    """
    count = len(token_ids)
    first_wanted = 0 if num_logits is None else count - num_logits
    size = max_rows or count
    sequence = forward.admit(max_tokens or count)
    found = []
    try:
        for begin in range(0, count, size):
            part = token_ids[begin : begin + size]
            wanted = min(len(part), max(0, begin + len(part) - first_wanted))
            with forward.begin([StepRows(sequence, part, num_logits=wanted)]) as step:
                found.append(step.run().detach().float().cpu())
    finally:
        sequence.release()
    return torch.cat(found)


def drawn_tokens(path: Path, seed: int) -> list[int]:
    """Returns NUM_TOKENS tokens that the seed draws, fewer where the model has fewer positions."""
    config = load_config(Checkpoint.open(path)).get_text_config()
    count = min(NUM_TOKENS, int(getattr(config, "max_position_embeddings", NUM_TOKENS) or NUM_TOKENS))
    generator = torch.Generator().manual_seed(seed)
    found: list[int] = torch.randint(0, int(config.vocab_size), (count,), generator=generator).tolist()
    return found
