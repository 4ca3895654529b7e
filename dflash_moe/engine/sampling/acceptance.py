"""How likely a drafted token is accepted, estimated for each request and for the engine, and when a
request whose drafts do not pay may try again.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from collections.abc import Hashable

# A request's estimate forgets a tenth with each judged token, so that it rests on the last 10; a
# text that begins or ceases to repeat itself is noticed within two or three steps with drafts. The
# engine's rests on the last 100.
_REQUEST_MEMORY = 0.9
_ENGINE_MEMORY = 0.99
# A new request is estimated by the engine's estimate of all requests, which weighs as much as
# _PRIOR_WEIGHT judged tokens of its own. Before the engine has judged any it assumes that every
# fourth draft is accepted, with the same weight. That is low on purpose: the first prices of drafts
# are then measured by probes, and not paid by steps that hoped for more.
_PRIOR_WEIGHT = 2.0
_FIRST_ESTIMATE = 0.25
# A probe drafts at most so many tokens: enough for a clear answer, and for the price of a step with
# drafts, which is learnt by the way.
PROBE_DRAFTS = 4
# After a probe in vain a request waits for so many of its tokens, then twice as many, up to the
# last. A text that begins to repeat itself is found within 512 tokens where the credit allows.
FIRST_WAIT = 16
LAST_WAIT = 512
# All probes of the engine together draft at most PROBE_CREDIT tokens and PROBE_SHARE of all tokens
# that it made. A further row costs at most what the rows of a step cost on average, so that
# probing takes at most 1 % of the time beyond the first 32 tokens.
PROBE_SHARE = 0.01
PROBE_CREDIT = 32.0


class _Decayed:
    """Accepted and judged drafts, the latest of which count most."""

    __slots__ = ("accepted", "judged")

    def __init__(self) -> None:
        self.accepted = self.judged = 0.0

    def add(self, num_accepted: int, num_judged: int, memory: float) -> None:
        for place in range(num_judged):
            self.accepted = self.accepted * memory + (place < num_accepted)
            self.judged = self.judged * memory + 1.0

    def estimate(self, prior: float) -> float:
        return (self.accepted + _PRIOR_WEIGHT * prior) / (self.judged + _PRIOR_WEIGHT)


class _Request:
    """What is known of one request. Waits are counted in the tokens that it made."""

    __slots__ = ("drafts", "is_on", "num_tokens", "probe_at", "wait")

    def __init__(self) -> None:
        self.drafts = _Decayed()
        self.num_tokens = 0
        self.probe_at = 0
        self.wait = FIRST_WAIT
        self.is_on = False


class Acceptance:
    """Estimates for each request and for the engine. A pure function of what it observed: nothing
    is random, and asking changes nothing. Owned by the engine thread.
    """

    def __init__(self) -> None:
        self._engine = _Decayed()
        self._requests: dict[Hashable, _Request] = {}
        self._credit = PROBE_CREDIT
        # How often a request that had drafts got no more, since they were not expected to pay.
        self.switched_off = 0

    def probability(self, key: Hashable | None = None) -> float:
        """Returns how likely the request's next draft is accepted, given that those before it are;
        for a request that is not known, or none, the engine's estimate.
        """
        engine = self._engine.estimate(_FIRST_ESTIMATE)
        request = self._requests.get(key)
        return engine if request is None else request.drafts.estimate(engine)

    def observe(self, key: Hashable, num_drafts: int, num_accepted: int, *, is_probe: bool = False) -> None:
        """Takes note of one request's part of a step: the first `num_accepted` of `num_drafts`
        drafts were accepted, and one more token came from the row behind them.
        """
        request = self._requests.setdefault(key, _Request())
        request.num_tokens += num_accepted + 1
        self._credit = min(PROBE_CREDIT, self._credit + PROBE_SHARE * (num_accepted + 1))
        if not num_drafts:
            return
        # Behind the first rejected draft nothing was judged.
        num_judged = min(num_accepted + 1, num_drafts)
        request.drafts.add(num_accepted, num_judged, _REQUEST_MEMORY)
        self._engine.add(num_accepted, num_judged, _ENGINE_MEMORY)
        if not is_probe:
            request.is_on = True
            request.wait = FIRST_WAIT
            request.probe_at = request.num_tokens + FIRST_WAIT
            return
        self._credit -= num_drafts
        if 2 * num_accepted >= num_drafts:
            request.wait = FIRST_WAIT
            request.probe_at = 0
        else:
            request.probe_at = request.num_tokens + request.wait
            request.wait = min(2 * request.wait, LAST_WAIT)

    def decline(self, key: Hashable) -> None:
        """Takes note that the request got no drafts in a step because they were not expected to
        pay.
        """
        request = self._requests.get(key)
        if request is not None and request.is_on:
            request.is_on = False
            self.switched_off += 1

    def overdue(self, key: Hashable) -> int:
        """Returns for how many tokens the request could have probed, below 0 where it has to wait.
        All its tokens count while it never probed, and behind a probe that succeeded.
        """
        request = self._requests.get(key)
        return 0 if request is None else request.num_tokens - request.probe_at

    @property
    def probe_credit(self) -> int:
        """How many tokens probes may draft now, all together."""
        return int(self._credit)

    def drop(self, key: Hashable) -> None:
        """Forgets a request that has ended; one that is not known is no error."""
        self._requests.pop(key, None)
