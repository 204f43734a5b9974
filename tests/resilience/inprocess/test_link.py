"""The worker's side of the socket to its agent."""

from __future__ import annotations

import os
import select
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta

import pytest

from resilience.comm.messages import (
    LineReader,
    Message,
    Ready,
    StateSaved,
    StoreReply,
    StoreRequest,
    encode,
)
from resilience.comm.page import SLOT_BYTES, Page
from resilience.errors import BrokenError
from resilience.inprocess.link import AgentLink

LONG = StateSaved(generation=0, rank=0, name="x" * (4 << 20))


class Agent:
    """Reads nothing until a handler of the worker's has been called, and answers each call."""

    def __init__(self) -> None:
        self._socket, ours = socket.socketpair()
        file = os.memfd_create("page")
        os.truncate(file, SLOT_BYTES)
        self.link = AgentLink(ours.detach(), Page(file, 1), 0)
        self.heard: list[Message] = []
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        select.select([self._socket], [], [])
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)
        reader = LineReader()
        while not any(isinstance(each, Ready) for each in self.heard):
            for message in reader.feed(self._socket.recv(1 << 16)):
                self.heard.append(message)
                if isinstance(message, StoreRequest):
                    number, value = message.number, "NQ=="
                    reply = StoreReply(generation=0, number=number, worker=0, values=(value,))
                    self._socket.sendall(encode(reply))

    def join(self) -> list[Message]:
        """Return what was heard."""
        self.link.send(Ready(pid=1))
        self._thread.join()
        return self.heard


@pytest.fixture
def calls() -> Iterator[list[Callable[[], object]]]:
    """What the handler of the signal calls."""
    found: list[Callable[[], object]] = []
    old = signal.signal(signal.SIGUSR1, lambda *_: [each() for each in found])
    yield found
    signal.signal(signal.SIGUSR1, old)


_agents: list[Agent] = []
"""The end of an agent would end this process."""


@pytest.fixture
def agent(calls: list[Callable[[], object]]) -> Agent:
    _agents.append(Agent())
    return _agents[-1]


def test_a_handler_calls_the_store_while_its_thread_sends(
    agent: Agent, calls: list[Callable[[], object]]
) -> None:
    found: list[int] = []
    store = agent.link.open_store(0)
    store.set_timeout(timedelta(seconds=5))
    calls.append(lambda: found.append(store.add("n", 5)))

    agent.link.send(LONG)

    assert found == [5]
    assert agent.join()[0] == LONG


def test_a_message_leaves_whole_where_a_handler_raises(
    agent: Agent, calls: list[Callable[[], object]]
) -> None:
    def stop() -> None:
        raise TimeoutError

    calls.append(stop)

    with pytest.raises(TimeoutError):
        agent.link.send(LONG)

    assert agent.join() == [LONG, Ready(pid=1)]


def test_a_store_of_an_earlier_generation_is_over_and_takes_no_replies(agent: Agent) -> None:
    store = agent.link.open_store(0)

    with pytest.raises(BrokenError):
        agent.link.open_store(-1).get("a")
    assert agent.link.open_store(0) is store
    agent.join()
