"""Waits until a daemon answers: for those who start after it."""

from __future__ import annotations

import time
from pathlib import Path

from resilience.tiered.client import TieredClient
from resilience.tiered.errors import LostError, RefusedError
from resilience.tiered.memoryd.local import SOCKET_NAME

_PAUSE_FIRST_S = 0.02
_PAUSE_MAX_S = 0.5


def wait_for_daemon(folder: Path, *, timeout_s: float, token: str = "") -> None:
    """Return as soon as the daemon in a folder answers; LostError after `timeout_s` seconds.

    Without a token, a daemon that asks for one has answered with that. RefusedError where
    the token is wrong.
    """
    end_s = time.monotonic() + timeout_s
    pause_s = _PAUSE_FIRST_S
    while True:
        rest_s = end_s - time.monotonic()
        try:
            with TieredClient(folder / SOCKET_NAME, token=token) as client:
                client.status(timeout_s=max(rest_s, _PAUSE_FIRST_S))
        except RefusedError:
            if token:
                raise
        except LostError as error:
            rest_s = end_s - time.monotonic()
            if rest_s <= 0:
                raise LostError(
                    f"no daemon has answered in {folder} within {timeout_s:g} s; "
                    f"the last try said: {error}"
                ) from error
            # Nothing tells of a socket that somebody will listen on: the folder may not be
            # there yet, and the file of a killed daemon is there already. So it is asked
            # again, less and less often; a try costs some 0.1 ms.
            time.sleep(min(pause_s, rest_s))
            pause_s = min(_PAUSE_MAX_S, 1.5 * pause_s)
            continue
        return
