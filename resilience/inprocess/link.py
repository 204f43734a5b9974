"""The worker's side of the socket to its agent, and the one thread that reads it.

The thread blocks until the agent says something or it is time for a heartbeat. It hands openings
and the end to the training thread, replies of the store to the threads that wait for them, and
breaks the current generation itself, because the training thread may be blocked in a collective.
When the agent is gone the thread ends the process: no other process would end it.
"""

from __future__ import annotations

import os
import queue
import select
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, TypeAlias

from resilience.comm.messages import (
    Break,
    End,
    Leave,
    LineReader,
    Message,
    Open,
    SaveState,
    StoreReply,
    encode,
)
from resilience.comm.page import Page
from resilience.errors import BrokenError

if TYPE_CHECKING:  # it imports torch, which a program may not need
    from resilience.comm.agent_store import AgentStore

HEARTBEAT_S = 0.25
AGENT_LOST_STATUS = 70
"""Exit status of a worker whose agent is gone."""
LINK_LOST_STATUS = 73
"""Exit status of a worker that cannot hear its agent any more; the agent replaces it."""

OnBreak = Callable[[Break], None]
_Sent: TypeAlias = queue.SimpleQueue[None]


def listen(
    agent: socket.socket, reader: LineReader, page: Page, slot: int
) -> Iterator[list[Message]]:
    """Yield what the agent says, and show a heartbeat meanwhile; for ever.

    Ends the process where the agent is gone.
    """
    while True:
        page.beat(slot)
        if not select.select([agent], [], [], HEARTBEAT_S)[0]:
            continue
        try:
            data = agent.recv(1 << 16)
        except OSError:
            data = b""
        if not data:
            os._exit(AGENT_LOST_STATUS)
        yield reader.feed(data)


class AgentLink:
    """What numbers the generations, as the block sees it: reached through the agent.

    All methods but `send` are called from the training thread; only what `on_break` was given is
    called from another one. `reader` and `messages` are what was read before.
    """

    def __init__(
        self,
        file: int,
        page: Page,
        slot: int,
        *,
        reader: LineReader | None = None,
        messages: Sequence[Message] = (),
    ) -> None:
        self._socket = socket.socket(fileno=file)
        self._reader = reader or LineReader()
        self._page = page
        self._slot = slot
        self._messages: queue.SimpleQueue[Open | Break | SaveState | End] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._outbox: queue.SimpleQueue[tuple[bytes, _Sent]] = queue.SimpleQueue()
        self._callback: OnBreak | None = None
        self._store: AgentStore | None = None
        self._last_break: Break | None = None
        self._left = -1
        for message in messages:
            self._take(message)
        self._thread = threading.Thread(target=self._serve, name="agent-link", daemon=True)
        self._thread.start()
        threading.Thread(target=self._send_all, name="agent-link-send", daemon=True).start()

    def send(self, message: Message) -> None:
        """Send a message, and wait for no answer; ends the process where the agent is gone.

        From any thread, and from a signal's handler that has interrupted another call of this. A
        message leaves whole, also where a handler raises: no handler runs in the thread that sends.
        """
        sent: _Sent = queue.SimpleQueue()  # an Event's lock would be held while a handler runs
        self._outbox.put((encode(message), sent))
        if sys.is_finalizing():  # that thread has ended
            self._send_next()
        sent.get()

    def wait(self) -> Open | Break | SaveState | End:
        """Block until a generation opens, the finished one is broken, or the run ends.

        Or until what the rank holds is to be saved, while no generation opens.
        """
        return self._messages.get()

    def check_idle(self) -> None:
        """Raise BrokenError where `wait` would return at once."""
        if not self._messages.empty():
            raise BrokenError("the agent wants something else")

    def is_asked_to_leave(self, generation: int) -> bool:
        """Return whether all ranks are to leave a generation after a step."""
        return self._left == generation

    def on_break(self, callback: OnBreak | None) -> None:
        """Call `callback` at each break from now on, and at once where one has come already."""
        with self._lock:
            self._callback = callback
            if callback and self._last_break:
                callback(self._last_break)

    def open_store(self, generation: int) -> AgentStore:
        """Return the store of a generation; one is open at a time, and those before it are over."""
        from resilience.comm.agent_store import AgentStore

        if self._store is not None and self._store.generation >= generation:
            if self._store.generation == generation:
                return self._store
            over = AgentStore(generation, self.send)
            over.break_now()
            return over
        self._store = AgentStore(generation, self.send)
        return self._store

    def _send_all(self) -> None:
        while True:
            self._send_next()

    def _send_next(self) -> None:
        line, sent = self._outbox.get()
        try:
            self._socket.sendall(line)
        except OSError:
            os._exit(AGENT_LOST_STATUS)
        sent.put(None)

    def _serve(self) -> None:
        """Listen for ever; a process that can no longer be reached is no use to anybody."""
        try:
            for messages in listen(self._socket, self._reader, self._page, self._slot):
                for message in messages:
                    self._take(message)
        except BaseException:  # noqa: BLE001 - whatever it is, nobody else would hear of it
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(LINK_LOST_STATUS)

    def _take(self, message: Message) -> None:
        if isinstance(message, StoreReply) and self._store is not None:
            self._store.take(message)
        if isinstance(message, Break):
            with self._lock:
                self._last_break = message
                if self._callback:
                    self._callback(message)
        if isinstance(message, Leave):
            self._left = message.generation
        if isinstance(message, (Open, Break, SaveState, End)):
            self._messages.put(message)
