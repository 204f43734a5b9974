"""The worker's side of the socket to its agent, and the one thread that reads it.

The thread blocks until the agent says something or it is time for a heartbeat. It hands openings
and the end to the training thread, and breaks the current generation itself, because the training
thread may be blocked in a collective. When the agent is gone the thread ends the process, which
nobody would own.
"""

from __future__ import annotations

import os
import queue
import select
import socket
import sys
import threading
import traceback
from collections.abc import Callable
from typing import Protocol

from resilience.comm.messages import Break, End, LineReader, Message, Open, encode
from resilience.comm.page import Page

HEARTBEAT_S = 0.25
AGENT_LOST_STATUS = 70
"""Exit status of a worker whose agent is gone."""
LINK_LOST_STATUS = 73
"""Exit status of a worker that cannot hear its agent any more; the agent replaces it."""

OnBreak = Callable[[Break], None]


class Coordinator(Protocol):
    """What numbers the generations, as the block sees it.

    All methods are called from the training thread; only what `on_break` was
    given is called from another one.
    """

    def send(self, message: Message) -> None:
        """Send a message; does not wait for an answer."""

    def wait(self) -> Open | Break | End:
        """Block until a generation opens, the finished one is broken, or the run ends."""

    def on_break(self, callback: OnBreak | None) -> None:
        """Have breaks told to `callback` from now on, also those that came before."""


class AgentLink:
    """A Coordinator that is reached through the agent."""

    def __init__(self, file: int, page: Page, slot: int) -> None:
        self._socket = socket.socket(fileno=file)
        self._page = page
        self._slot = slot
        self._messages: queue.SimpleQueue[Open | Break | End] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._send_lock = threading.Lock()
        self._callback: OnBreak | None = None
        self._last_break: Break | None = None
        self._thread = threading.Thread(target=self._serve, name="agent-link", daemon=True)
        self._thread.start()

    def send(self, message: Message) -> None:
        """Send a message to the agent; ends the process where the agent is gone."""
        try:
            with self._send_lock:
                self._socket.sendall(encode(message))
        except OSError:
            os._exit(AGENT_LOST_STATUS)

    def wait(self) -> Open | Break | End:
        """Block until the agent opens or breaks a generation, or ends the run."""
        return self._messages.get()

    def on_break(self, callback: OnBreak | None) -> None:
        """Call `callback` at each break, and at once where a break has come already."""
        with self._lock:
            self._callback = callback
            if callback and self._last_break:
                callback(self._last_break)

    def _serve(self) -> None:
        """Listen for ever; a process that can no longer be reached is no use to anybody."""
        try:
            self._listen()
        except BaseException:  # noqa: BLE001 - whatever it is, nobody else would hear of it
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(LINK_LOST_STATUS)

    def _listen(self) -> None:
        reader = LineReader()
        while True:
            self._page.beat(self._slot)
            if not select.select([self._socket], [], [], HEARTBEAT_S)[0]:
                continue
            try:
                data = self._socket.recv(1 << 16)
            except OSError:
                data = b""
            if not data:
                os._exit(AGENT_LOST_STATUS)
            for message in reader.feed(data):
                self._take(message)

    def _take(self, message: Message) -> None:
        if isinstance(message, Break):
            with self._lock:
                self._last_break = message
                if self._callback:
                    self._callback(message)
        if isinstance(message, (Open, Break, End)):
            self._messages.put(message)
