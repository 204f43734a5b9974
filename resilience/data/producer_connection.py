"""A consumer's side of the socket: keeps in touch with the producer, starts another if need be."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from resilience.data.errors import LateBatchError, ProducerError
from resilience.data.spawn import await_end, connect_producer, reap_producers, start_producer
from resilience.data.spec import ProducerSpec
from resilience.data.wire import (
    MESSAGE_BYTES_MAX,
    FromConsumer,
    ProducerMessage,
    encode_message,
    parse_message,
)

_DEATHS_MAX = 5
"""So many producers in a row may end without an answer."""
_EXPLAIN_S = 1.0
"""How long a producer may take to say why it is late."""
LATE_S = 10.0
"""A batch that is waited for longer is told of, with what its producer does meanwhile."""
_PULSE_S = 0.2
"""How often `on_wait` is called while a batch is waited for."""
_END_S = 10.0
_RETRY_S = 0.002
_REAP_S = 1.0


class ProducerConnection:
    """A consumer's connection to its cache's producer, whichever process that is. One thread."""

    def __init__(
        self,
        spec: ProducerSpec,
        *,
        deadline_s: float,
        on_wait: Callable[[], None] | None = None,
        on_late: Callable[[int, str], None] = lambda number, text: None,
    ) -> None:
        """`on_wait` is called now and then while a batch is waited for, and may raise to end it.

        `on_late` is called once with a batch that is waited for longer than LATE_S, and why.
        """
        self._spec = spec
        self._on_wait, self._on_late = on_wait or (lambda: None), on_late
        self._ask_why_s = self._silent_s = float("inf")
        """When the producer is asked why a batch is late, and when it counts as silent then."""
        self._folder = Path(spec.folder)
        self._deadline_s = deadline_s
        self._socket: socket.socket | None = None
        self._num_deaths = 0
        self._checkpoint: int | None = None

    def open(self, number: int) -> bool:
        """Connect, without waiting, and say where this consumer is; starts a missing producer.

        False where another process is just starting one: the next message tries again.
        """
        if self._socket is not None:
            return True
        self._socket = connect_producer(self._folder)
        if self._socket is None and self._num_deaths > _DEATHS_MAX:
            return False
        if self._socket is None and self._start(number):
            self._socket = connect_producer(self._folder)
        if self._socket is None:
            return False
        self.tell("hello", number)
        if self._checkpoint is not None:
            # The producer may be a new one.
            self.tell("checkpoint", self._checkpoint)
        # It may have ended meanwhile, and then there is no connection any more.
        return self._socket is not None

    def note_checkpoint(self, number: int) -> None:
        """Tell this producer and each later one that a resume begins at a batch."""
        self._checkpoint = number
        self.tell("checkpoint", number)

    def tell(self, verb: FromConsumer, number: int) -> None:
        """Send a message that needs no answer; it is lost where the producer is gone or busy."""
        if self._socket is None:
            return
        try:
            self._socket.settimeout(0)
            self._socket.send(encode_message(ProducerMessage(verb, number)))
        except BlockingIOError:
            return  # It is busy, and a later position makes up for this one.
        except OSError:
            # It is gone; the next message starts another.
            self._hang_up()
            self._num_deaths += 1

    def ask(self, number: int, *, is_damaged: bool = False) -> ProducerMessage:
        """Wait for a batch and return the answer: it is published, has failed, or is the end's.

        A producer that ends meanwhile is replaced. Raises LateBatchError after the deadline,
        and ProducerError where one after the other ends without an answer.
        """
        end_s = time.monotonic() + self._deadline_s
        # Those that have ended since the last answer were no failure to make this batch.
        self._num_deaths = 0
        self._ask_why_s, self._silent_s = time.monotonic() + LATE_S, float("inf")
        while True:
            self._connect(number, end_s)
            if is_damaged:
                self._say("bad", number, end_s)
            self._say("need", number, end_s)
            answer = self._receive(number, end_s)
            if answer is not None:
                self._num_deaths = 0
                return answer
            self._hang_up()
            self._num_deaths += 1

    def explain(self, number: int) -> str:
        """Return what the producer says it is doing."""
        if not self.open(number):
            return "the producer is just being started"
        self.tell("why", number)
        end_s = time.monotonic() + _EXPLAIN_S
        with suppress(TimeoutError):
            while message := self._receive_one(end_s - time.monotonic()):
                if message.verb == "doing":
                    return f"the producer {message.text}"
            return "the producer has ended"
        return "the producer does not answer"

    def close(self, verb: FromConsumer, number: int) -> None:
        """Leave; with `over`, the producer is told to end.

        On return it has ended, or serves others, with the last of which it ends.
        """
        self.tell(verb, number)
        if verb == "over":
            if self._socket is None:
                # This one's producer is gone, but there may be another.
                self._socket = connect_producer(self._folder)
                self.tell(verb, number)
            self._wait_for_end()
        self._hang_up()

    def _start(self, number: int) -> bool:
        # A new one plans before it has heard anybody: it must know from what batch on to keep,
        # and which to make first.
        try:
            return start_producer(replace(self._spec, first=number, checkpoint=self._checkpoint))
        except OSError as error:
            raise ProducerError(
                f"cannot start a producer of batches: {error.strerror or error}; it is a process "
                "of its own, so look at the node's or the pod's limits of processes and memory"
            ) from error

    def _connect(self, number: int, end_s: float) -> None:
        while True:
            if self._num_deaths > _DEATHS_MAX:
                self._num_deaths = 0
                raise ProducerError(
                    f"{_DEATHS_MAX + 1} producers in a row have ended before batch {number} was "
                    "made; what they said is on standard error"
                )
            if self.open(number):
                return
            # Somebody has the lock and not yet, or no longer, the socket: for that there is
            # nothing to wait on. It lasts some microseconds, or until a killed process is gone.
            rest_s = end_s - time.monotonic()
            text = "a process holds the producer's lock and does not listen"
            if rest_s <= 0:
                raise self._late(number, text)
            self._pulse(number, text)
            time.sleep(min(_RETRY_S, rest_s))

    def _receive(self, number: int, end_s: float) -> ProducerMessage | None:
        """Return the answer for a batch; None where the producer has ended."""
        while True:
            try:
                message = self._receive_one(min(end_s - time.monotonic(), _PULSE_S))
            except TimeoutError:
                if time.monotonic() >= end_s:
                    raise self._late(number, self.explain(number)) from None
                self._pulse(number, "the producer does not answer")
                continue
            if message is None:
                return None
            if message.verb == "doing" and self._silent_s < float("inf"):
                self._tell_late(number, f"the producer {message.text}")
            is_answer = message.verb in ("published", "failed") and message.number == number
            if is_answer or (message.verb == "end" and message.number <= number):
                return message

    def _pulse(self, number: int, text: str) -> None:
        """Show that this consumer waits; `text` says why where the producer does not."""
        self._on_wait()
        now_s = time.monotonic()
        if now_s >= self._ask_why_s:
            self._ask_why_s, self._silent_s = float("inf"), now_s + _EXPLAIN_S
            self.tell("why", number)
        elif now_s >= self._silent_s:
            self._tell_late(number, text)

    def _tell_late(self, number: int, text: str) -> None:
        self._silent_s = float("inf")
        self._on_late(number, text)

    def _late(self, number: int, text: str) -> LateBatchError:
        return LateBatchError(
            f"batch {number} has not come within {self._deadline_s:g} s: {text}; "
            "if the data are that slow, raise resilience.mmap.deadline_s"
        )

    def _receive_one(self, timeout_s: float) -> ProducerMessage | None:
        """Return the next message; None where the producer has ended; TimeoutError."""
        if self._socket is None:
            return None
        _limit(self._socket, timeout_s)
        try:
            packet = self._socket.recv(MESSAGE_BYTES_MAX)
        except ConnectionError:
            return None
        return parse_message(packet) if packet else None

    def _say(self, verb: FromConsumer, number: int, end_s: float) -> None:
        """Send a message that must not be lost; the wait for its answer finds a producer gone."""
        assert self._socket is not None, "who speaks is connected"
        try:
            _limit(self._socket, end_s - time.monotonic())
            self._socket.send(encode_message(ProducerMessage(verb, number)))
        except TimeoutError:
            raise self._late(number, "the producer does not listen") from None
        except OSError:
            return

    def _wait_for_end(self) -> None:
        end_s = time.monotonic() + _END_S
        with suppress(TimeoutError):
            while message := self._receive_one(end_s - time.monotonic()):
                if message.verb == "stays":
                    return
            await_end(self._folder, _REAP_S)

    def _hang_up(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        reap_producers()


def _limit(connection: socket.socket, timeout_s: float) -> None:
    """Let the socket's next call wait so long; TimeoutError where no time is left."""
    if timeout_s <= 0:
        raise TimeoutError
    connection.settimeout(timeout_s)
