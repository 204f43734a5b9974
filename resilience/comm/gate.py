"""The gate: the all-reduce over all ranks after which a rank may write its update.

Rules, each of which a test switches off to see something break:

- The gate is entered only when all that changes gradients has ended without error, as
  seen by the host.
- It counts: every rank adds (1, step, step squared) to a cleared buffer. The gate is passed
  only where these are world size times what this rank gave. The squares tell ranks whose
  steps differ and only add up. The place in the program is compared in the same way.
- The sum is read while the lock that aborts take is held and the generation is current.
  An aborted collective on an accelerator ends like any other, over garbage.

A gate that was passed stays passed whatever is aborted afterwards. One that was not may
have been passed by others: reports tell.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor

from resilience.errors import BrokenError, PlacesDifferError


class GateChannel(Protocol):
    """A communicator of one generation that the gate has for itself.

    On an accelerator it is the first one to be aborted: a gate that was queued behind an
    aborted reduction would run on and let ranks pass.
    """

    def reduce(self, buffer: Tensor) -> None:
        """Replace a buffer in host memory by its sum over all ranks; blocks until it is there.

        Called by the training thread alone. Raises RuntimeError where the sum cannot come,
        TimeoutError where it has not come in time. After an abort the call may also return, with
        anything in the buffer.
        """


class Gate:
    """Lets an update begin once every rank's gradients are complete."""

    def __init__(self, channel: GateChannel, *, world_size: int) -> None:
        self._channel = channel
        self._world_size = world_size

    def enter(
        self,
        step: int,
        *,
        lock: AbstractContextManager[Any],
        is_current: Callable[[], bool],
        place: str = "",
    ) -> None:
        """Return once all ranks have entered for this step.

        `lock` is what every abort of this generation holds from before `is_current` turns
        false until the channel is aborted. Raises BrokenError where the gate was not passed,
        or not for certain: the rank has then entered, and may not update. Raises PlacesDifferError
        on all ranks where their places in the program, `place`, differ.
        """
        if not is_current():
            raise BrokenError(f"the generation had ended before the gate of step {step}")
        # Of 24 bits, so that the sum of the squares of many thousand ranks has 63.
        number = zlib.crc32(place.encode()) & 0xFFFFFF
        mine = (1, step, step**2, number, number**2)
        buffer = torch.tensor(mine, dtype=torch.int64)
        try:
            self._channel.reduce(buffer)
        except (RuntimeError, TimeoutError) as error:
            raise BrokenError(f"the gate of step {step} broke: {error}") from error
        with lock:
            if not is_current():
                raise BrokenError(f"the generation ended in the gate of step {step}")
            total = tuple(buffer.tolist())
        wanted = tuple(self._world_size * each for each in mine)
        if total[:3] != wanted[:3]:
            raise BrokenError(
                f"the gate of step {step} counts {total[0]} ranks with a sum of steps of "
                f"{total[1]}, not {self._world_size} with {self._world_size * step}"
            )
        if total != wanted:
            raise PlacesDifferError(f"this rank is at {place}, and another rank is not")


class GroupChannel:
    """The gate over a process group whose `wait` blocks the host, such as gloo's.

    gloo cannot abort. Breaking the process's connections, which ends all its collectives,
    ends this one too.
    """

    def __init__(self, group: Any) -> None:
        self._group = group

    def reduce(self, buffer: Tensor) -> None:
        """Sum over the group, which waits until it is done or its time-out."""
        self._group.allreduce([buffer]).wait()
