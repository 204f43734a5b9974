"""The stores at which the workers of each generation meet, hosted by the coordinator's agent."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from datetime import timedelta

from torch.distributed import DistError, TCPStore  # type: ignore[attr-defined]

from resilience.agent.connections.address import listen

_FIRST_TIMEOUT = timedelta(seconds=60)
_TIMEOUT = timedelta(seconds=5)
"""While a store is made the agent does nothing else."""
_RETRY_S = 10.0


class StoreError(RuntimeError):
    """The workers' store cannot be opened at all; the message says why."""


class GenerationStores:
    """A store for each generation, the next one made beforehand."""

    def __init__(self, host: str, warn: Callable[[str], None]) -> None:
        """Open the first store on an address of this node; raises StoreError."""
        self._host = host
        self._warn = warn
        self._kept: deque[TCPStore] = deque(maxlen=2)
        self._next: TCPStore | None = self._open(_FIRST_TIMEOUT)
        self._retry_s = 0.0

    def take(self, generation: int) -> str:
        """Return HOST:PORT of a generation's own store.

        Each has its own where one could be made, and its own prefix in any case; the two newest
        are kept.
        """
        if self._next is not None:
            self._kept.append(self._next)
            self._next = None
        return f"{self._host}:{self._kept[-1].port}"

    def prepare(self) -> None:
        """Make the next store; where that fails the last one serves the next generation too."""
        now_s = time.monotonic()
        if self._next is not None or now_s < self._retry_s:
            return
        try:
            self._next = self._open(_TIMEOUT)
        except StoreError as error:
            self._retry_s = now_s + _RETRY_S
            self._warn(str(error))

    def _open(self, timeout: timedelta) -> TCPStore:
        try:
            # Left to itself the store listens on all interfaces.
            listening = listen(self._host)
            return TCPStore(
                self._host,
                listening.getsockname()[1],
                is_master=True,
                wait_for_workers=False,
                timeout=timeout,
                master_listen_fd=listening.detach(),
            )
        except (DistError, OSError) as error:
            problem = str(error).strip().partition("\n")[0]
            raise StoreError(
                f"cannot open a store on {self._host!r}: {problem}; set --local-addr to an "
                "address of this node"
            ) from error
