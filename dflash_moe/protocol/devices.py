"""The device that a worker computes on. It is opened before the worker says hello, so that a reason
against it reaches the host.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from dflash_moe import _core
from dflash_moe.errors import DflashError

if TYPE_CHECKING:
    from dflash_moe.topology import HostSpec, WorkerSpec

PROCESSOR = "cpu"
# With these backends the machine's processor computes and its memory holds the weights, not a card.
COMPUTED_BY_PROCESSOR = (PROCESSOR, "sim")


@dataclass(frozen=True, slots=True)
class DeviceChoice:
    """What the topology says of the device of a worker or of the host: the backend, the number of
    the device there, and for backend sim the vendor whose card is simulated.
    """

    backend: str = PROCESSOR
    device: int = 0
    simulate: str = ""

    @staticmethod
    def of(spec: WorkerSpec | None) -> DeviceChoice:
        """Returns the choice for a worker; without a worker it is the processor."""
        return DeviceChoice() if spec is None else DeviceChoice(spec.backend, spec.device or 0, spec.simulate or "")

    @staticmethod
    def of_host(host: HostSpec) -> DeviceChoice:
        """Returns the device on which attention and router run, and with them the experts kept at
        the host.
        """
        backend, _, number = host.device.partition(":")
        return DeviceChoice(backend, int(number), host.simulate or "") if number else DeviceChoice()

    @property
    def is_processor(self) -> bool:
        """True where tensors are the processor's, so that no device is opened."""
        return self.backend == PROCESSOR

    @property
    def has_own_memory(self) -> bool:
        """True of a real card, whose weights take nothing of the machine's memory."""
        return self.backend not in COMPUTED_BY_PROCESSOR

    @property
    def name(self) -> str:
        """The device as the topology writes it: cpu, cuda:N, hip:N or sim:N."""
        return self.backend if self.is_processor else f"{self.backend}:{self.device}"


def open_device(choice: DeviceChoice, *, threads: int, name: str) -> _core.BackendDevice | None:
    """Opens the device of the worker called `name`; returns None where the processor computes. The
    caller owns it. `threads` are those of a simulated device.

    Errors name worker and device: ConfigError for one that does not exist, UnsupportedError for one
    that cannot be used.
    """
    if choice.backend == PROCESSOR:
        return None
    try:
        return _core.BackendDevice(
            backend=choice.backend, device=choice.device, simulate=choice.simulate, num_threads=max(1, threads)
        )
    except DflashError as error:
        raise error.reworded(f"worker {name}: {error}", worker=name) from None
