"""An agent's side of what a daemon says of its store."""

from __future__ import annotations

import time

from resilience.tiered.frames import FrameSocket
from resilience.tiered.news import StoreNews, read_news
from tests.resilience.tiered.daemons import LIMIT_S, Daemon, ask


class Reader:
    """An agent's side: asks for what is newer than what it has."""

    def __init__(self, daemon: Daemon) -> None:
        self.connection: FrameSocket = daemon.connect()
        self.number = 0
        self.ask({"op": "hello"})

    def ask(self, request: dict[str, object]) -> dict[str, object]:
        return ask(self.connection, request)

    def news(self) -> StoreNews:
        """Wait for what is newer."""
        reply = self.ask({"op": "news", "number": self.number})
        assert isinstance(reply["number"], int)
        assert reply["number"] > self.number
        self.number = reply["number"]
        news = read_news(reply)
        assert news is not None
        return news

    def wait_for(self, **wanted: object) -> StoreNews:
        """Wait for news that say this."""
        end_s = time.monotonic() + LIMIT_S
        while time.monotonic() < end_s:
            news = self.news()
            if wanted.items() <= news.model_dump().items():
                return news
        raise AssertionError(f"no such news: {wanted}; the last: {news}")
