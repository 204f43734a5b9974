"""Waits for gloo's collectives that end when their generation does.

gloo fails an operation whose connection goes down, with one exception: a send that its peer has not
asked for yet is only queued, and not told that the connection is gone (seen on torch 2.13 in an
all-gather of two ranks, where a rank waits for its send first). Such a send would wait for the
time-out of the group. So the training thread waits in slices, and looks between them whether its
generation still goes on. A slice that ends harms no collective: the work goes on.

Some works take no slices. In a send or receive between two ranks a slice that ends would close
their connection, and torch has no other way to give one up. They mostly end with their connection,
but not always (seen on torch 2.13 about once in fifty breaks between the stages of a pipeline, in a
send and in a receive). The work of a reduce-scatter heeds no limit, and never says that it is
completed: its error would pass for the end of a slice. So a thread of its own waits for each of
them, and the training thread for that one, in slices again. A broken generation leaves such a
thread behind; it ends with the work that it waits for, by the group's time-out at the latest.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from datetime import timedelta

from torch.distributed import Work

from resilience.errors import BrokenError

SLICE = timedelta(milliseconds=100)
"""How long a wait may outlive its generation; all but the rare ones end at once."""

_WITHOUT_SLICES = frozenset({12, 13, 14, 100})
"""Of c10d's OpType: SEND, RECV, RECVANYSOURCE; UNKNOWN, which gloo's reduce-scatters are."""
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


class _Waiter:
    """A thread that waits for one work after the other, each to its end."""

    def __init__(self) -> None:
        self._asked: queue.SimpleQueue[Work | None] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="wait-for-peer", daemon=True).start()

    def wait(self, work: Work, is_broken: Callable[[], bool]) -> BaseException | None:
        """Return the work's own error, or None, when it is done.

        Raises BrokenError once the generation is broken. Who leaves with an error asks no more:
        the answer that comes later would be taken for that of another work.
        """
        self._asked.put(work)
        while True:
            try:
                return self._answers.get(timeout=SLICE.total_seconds())
            except queue.Empty:
                if is_broken():
                    raise BrokenError(
                        "the generation ended while this rank waited for a peer"
                    ) from None

    def leave(self) -> None:
        """Have the thread end with what it waits for now."""
        self._asked.put(None)

    def _run(self) -> None:
        while (work := self._asked.get()) is not None:
            problem = None
            try:
                _torch_wait(work)
            except BaseException as error:  # noqa: BLE001 - raised where the work is waited for
                problem = error
            self._answers.put(problem)
            # What is waited for next may be long in coming, and holds nothing of this.
            del work, problem


_waiter: _Waiter | None = None


def wait_in_thread(work: Work, is_broken: Callable[[], bool]) -> bool:
    """Wait for a work that takes no slices; raises BrokenError once the generation is broken.

    Raises torch's RuntimeError where the work itself failed.
    """
    global _waiter  # noqa: PLW0603 - there is one training thread
    waiter, _waiter = _waiter or _Waiter(), None
    try:
        problem = waiter.wait(work, is_broken)
    except BaseException:
        waiter.leave()
        raise
    _waiter = waiter
    if problem is not None:
        raise problem
    return True


def slice_waits(is_broken: Callable[[], bool] | None) -> None:
    """Have every wait without a limit of its own end with the generation; None undoes it.

    For groups of gloo alone: on a GPU a wait with a limit blocks the host.
    """
    global _is_broken  # noqa: PLW0603 - there is one training thread, and one world at a time
    _is_broken = is_broken
    # torch's own code waits through the class, so this reaches FSDP2 and a user's calls alike.
    setattr(Work, "wait", _torch_wait if is_broken is None else _wait)  # noqa: B010


def _wait(work: Work, timeout: timedelta = _NO_LIMIT) -> bool:
    if timeout != _NO_LIMIT or _is_broken is None:
        return _torch_wait(work, timeout)
    takes_slices = work._get_op_type() not in _WITHOUT_SLICES  # type: ignore[attr-defined]  # noqa: SLF001
    return (wait_in_slices if takes_slices else wait_in_thread)(work, _is_broken)
