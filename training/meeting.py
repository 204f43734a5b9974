"""How workers that were just started find each other in a store that outlives them.

torchrun's agents keep one store over restarts, and each counts only the
restarts that its own workers caused: no variable names this start of all
workers. So they agree on a name here, and keep every key under it.

Waits poll: within one call of the store Python takes no signal, and a call that
times out writes warnings to the log.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from training.errors import GroupError, first_line

_PAUSE_S_MIN = 0.005
_PAUSE_S_MAX = 1.0


def agree_on_name(store: Store, *, rank: int, world_size: int, timeout: timedelta) -> str:
    """Return a name that the workers of this start have in common, and no others.

    A worker asks with a word drawn afresh and rank 0 answers under that word.
    What dead workers asked is answered as well, and nobody hears it: rank 0 goes
    on until every worker of its own start has taken its answer.
    """
    word = uuid.uuid4().hex
    if rank != 0:
        store.set(f"ask/{rank}", word)
        wait_for_key(store, f"answer/{word}", timeout)
        name = store.get(f"answer/{word}").decode()
        store.add(f"{name}/taken", 1)
        return name

    def has_answered_all() -> bool:
        for other in range(1, world_size):
            if store.check([f"ask/{other}"]):
                store.set(f"answer/{store.get(f'ask/{other}').decode()}", word)
        return store.add(f"{word}/taken", 0) == world_size - 1

    if not _poll(has_answered_all, timeout):
        num_met = store.add(f"{word}/taken", 0) + 1
        raise GroupError(f"{num_met} of {world_size} workers met within {timeout}")
    return word


def wait_for_key(
    store: Store, key: str, timeout: timedelta, check: Callable[[], None] | None = None
) -> None:
    """Return when the store has the key; raises GroupError after the timeout.

    `check` is called before each look, and raises where nobody will set the key any more.
    """

    def has_key() -> bool:
        if check is not None:
            check()
        return bool(store.check([key]))

    if not _poll(has_key, timeout):
        raise GroupError(f"no word of {key!r} from the other workers within {timeout}")


def _poll(is_done: Callable[[], bool], timeout: timedelta) -> bool:
    deadline_s, pause_s = time.monotonic() + timeout.total_seconds(), _PAUSE_S_MIN
    try:
        while not is_done():
            if time.monotonic() >= deadline_s:
                return False
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _PAUSE_S_MAX)
    except dist.DistError as error:
        raise GroupError(f"the store of the workers is gone: {first_line(error)}") from error
    return True
