"""The producer's thread that listens to consumers, and knows when the producer has to end."""

from __future__ import annotations

import selectors
import socket
import time
from collections.abc import Callable
from contextlib import suppress

from resilience.data.production import Consumer, Production
from resilience.data.wire import MESSAGE_BYTES_MAX, ProducerMessage, encode_message, parse_message


class Reception:
    """The consumers of a producer. All of it in one thread."""

    def __init__(
        self,
        production: Production,
        listener: socket.socket,
        *,
        ends: tuple[int, ...],
        linger_s: float | None,
    ) -> None:
        """Take over the listener; the producer ends when one of `ends` becomes readable.

        `linger_s` is how long the producer stays without a consumer; None: until one of `ends`.
        """
        self._production = production
        self._listener = listener
        self._ends = ends
        self._linger_s = linger_s
        self._consumers: dict[socket.socket, Consumer | None] = {}
        self._alone_since_s = time.monotonic()
        self._is_over = False
        self._is_last = False
        """Nobody comes back: it ends with its last consumer."""
        self._selector = selectors.DefaultSelector()

    def run(self) -> None:
        """Serve consumers until the producer has to end."""
        self._listener.settimeout(0)
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        for each in self._ends:
            self._selector.register(each, selectors.EVENT_READ, self._end)
        while not self._is_over and (rest_s := self._rest_s()) != 0:
            for key, _ in self._selector.select(rest_s):
                key.data()

    def descriptors(self) -> list[int]:
        """Return what a forked child must not keep open: a consumer would not see us end."""
        return [each.fileno() for each in (self._listener, *list(self._consumers))]

    def _rest_s(self) -> float | None:
        """Return how long to wait for a consumer; None: for ever, 0: not any more."""
        if self._consumers or self._linger_s is None:
            return None
        return max(0.0, self._alone_since_s + self._linger_s - time.monotonic())

    def _end(self) -> None:
        self._is_over = True

    def _accept(self) -> None:
        with suppress(BlockingIOError, ConnectionAbortedError):
            connection, _ = self._listener.accept()
            connection.settimeout(0)
            self._consumers[connection] = None
            self._selector.register(
                connection, selectors.EVENT_READ, lambda: self._receive(connection)
            )

    def _receive(self, connection: socket.socket) -> None:
        """Take one packet from a connection; the selector comes back for the next."""
        try:
            packet = connection.recv(MESSAGE_BYTES_MAX)
            message = parse_message(packet) if packet else None
        except BlockingIOError:
            return
        except (OSError, ValueError):
            message = None
        if message is None:
            self._hang_up(connection, is_coming_back=not self._is_last)
        elif message.verb == "over" and len(self._consumers) == 1:
            # The connection is left open: its end says that the producer has ended.
            self._is_over = True
        elif message.verb in ("bye", "over"):
            self._is_last |= message.verb == "over"
            # Who hears nothing waits for the end of this process, which may not be near.
            _sender(connection)(ProducerMessage("stays", message.number))
            self._hang_up(connection, is_coming_back=False)
        else:
            self._hear(connection, message)

    def _hear(self, connection: socket.socket, message: ProducerMessage) -> None:
        consumer = self._consumers[connection]
        number = message.number
        if consumer is None:
            consumer = self._production.arrive(_sender(connection), number)
            self._consumers[connection] = consumer
        if message.verb == "at":
            self._production.move(consumer, number)
        elif message.verb == "need":
            self._production.ask(consumer, number)
        elif message.verb == "bad":
            self._production.doubt(number)
        elif message.verb == "checkpoint":
            self._production.note_checkpoint(number)
        elif message.verb == "why":
            consumer.send(ProducerMessage("doing", number, self._production.explain()))

    def _hang_up(self, connection: socket.socket, *, is_coming_back: bool) -> None:
        consumer = self._consumers.pop(connection)
        self._selector.unregister(connection)
        connection.close()
        if consumer is not None:
            self._production.leave(consumer, is_coming_back=is_coming_back)
        self._is_over |= self._is_last and not self._consumers
        self._alone_since_s = time.monotonic()


def _sender(connection: socket.socket) -> Callable[[ProducerMessage], None]:
    """Return what sends to a consumer and never blocks.

    One that does not read its answers gets no more of them: it has asked for a single one.
    """

    def send(message: ProducerMessage) -> None:
        with suppress(OSError):
            connection.send(encode_message(message))

    return send
