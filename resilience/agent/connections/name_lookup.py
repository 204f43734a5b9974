"""Addresses of hosts by name, looked up in threads: a name server may take its time."""

from __future__ import annotations

import ipaddress
import queue
import socket
import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from resilience.arguments import parse_endpoint

SocketAddress: TypeAlias = tuple[socket.AddressFamily, tuple[Any, ...]]
Answer: TypeAlias = "Sequence[SocketAddress] | OSError | UnicodeError"


class NameLookup:
    """Finds the addresses behind HOST:PORT. One thread calls; `wake` is called from others."""

    def __init__(self, wake: Callable[[], object]) -> None:
        self._wake = wake
        self._asked: dict[str, list[int]] = {}
        """Who waits for the addresses of a name; each is looked up once at a time."""
        self._answers: queue.SimpleQueue[tuple[str, Answer]] = queue.SimpleQueue()

    def find(self, peer: int, address: str) -> Sequence[SocketAddress]:
        """Return the addresses, or none yet where they come with `answers`.

        Raises argparse.ArgumentTypeError where the text names no port of a host.
        """
        host, port = parse_endpoint(address)
        try:
            ipaddress.ip_address(host.partition("%")[0])
        except ValueError:
            waiting = self._asked.setdefault(address, [])
            waiting.append(peer)
            if len(waiting) == 1:
                threading.Thread(
                    target=self._look_up, args=(address, host, port), name="lookup", daemon=True
                ).start()
            return ()
        return _look_up(host, port, socket.AI_NUMERICHOST)

    def answers(self) -> list[tuple[int, Answer]]:
        """Return what has been found since the last call, by who has asked."""
        found = []
        while not self._answers.empty():
            address, answer = self._answers.get()
            found += [(peer, answer) for peer in self._asked.pop(address)]
        return found

    def _look_up(self, address: str, host: str, port: int) -> None:
        try:
            answer: Answer = _look_up(host, port, 0)
        except (OSError, UnicodeError) as error:  # the latter for what cannot be a host's name
            answer = error
        self._answers.put((address, answer))
        self._wake()


def _look_up(host: str, port: int, flags: int) -> Sequence[SocketAddress]:
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=flags)
    return [(family, target) for family, _, _, _, target in found]
