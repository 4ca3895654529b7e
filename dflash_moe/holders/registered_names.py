"""What becomes of a worker that registers under the name of a member: whether it may, whether the
name is taken, and what ends a former session of that name.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import logging

from dflash_moe.errors import ConfigError, WorkerError
from dflash_moe.holders.holder import Holder
from dflash_moe.holders.membership import State

log = logging.getLogger(__name__)

# A worker whose name another one wants shows within this time that it is there.
ASK_S = 1.0


def check_member(holder: Holder) -> None:
    """Ends a former session of this member that does not answer any more. Raises ConfigError where
    another one may never take its place, and WorkerError where that is so for now.
    """
    name, session = holder.name, holder.session
    if not holder.address.is_registered:
        raise ConfigError(f"worker {name}: address: the topology reaches it at {holder.address}; give another --name")
    if holder.life.state is State.QUARANTINED:
        raise WorkerError(
            f"worker {name} is quarantined: {holder.life.reason}; runtime.release({name!r}), or `dflash-moe workers "
            "release`, takes it again",
            worker=name,
        )
    if session is None or not session.is_connected:
        return
    if session.answers(within_s=ASK_S):
        text = f"worker {name}: name: another worker serves under it, and answers; give another --name"
        raise WorkerError(text, worker=name)
    log.info("worker %s: another one registers under its name, and it did not answer within %g s", name, ASK_S)
    session.hang_up()
