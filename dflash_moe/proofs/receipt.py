"""A receipt: what a run of `generate` computed with, its tokens, and digests of its residual
stream, so that anybody can prove the run again on other machines
(docs/howto/receipts_and_diff.md).

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import base64
import binascii
import dataclasses
import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_moe.engine.sampling.sampling_params import SamplingParams
from dflash_moe.errors import ConfigError, ProtocolError
from dflash_moe.proofs.receipt_fields import Fields
from dflash_moe.protocol.messages import compress_experts, expand_experts
from dflash_moe.topology.spec import ShardTerms

SCHEMA = 1
KIND = "dflash_moe receipt"
MAX_LAYERS = 4096
MAX_EXPERTS = 1 << 16
MAX_TOKENS = 1 << 24
MAX_POSITIONS = 16
MAX_TOKEN_ID = (1 << 31) - 1
MAX_MODULES = 1 << 18

_DIGEST = "[0-9a-f]{64}"
_WORD = r"[\w.+-]{0,64}"
# What a request is sampled by; the others end it, or only report.
_SAMPLING = (
    "max_tokens", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty",
    "logit_bias", "seed",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class ReceiptShard:
    """A shard, the format that its holder kept, and the content checksum of its experts."""

    terms: ShardTerms
    weight_dtype: str
    content: int


@dataclass(frozen=True, slots=True)
class ReceiptLayer:
    """A layer with routed experts by its index in the layer table, and its shards."""

    index: int
    shards: tuple[ReceiptShard, ...]


@dataclass(frozen=True, slots=True)
class HostFacts:
    """What decides the bits of the host's own part: `numerics` are the classes that its own
    matrices were asked for, by the format that is kept, `kv_dtype` is what pages store, and
    `operators` say who stands in for which module. `no_claim` says why bits are not promised, and
    is empty where they are.
    """

    device: str
    numerics: Mapping[str, str]
    kv_dtype: str
    operators: tuple[str, ...]
    no_claim: str


@dataclass(frozen=True, slots=True)
class Residuals:
    """Digests [num_positions][num_layers] in hexadecimal, of rows of `hidden_size` values in the
    model's dtype, and `values` [num_positions], base64 of float32 [num_layers, 9]: the standard
    deviation of the row, and eight of its values.
    """

    num_layers: int
    hidden_size: int
    positions: tuple[int, ...]
    digests: tuple[tuple[str, ...], ...]
    values: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Receipt:
    """A run. `model` is the path that it was given, and `tokens` are those that it generated."""

    version: str
    model: str
    fingerprint: str
    dtype: str
    request_dtype: str
    reply_dtype: str
    layers: tuple[ReceiptLayer, ...]
    host: HostFacts
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    tokens: tuple[int, ...]
    residuals: Residuals

    @property
    def shard_map(self) -> tuple[tuple[ShardTerms, ...], ...]:
        """The shards of all layers, for somebody to hold."""
        return tuple(tuple(shard.terms for shard in layer.shards) for layer in self.layers)

    def to_json(self) -> dict[str, Any]:
        """Returns the receipt as its file has it."""
        sampling = {name: getattr(self.sampling, name) for name in _SAMPLING}
        sampling["logit_bias"] = {str(token): bias for token, bias in self.sampling.logit_bias.items()}
        stream = self.residuals
        return {
            "kind": KIND,
            "schema": SCHEMA,
            "version": self.version,
            "model": self.model,
            "fingerprint": self.fingerprint,
            "dtype": self.dtype,
            "request_dtype": self.request_dtype,
            "reply_dtype": self.reply_dtype,
            "layers": [_layer_to_json(layer) for layer in self.layers],
            "host": dataclasses.asdict(self.host),
            "prompt_ids": list(self.prompt_ids),
            "sampling": sampling,
            "tokens": list(self.tokens),
            "residuals": {
                "num_layers": stream.num_layers,
                "hidden_size": stream.hidden_size,
                "positions": list(stream.positions),
                "sha256": [list(found) for found in stream.digests],
                "values": [base64.b64encode(found).decode() for found in stream.values],
            },
        }


def read_receipt(path: Path) -> Receipt:
    """Reads a receipt. Raises ConfigError naming file and field for anything that is none."""
    fields = Fields.load(path)
    if fields.text("kind") != KIND:
        raise fields.refuse("kind", repr(KIND))
    if fields.whole("schema", 0, MAX_TOKENS) != SCHEMA:
        raise fields.refuse("schema", f"{SCHEMA}, which this version of dflash_moe reads")
    prompt_ids = fields.numbers("prompt_ids", MAX_TOKEN_ID, MAX_TOKENS)
    tokens = fields.numbers("tokens", MAX_TOKEN_ID, MAX_TOKENS)
    if not prompt_ids or not tokens:
        raise fields.refuse("prompt_ids" if tokens else "tokens", "at least one token")
    sampling = _sampling(fields.part("sampling"))
    if sampling.max_tokens < len(tokens):
        raise fields.refuse("tokens", f"at most sampling.max_tokens, {sampling.max_tokens}")
    found = Receipt(
        version=fields.text("version", _WORD),
        model=fields.text("model"),
        fingerprint=fields.text("fingerprint", _DIGEST),
        dtype=fields.text("dtype", _WORD),
        request_dtype=fields.text("request_dtype", _WORD),
        reply_dtype=fields.text("reply_dtype", _WORD),
        layers=tuple(_layer(part) for part in fields.parts("layers", MAX_LAYERS)),
        host=_host(fields.part("host")),
        prompt_ids=prompt_ids,
        sampling=sampling,
        tokens=tokens,
        residuals=_residuals(fields.part("residuals"), len(prompt_ids) + len(tokens) - 1),
    )
    fields.end()
    return found


def _layer_to_json(layer: ReceiptLayer) -> dict[str, Any]:
    return {
        "index": layer.index,
        "shards": [
            {
                "expert_ranges": list(compress_experts(shard.terms.experts)),
                "weights": shard.terms.weights,
                "weight_dtype": shard.weight_dtype,
                "numerics": shard.terms.numerics,
                "architecture": shard.terms.architecture,
                "content_checksum": f"{shard.content:016x}",
            }
            for shard in layer.shards
        ],
    }


def _layer(fields: Fields) -> ReceiptLayer:
    found = ReceiptLayer(
        fields.whole("index", 0, MAX_LAYERS), tuple(_shard(part) for part in fields.parts("shards", MAX_EXPERTS))
    )
    fields.end()
    return found


def _shard(fields: Fields) -> ReceiptShard:
    ranges = fields.numbers("expert_ranges", MAX_EXPERTS, 2 * MAX_EXPERTS)
    try:
        experts = expand_experts(ranges)
    except ProtocolError:
        raise fields.refuse("expert_ranges", "pairs of a first expert and a count, ascending") from None
    terms = ShardTerms(
        experts, fields.text("weights", "auto|int8|int4"), fields.text("numerics", _WORD), fields.text("architecture", _WORD)
    )
    found = ReceiptShard(terms, fields.text("weight_dtype", _WORD), int(fields.text("content_checksum", "[0-9a-f]{16}"), 16))
    fields.end()
    return found


def _host(fields: Fields) -> HostFacts:
    found = HostFacts(
        device=fields.text("device", r"[\w:.]{1,64}"),
        numerics=_classes(fields.part("numerics")),
        kv_dtype=fields.text("kv_dtype", _WORD),
        operators=fields.texts("operators", MAX_MODULES),
        no_claim=fields.text("no_claim"),
    )
    fields.end()
    return found


def _classes(fields: Fields) -> dict[str, str]:
    return {name: fields.text(name, _WORD) for name in sorted(fields.all())}


def _sampling(fields: Fields) -> SamplingParams:
    values = fields.all()
    odd = values.keys() ^ set(_SAMPLING)
    if odd:
        raise fields.refuse(min(odd), "a field of the sampling, each once")
    bias = values["logit_bias"]
    if not isinstance(bias, Mapping) or not all(len(key) < 11 and key.isascii() and key.isdigit() for key in bias):
        raise fields.refuse("logit_bias", "a map from token ids to numbers")
    values["logit_bias"] = {int(key): value for key, value in bias.items()}
    if values["seed"] is None:
        raise fields.refuse("seed", "a whole number")
    try:
        return SamplingParams(**values, ignore_eos=True)
    except ConfigError as error:
        raise ConfigError(f"{fields.where}: {error}") from None


def _residuals(fields: Fields, num_positions: int) -> Residuals:
    num_layers = fields.whole("num_layers", 1, MAX_LAYERS)
    positions = fields.numbers("positions", num_positions - 1, MAX_POSITIONS)
    if not positions or any(one >= other for one, other in itertools.pairwise(positions)):
        raise fields.refuse("positions", "ascending positions of prompt and tokens")
    digests = fields.lists("sha256", len(positions), num_layers, _DIGEST)
    texts = fields.texts("values", len(positions), r"[A-Za-z0-9+/=]{0,262144}")
    try:
        values = tuple(base64.b64decode(text, validate=True) for text in texts)
    except binascii.Error:
        raise fields.refuse("values", "texts in base64") from None
    if [len(one) for one in values] != [num_layers * 36] * len(positions):
        raise fields.refuse("values", f"base64 of {num_layers * 36} bytes for each position")
    found = Residuals(num_layers, fields.whole("hidden_size", 1, 1 << 24), positions, digests, values)
    fields.end()
    return found
