"""Records a receipt while a request runs alone in an `LLM`.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from dflash_moe.errors import UnsupportedError
from dflash_moe.forward.residuals import ResidualDigests, residuals_shown
from dflash_moe.operators.addresses import DTYPE_NAMES
from dflash_moe.operators.layers.reads import packed_linears
from dflash_moe.proofs.receipt import HostFacts, Receipt, ReceiptLayer, ReceiptShard, Residuals
from dflash_moe.topology.numerics import CLASSES
from dflash_moe.topology.spec import ShardTerms
from dflash_moe.version import __version__

if TYPE_CHECKING:
    from collections.abc import Iterable

    from dflash_moe.engine.llm import LLM
    from dflash_moe.engine.sampling.sampling_params import SamplingParams
    from dflash_moe.experts.expert_runtime import ExpertRuntime
    from dflash_moe.forward.host_model import HostModel
    from dflash_moe.topology.spec import ShardMap


@contextmanager
def digests_kept(llm: LLM, seed: int, positions: Iterable[int] | None = None) -> Iterator[ResidualDigests]:
    """Opens a block in which the digests of the one request that runs are kept: of `positions`, or
    of the receipt's. The engine has no request when the block is opened.
    """
    digests = ResidualDigests(seed, positions)
    with residuals_shown(llm.forward, digests):
        yield digests
        # A request that was cancelled may still be computed.
        llm.engine.settle()


def make_receipt(
    llm: LLM, model: str, prompt_ids: Sequence[int], params: SamplingParams, tokens: Sequence[int], digests: ResidualDigests
) -> Receipt:
    """Returns the receipt of a request that has ended. `model` is what the user called it, and
    `params` has the seed that was used. Errors are those of `ExpertRuntime.content_checksums`.
    """
    runtime = llm.runtime
    request_dtype, reply_dtype = runtime.wire_dtypes
    return Receipt(
        version=__version__,
        model=model,
        fingerprint=runtime.spec.fingerprint,
        dtype=runtime.spec.dtype,
        request_dtype=request_dtype,
        reply_dtype=reply_dtype,
        layers=_layers(runtime),
        host=host_facts(llm.host, runtime),
        prompt_ids=tuple(prompt_ids),
        sampling=params,
        tokens=tuple(tokens),
        residuals=_residuals(digests, len(prompt_ids) + len(tokens) - 1, llm.host.model.config),
    )


def deciding_fields(llm: LLM) -> dict[str, Any]:
    """Returns those fields of a receipt that decide the tokens of any request, as JSON has them:
    all but the contents of shards, for which mapped files would have to be read whole. The model's
    fingerprint has samples of them.
    """
    runtime = llm.runtime
    return {
        "version": __version__,
        "fingerprint": runtime.spec.fingerprint,
        "dtype": runtime.spec.dtype,
        "wire_dtypes": list(runtime.wire_dtypes),
        "layers": [[dataclasses.asdict(terms) for terms in shards] for shards in shard_map(runtime)],
        "host": dataclasses.asdict(host_facts(llm.host, runtime)),
    }


def shard_map(runtime: ExpertRuntime) -> ShardMap:
    """Returns the shards of a runtime without their holders."""

    def architecture(holder: str, numerics: str) -> str:
        return runtime.architecture_of(holder) if CLASSES[numerics].is_bounded else ""

    return tuple(
        tuple(
            ShardTerms(shard.experts, shard.weights, shard.numerics, architecture(shard.holder, shard.numerics))
            for shard in shards
        )
        for shards in runtime.placement.layers
    )


def host_facts(host: HostModel, runtime: ExpertRuntime) -> HostFacts:
    """Returns what decides the bits of the host's own part."""
    report = host.report
    operators = tuple(f"{found.module}: {found.operator}{f' ({found.form})' if found.form else ''}" for found in report.taken)
    formats: list[str] = []
    if operators:
        packed = packed_linears(host.model)
        # Those that were in the model are asked for by the model's dtype.
        formats = sorted({runtime.spec.dtype, *(kept for one in packed for kept in one.formats)})
    return HostFacts(
        device=runtime.host_device,
        numerics={kept: runtime.host_numerics_of(kept) for kept in formats},
        kv_dtype="" if host.packed is None else runtime.settings.kv_dtype or DTYPE_NAMES[host.packed.dtype],
        operators=operators,
        no_claim=report.not_paged or report.not_independent,
    )


def _layers(runtime: ExpertRuntime) -> tuple[ReceiptLayer, ...]:
    contents = runtime.content_checksums()
    found = []
    for layer, shards, checksums in zip(runtime.layers, shard_map(runtime), contents, strict=True):
        kept = [
            ReceiptShard(
                terms, layer.weight_dtype if terms.weights == "auto" else layer.resident_dtype(terms.weights), checksum
            )
            for terms, checksum in zip(shards, checksums, strict=True)
        ]
        found.append(ReceiptLayer(layer.index, tuple(kept)))
    return tuple(found)


def _residuals(digests: ResidualDigests, num_positions: int, config: object) -> Residuals:
    positions = digests.chosen(num_positions)
    found = tuple(digests.digests(position) for position in positions)
    if not found[0] or any(len(one) != len(found[0]) for one in found):
        raise UnsupportedError("--receipt: the model's layers were not all seen at every position; it cannot be recorded")
    return Residuals(
        num_layers=len(found[0]),
        hidden_size=int(config.get_text_config().hidden_size),  # type: ignore[attr-defined]
        positions=positions,
        digests=found,
        values=tuple(digests.values(position).tobytes() for position in positions),
    )
