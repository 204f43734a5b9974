"""What a producer and its consumers say to each other, over a Unix socket of packets.

A packet is one message, whole or not at all: VERB NUMBER [TEXT]. No other part of the cache
depends on it: who may open the socket may read the files too. Pure: no socket here.

Consumers say:
    hello N       I am here and begin at batch N
    at N          I hold batch N; may get lost
    need N        I wait for batch N
    why N         what do you do meanwhile?
    bad N         what is stored of batch N is damaged
    checkpoint N  a complete checkpoint goes on with batch N
    bye N         I leave, and was at batch N
    over N        the job is over: end
The producer says, most of it of a batch that the consumer waits for:
    published N SERIAL  it is in the segment of that number
    failed N JSON       the source raised an error, see failure.py
    end N               the stage has N batches
    doing N TEXT        answers why, for a person
    stays N             answers bye and over: it does not end yet, as others are here perhaps
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

FromConsumer = Literal["hello", "at", "need", "why", "bad", "checkpoint", "bye", "over"]
FromProducer = Literal["published", "failed", "end", "doing", "stays"]

MESSAGE_BYTES_MAX = 128 << 10
"""Well below what a socket's buffer takes by default."""

_VERBS = frozenset((*get_args(FromConsumer), *get_args(FromProducer)))


@dataclass(frozen=True, slots=True)
class ProducerMessage:
    """One packet."""

    verb: FromConsumer | FromProducer
    number: int
    text: str = ""


def encode_message(message: ProducerMessage) -> bytes:
    """Return a message as a packet; a text too long for one is cut."""
    words = f"{message.verb} {message.number}"
    if message.text:
        words = f"{words} {message.text}"
    return words.encode("utf-8", "backslashreplace")[:MESSAGE_BYTES_MAX]


def parse_message(packet: bytes) -> ProducerMessage:
    """Return the message that a packet holds; ValueError where it holds none."""
    verb, _, rest = packet.decode("utf-8", "replace").partition(" ")
    number, _, text = rest.partition(" ")
    if verb not in _VERBS or not number.isdecimal() or not number.isascii():
        raise ValueError(f"no message: {packet[:80]!r}")
    return ProducerMessage(verb, int(number), text)  # type: ignore[arg-type]
