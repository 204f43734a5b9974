"""Questions that may take any time: a thread asks them, and the answers wake the agent."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Generic, TypeVar

from resilience.runtime.wake import Wake

T = TypeVar("T")


class Questions(Generic[T]):
    """Asks one after the other, from the first one on. Its methods never wait but for `close`."""

    def __init__(self, name: str) -> None:
        self._asked: SimpleQueue[Callable[[], T | None] | None] = SimpleQueue()
        self._answers: SimpleQueue[T] = SimpleQueue()
        self._wake = Wake()
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)

    def fileno(self) -> int:
        """Return a descriptor that is readable while `answers` may have something."""
        return self._wake.fileno()

    def ask(self, question: Callable[[], T | None]) -> None:
        """Have a question asked, which raises nothing; None is no answer."""
        self._asked.put(question)
        if self._thread.ident is None:
            self._thread.start()

    def answers(self) -> list[T]:
        """Return what was found out since the last call."""
        self._wake.clear()
        return [self._answers.get() for _ in range(self._answers.qsize())]

    def close(self, within_s: float) -> None:
        """Ask what is left, for so many seconds."""
        self._asked.put(None)
        if self._thread.ident is not None:
            self._thread.join(within_s)

    def _work(self) -> None:
        while (question := self._asked.get()) is not None:
            if (answer := question()) is not None:
                self._answers.put(answer)
            self._wake.set()
