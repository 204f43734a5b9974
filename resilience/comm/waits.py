"""Waits for gloo's collectives that end when their generation does.

gloo fails an operation whose connection goes down, with one exception: a send that its peer has not
asked for yet is only queued, and not told that the connection is gone (seen on torch 2.13 in an
all-gather of two ranks, where a rank waits for its send first). Such a send would wait for the
time-out of the group. So the training thread waits in slices, and looks between them whether its
generation still goes on. A slice that ends harms no collective: the work goes on. In a send or
receive between two ranks it would close their connection, so those are waited for whole; they end
with their connection.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

from torch.distributed import Work

from resilience.errors import BrokenError

SLICE = timedelta(milliseconds=100)
"""How long a wait may outlive its generation; all but the rare ones end at once."""

_WHOLE = frozenset({12, 13, 14})  # c10d's OpType: SEND, RECV, RECVANYSOURCE
_NO_LIMIT = timedelta(0)
_torch_wait: Callable[..., bool] = Work.wait
_is_broken: Callable[[], bool] | None = None


def wait_in_slices(work: Work, is_broken: Callable[[], bool]) -> bool:
    """Wait until the work is done; raises BrokenError once the generation is broken.

    Raises torch's RuntimeError where the work itself failed.
    """
    while True:
        try:
            return _torch_wait(work, SLICE)
        except RuntimeError:
            if work.is_completed():
                # It failed, or came to its end since the slice did: the work says which.
                return _torch_wait(work)
        if is_broken():
            raise BrokenError("the generation ended while this rank waited in a collective")


def slice_waits(is_broken: Callable[[], bool] | None) -> None:
    """Have every wait without a limit of its own end with the generation; None undoes it.

    For groups of gloo alone: on a GPU a wait with a limit blocks the host.
    """
    global _is_broken  # noqa: PLW0603 - there is one training thread, and one world at a time
    _is_broken = is_broken
    # torch's own code waits through the class, so this reaches FSDP2 and a user's calls alike.
    setattr(Work, "wait", _torch_wait if is_broken is None else _wait)  # noqa: B010


def _wait(work: Work, timeout: timedelta = _NO_LIMIT) -> bool:
    is_whole = work._get_op_type() in _WHOLE  # type: ignore[attr-defined]  # noqa: SLF001
    if timeout != _NO_LIMIT or _is_broken is None or is_whole:
        return _torch_wait(work, timeout)
    return wait_in_slices(work, _is_broken)
