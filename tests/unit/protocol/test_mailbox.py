"""Secondary connections reach the session that owns them and nobody else.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import os
import threading

import pytest

from dflash_moe.errors import ProtocolError, WorkerTimeout
from dflash_moe.protocol.framing import PeerGone
from dflash_moe.protocol.mailbox import MAX_WAITING, Mailbox
from dflash_moe.protocol.messages import Open, Role

SESSION, KEY = b"s" * 16, b"k" * 32


def opening(role: int, session_id: bytes = SESSION) -> Open:
    return Open(
        protocol_min=1, protocol_max=1, protocol_minor=0, role=role, session_id=session_id, generation=1, nonce=bytes(32)
    )


def descriptor() -> int:
    return os.open(os.devnull, os.O_RDONLY)


def is_open(number: int) -> bool:
    try:
        os.fstat(number)
    except OSError:
        return False
    return True


def test_only_data_and_pulse_of_this_session_get_its_key() -> None:
    mailbox = Mailbox(SESSION, KEY)
    assert mailbox.key_for(opening(Role.DATA)) == mailbox.key_for(opening(Role.PULSE)) == KEY
    with pytest.raises(ProtocolError, match="session_id"):
        mailbox.key_for(opening(Role.DATA, b"t" * 16))
    with pytest.raises(ProtocolError, match="role"):
        mailbox.key_for(opening(Role.CONTROL))


def test_a_connection_is_collected_once_by_role_and_generation() -> None:
    mailbox = Mailbox(SESSION, KEY)
    number = descriptor()
    threading.Timer(0.05, mailbox.deliver, (Role.DATA, 7, number)).start()
    assert mailbox.collect(Role.DATA, 7, seconds=5) == number
    with pytest.raises(WorkerTimeout, match="no data connection of generation 7"):
        mailbox.collect(Role.DATA, 7, seconds=0.01)
    os.close(number)


def test_another_generation_does_not_count() -> None:
    mailbox = Mailbox(SESSION, KEY)
    mailbox.deliver(Role.DATA, 6, descriptor())
    with pytest.raises(WorkerTimeout):
        mailbox.collect(Role.DATA, 7, seconds=0.01)
    mailbox.close()


def test_a_host_that_has_moved_on_is_not_waited_for() -> None:
    mailbox = Mailbox(SESSION, KEY)
    number = descriptor()
    mailbox.deliver(Role.DATA, 6, number)
    assert mailbox.collect(Role.DATA, 6, seconds=60, is_given_up=lambda: True) == number
    with pytest.raises(WorkerTimeout, match="no data connection of generation 7 arrived before the host asked for something"):
        mailbox.collect(Role.DATA, 7, seconds=60, is_given_up=lambda: True)
    os.close(number)


def test_the_end_of_a_session_ends_the_wait_for_its_connections() -> None:
    mailbox = Mailbox(SESSION, KEY)
    threading.Timer(0.05, mailbox.close).start()
    with pytest.raises(PeerGone, match="the session ended before the data connection of generation 7 arrived"):
        mailbox.collect(Role.DATA, 7, seconds=60)
    with pytest.raises(PeerGone):
        mailbox.collect(Role.DATA, 7, seconds=60)


def test_duplicates_floods_and_late_comers_are_closed() -> None:
    mailbox = Mailbox(SESSION, KEY)
    first, duplicate = descriptor(), descriptor()
    mailbox.deliver(Role.DATA, 0, first)
    mailbox.deliver(Role.DATA, 0, duplicate)
    assert is_open(first)
    assert not is_open(duplicate)
    numbers = [descriptor() for _ in range(2 * MAX_WAITING)]
    for generation, number in enumerate(numbers, 1):
        mailbox.deliver(Role.DATA, generation, number)
    assert sum(map(is_open, numbers)) == MAX_WAITING - 1
    mailbox.close()
    late = descriptor()
    mailbox.deliver(Role.DATA, 99, late)
    assert not any(map(is_open, [first, late, *numbers]))
