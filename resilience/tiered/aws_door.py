"""AWS's checkpoints in a daemon's memory, over the HTTP protocol of AWS's library.

Any daemon that speaks it will do: memoryd, or HyperPod's own.
"""

from __future__ import annotations

import http.client
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http import HTTPStatus
from typing import Protocol
from urllib.parse import urlsplit

import xxhash

from resilience.runtime.http_messages import HttpError
from resilience.runtime.records import from_json
from resilience.tiered.errors import FormatError, LostError, RefusedError
from resilience.tiered.memoryd.http_routes import MAX_RANKS, SHARD_META, parse_shard_meta
from resilience.tiered.memoryd.http_steps import is_metadata

_HEAD_BYTES = 1 << 10
_STEPS_MAX = 64


class CheckpointSource(Protocol):
    """Where AWS's library has put checkpoints of one namespace."""

    name: str
    """For a person."""
    is_checked: bool
    """Bytes are compared with a checksum of all of them."""

    def steps(self) -> list[int]:
        """Return the steps that are there, newest first; raises TieredError."""

    def read_metadata(self, step: int, bytes_max: int) -> bytes | None:
        """Return a step's metadata, None without one; raises TieredError."""

    def read(self, step: int, rank: int, begin: int, end: int) -> memoryview | None:
        """Return these bytes of what a rank has saved, None without them; raises TieredError."""


class DoorSource:
    """A daemon's HTTP door. For one thread at a time.

    `url` is the daemon's, such as http://127.0.0.1:9200. `timeout_s` is for each wait, not
    for a whole shard. Raises LostError where nobody answers or the answer makes no sense,
    RefusedError for a wrong token, FormatError for bytes that are not what their checksum says.
    """

    is_checked = True

    def __init__(
        self, url: str, namespace: str, *, token: str = "", timeout_s: float = 60.0
    ) -> None:
        parts = urlsplit(url)
        if parts.scheme != "http" or not parts.hostname:
            raise ValueError(f"url is {url!r}, not http://HOST:PORT")
        self.name = f"{url}, namespace {namespace}"
        self._address = (parts.hostname, parts.port or 80)
        self._namespace = namespace
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._timeout_s = timeout_s

    def steps(self) -> list[int]:
        """Return the complete steps, newest first."""
        path = f"checkpoints/{self._namespace}/latest?limit={_STEPS_MAX}"
        found = self._read_json(path) or []
        if not isinstance(found, list):
            raise LostError(f"{self.name}: what answers is no daemon of checkpoints")
        return sorted((int(step) for step in found), reverse=True)

    def read_metadata(self, step: int, bytes_max: int) -> bytes | None:
        """Return a step's metadata.

        It lies behind the last rank's shard, whatever the number of ranks is that saved it.
        """
        if (rank := self._num_ranks() - 1) >= 0:
            found = self._read_if_metadata(step, rank, bytes_max)
            if found is not None:
                return found
        last = find_last(lambda rank: self._has(step, rank), MAX_RANKS)
        return None if last is None else self._read_if_metadata(step, last, bytes_max)

    def read(self, step: int, rank: int, begin: int, end: int) -> memoryview | None:
        """Return bytes of a shard, which comes as a whole: its checksum is over all of it."""
        with self._ask(self._path(step, rank)) as answer:
            if answer is None:
                return None
            body = memoryview(answer.read())
        _check_body(body, answer, f"{self.name}: rank {rank} of step {step}")
        if end > len(body):
            raise FormatError(
                f"{self.name}: rank {rank} of step {step} has {len(body)} bytes, not {end}"
            )
        return body[begin:end]

    def _read_if_metadata(self, step: int, rank: int, bytes_max: int) -> bytes | None:
        with self._ask(self._path(step, rank)) as answer:
            if answer is None:
                return None
            head = answer.read(_HEAD_BYTES)
            # A connection that is closed here spares the rest of somebody's shard.
            if not is_metadata(head):
                return None
            if (length := answer.length) is None or len(head) + length > bytes_max:
                raise FormatError(
                    f"{self.name}: the metadata of step {step} is longer than {bytes_max} bytes"
                )
            body = head + answer.read()
        _check_body(memoryview(body), answer, f"{self.name}: the metadata of step {step}")
        return body

    def _num_ranks(self) -> int:
        """Return how many shards a step of the namespace has now, 0 where nobody knows."""
        content = self._read_json(f"namespaces/{self._namespace}")
        number = content.get("num_ranks") if isinstance(content, dict) else None
        return number if isinstance(number, int) else 0

    def _has(self, step: int, rank: int) -> bool:
        with self._ask(self._path(step, rank)) as answer:
            return answer is not None

    def _path(self, step: int, rank: int) -> str:
        return f"checkpoints/{self._namespace}/{rank}/{step}"

    def _read_json(self, path: str) -> object:
        with self._ask(path) as answer:
            text = answer.read() if answer is not None else b"null"
        try:
            return from_json(text)
        except ValueError as error:
            raise LostError(f"{self.name}: what answers is no daemon of checkpoints") from error

    @contextmanager
    def _ask(self, path: str) -> Iterator[http.client.HTTPResponse | None]:
        """Send a request on a connection of its own; None within the block for a 404."""
        connection = http.client.HTTPConnection(*self._address, timeout=self._timeout_s)
        try:
            connection.request("GET", f"/v1/cp/{path}", headers=self._headers)
            answer = connection.getresponse()
            if answer.status in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN):
                raise RefusedError(f"{self.name}: the token is missing or wrong")
            if answer.status not in (HTTPStatus.OK, HTTPStatus.NOT_FOUND):
                raise LostError(f"{self.name}: status {answer.status} {answer.reason}")
            yield answer if answer.status == HTTPStatus.OK else None
        except (OSError, http.client.HTTPException) as error:
            raise LostError(f"{self.name}: {error or type(error).__name__}") from error
        finally:
            connection.close()


def find_last(has: Callable[[int], bool], limit: int) -> int | None:
    """Return the last of the ranks from 0 on without a gap, in few questions; None without any."""
    if not has(0):
        return None
    low, high = 0, 1
    while high < limit and has(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if has(middle) else (low, middle)
    return low


def _check_body(body: memoryview, answer: http.client.HTTPResponse, what: str) -> None:
    try:
        promised = parse_shard_meta(answer.headers[SHARD_META])
    except HttpError as error:
        raise FormatError(f"{what} comes without a checksum") from error
    if promised != xxhash.xxh3_128_digest(body):
        raise FormatError(f"{what} is not what its checksum says")
