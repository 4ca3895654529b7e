"""The sampler of a step: it chooses a token for each row of logits, where the logits are. Only ids
leave the device, and log-probabilities for rows that ask for them.

`Sampler.launch` queues the work and `Sampled.token_ids` reads the result, so that an engine on a
card can plan its next step between the two. Sampling changes no state (sampling_state.py).
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from dflash_moe.engine.sampling import logprobs, token_masks
from dflash_moe.engine.sampling.draw import (
    MAX_VOCAB_SIZE,
    NOT_FINITE,
    NOTHING_ALLOWED,
    draw,
    draw_tokens,
    greedy_ids,
)
from dflash_moe.engine.sampling.sampling_state import SamplingState
from dflash_moe.engine.sampling.token_logprobs import TokenLogprobs
from dflash_moe.errors import ConfigError, DflashError, EngineError
from dflash_moe.forward.forward import NOT_FINITE_TEXT

# It stands in the place of a token id where the row was refused before anything was computed.
_REFUSED = -3


@dataclass(frozen=True, slots=True)
class SampleRow:
    """One row of a step's logits, for the token at `position`, the number of tokens before it,
    prompt and drafts included.

    `tokens_before` are the drafts that this step assumes to be accepted before the row. `mask` are
    the bits of bool [vocab_size] (`token_masks.packed`), False for tokens that must not come; None
    allows all.
    """

    state: SamplingState
    position: int
    tokens_before: Sequence[int] = ()
    mask: bytes | None = None

    @property
    def is_plain(self) -> bool:
        """Says whether a token is chosen from the model's logits as they are."""
        return self.mask is None and not self.state.has_bias and not self.state.has_penalties


class Sampler:
    """Samples the rows of steps. `read_back_bytes` counts what came from the device so far."""

    def __init__(self) -> None:
        self.read_back_bytes = 0
        self._masked = token_masks.MaskedRows()

    def launch(self, logits: torch.Tensor, rows: Sequence[SampleRow]) -> Sampled:
        """Chooses a token for each row of `logits`, float32 [num_rows, vocab_size] on any device,
        which are not changed. On a card it only queues work.

        What is wrong with one row is in `Sampled.errors`, and the others are not affected. Errors:
        EngineError where `logits` and `rows` do not fit each other.
        """
        if logits.dtype != torch.float32 or logits.ndim != 2 or len(logits) != len(rows):
            raise EngineError(
                f"the sampler was given {logits.dtype} {list(logits.shape)} for {len(rows)} rows; it takes float32 logits "
                f"[{len(rows)}, vocab_size]"
            )
        if not 1 <= logits.shape[1] <= MAX_VOCAB_SIZE:
            raise EngineError(f"the sampler was given a vocabulary of {logits.shape[1]}; it takes 1..{MAX_VOCAB_SIZE}")
        if logits.requires_grad:
            logits = logits.detach()
        refused: dict[int, DflashError] = {}
        ids = _sample_rows(logits, rows, refused, self._masked)
        asked = {place: wanted for place, row in enumerate(rows) if (wanted := row.state.params.logprobs) is not None}
        parts = [logprobs.pack(logits[place], ids[place], wanted) for place, wanted in asked.items()]
        packed = torch.cat((ids.double(), *parts)) if parts else ids
        sizes = {place: logprobs.packed_size(wanted, logits.shape[1]) for place, wanted in asked.items()}
        return Sampled(self, packed, len(rows), sizes, refused)


class Chosen:
    """The outcome of a step whose tokens were chosen where its logits were computed."""

    def __init__(self, token_ids: list[int]) -> None:
        """`token_ids` are NOT_FINITE for rows without a token."""
        self._token_ids = token_ids
        self.errors = {place: _error_of(token_id) for place, token_id in enumerate(token_ids) if token_id < 0}
        self.logprobs: Mapping[int, TokenLogprobs] = {}

    def token_ids(self) -> list[int]:
        """As `Sampled.token_ids`."""
        return self._token_ids


class Sampled:
    """The outcome of one step's sampling. It stays on the device until somebody asks for it."""

    def __init__(
        self,
        sampler: Sampler,
        packed: torch.Tensor,
        num_rows: int,
        sizes: Mapping[int, int],
        refused: Mapping[int, DflashError],
    ) -> None:
        self._sampler, self._packed, self._num_rows, self._sizes = sampler, packed, num_rows, sizes
        self._token_ids: list[int] | None = None
        self._errors = dict(refused)
        self._logprobs: dict[int, TokenLogprobs] = {}

    def token_ids(self) -> list[int]:
        """Returns the id of each row's token, a negative number for a row of `errors`. The first
        call waits for the device and reads everything back in one transfer.
        """
        if self._token_ids is None:
            self._token_ids = self._read()
        return self._token_ids

    @property
    def errors(self) -> Mapping[int, DflashError]:
        """What was wrong, by row; such a row has no token. It is read back with the ids."""
        self.token_ids()
        return self._errors

    @property
    def logprobs(self) -> Mapping[int, TokenLogprobs]:
        """The log-probabilities of rows that asked for them and have a token. They are read back
        with the ids.
        """
        self.token_ids()
        return self._logprobs

    def _read(self) -> list[int]:
        values = self._packed.tolist()
        self._sampler.read_back_bytes += self._packed.nbytes
        token_ids = [int(value) for value in values[: self._num_rows]]
        for place, token_id in enumerate(token_ids):
            if token_id < 0:
                self._errors.setdefault(place, _error_of(token_id))
        at = self._num_rows
        for place, size in self._sizes.items():
            if place not in self._errors:
                self._logprobs[place] = logprobs.unpack(token_ids[place], values[at : at + size])
            at += size
        return token_ids


def _sample_rows(
    logits: torch.Tensor, rows: Sequence[SampleRow], refused: dict[int, DflashError], masked: token_masks.MaskedRows
) -> torch.Tensor:
    """Returns int64 [num_rows] on the logits' device, and puts errors of rows into `refused`."""
    # Rows that are sampled together, because nothing changes their logits before.
    greedy = [place for place, row in enumerate(rows) if row.state.is_greedy and row.mask is None]
    if len(greedy) == len(rows):
        return greedy_ids(logits)
    ids: dict[int, torch.Tensor] = {}
    if greedy:
        ids |= zip(greedy, greedy_ids(logits[greedy]), strict=True)
    drawn = [place for place, row in enumerate(rows) if row.is_plain and not row.state.is_greedy]
    if drawn and logits.is_cpu:
        draws = [(place, rows[place].state.params, rows[place].state.uniform(rows[place].position)) for place in drawn]
        ids |= zip(drawn, torch.tensor(draw_tokens(logits, draws)), strict=True)
    if logits.is_cpu and (only_masked := {place: row for place, row in enumerate(rows) if _is_only_masked(row, logits)}):
        ids |= zip(only_masked, torch.tensor(_sample_masked(logits, only_masked, masked)), strict=True)
    for place, row in enumerate(rows):
        if place not in ids:
            try:
                ids[place] = _sample_row(logits[place], row)
            except DflashError as error:
                refused[place] = error
                ids[place] = torch.full((), _REFUSED, device=logits.device)
    return torch.stack([ids[place] for place in range(len(rows))])


def _is_only_masked(row: SampleRow, logits: torch.Tensor) -> bool:
    is_changed = row.state.has_bias or row.state.has_penalties
    return row.mask is not None and not is_changed and len(row.mask) == -(-logits.shape[1] // 8)


def _sample_masked(logits: torch.Tensor, rows: Mapping[int, SampleRow], masked: token_masks.MaskedRows) -> list[int]:
    """Returns the ids of rows in the processor's memory which have masks and nothing else."""
    given = logits.numpy()
    values = masked.of(given, {place: row.mask for place, row in rows.items() if row.mask is not None})
    drawn = [
        (place, row.state.params, row.state.uniform(row.position))
        for place, row in enumerate(rows.values())
        if row.state.params.temperature > 0.0
    ]
    chosen = dict(zip((draw[0] for draw in drawn), draw_tokens(torch.from_numpy(values), drawn), strict=True)) if drawn else {}
    found = []
    for place, row in enumerate(rows):
        token_id = chosen[place] if place in chosen else int(values[place].argmax())
        is_none = token_id < 0 or values[place, token_id] == -math.inf
        found.append(NOT_FINITE if not math.isfinite(given[row].max()) else NOTHING_ALLOWED if is_none else token_id)
    return found


def _sample_row(logits: torch.Tensor, row: SampleRow) -> torch.Tensor:
    """Returns the id of one row, int64 []. `logits` are float32 [vocab_size]."""
    state = row.state
    values = logits.double()  # a copy, where neither a bias nor a penalty overflows
    is_finite = values.max().isfinite()
    if state.has_penalties:
        _penalise(values, row)
    if state.has_bias:
        _check_ids("logit_bias", state.bias[0].max(), values)
        token_ids, biases = (torch.from_numpy(array).to(values.device) for array in state.bias)
        values.index_add_(0, token_ids, biases)
    if row.mask is not None:
        values.masked_fill_(~token_masks.unpacked(row.mask, len(values)).to(values.device), -torch.inf)
    if state.params.temperature == 0.0:
        token_id = greedy_ids(values[None])[0]
        token_id = torch.where(token_id < 0, NOTHING_ALLOWED, token_id)
    else:
        token_id = draw(values, state.params, state.uniform(row.position))
    return torch.where(is_finite, token_id, NOT_FINITE)


def _penalise(values: torch.Tensor, row: SampleRow) -> None:
    params = row.state.params
    seen, counts = row.state.counts(row.tokens_before)
    if not len(seen):
        return
    _check_ids("the prompt or an output", seen.max(), values)
    token_ids = torch.from_numpy(seen).to(values.device)
    num_times = torch.from_numpy(counts).to(values.device)
    former = values[token_ids]
    repeated = torch.where(former > 0, former / params.repetition_penalty, former * params.repetition_penalty)
    penalties = num_times * params.frequency_penalty + (num_times > 0) * params.presence_penalty
    values[token_ids] = repeated - penalties


def _check_ids(what: str, highest: int, values: torch.Tensor) -> None:
    # An index out of range would end every later kernel of a card's process.
    if highest >= len(values):
        raise ConfigError(f"{what} has the token id {highest}; allowed: 0..{len(values) - 1}")


def _error_of(code: int) -> DflashError:
    if code == NOTHING_ALLOWED:
        return ConfigError("the token mask allows no token that the model can give; allow at least one, such as the last token")
    return DflashError(NOT_FINITE_TEXT)
