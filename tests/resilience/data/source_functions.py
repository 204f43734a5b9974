"""Functions that make batches, for tests of sources and of what runs them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from resilience.data.sources import Start

CONSTANT = 5


def begins_there(start: Start, length: int = 10, scale: int = 1) -> Iterator[int]:
    return iter([scale * number for number in range(start.batch, length)])


def tells_start(start: Start) -> Iterator[Start]:
    yield start


def begins_at_0(length: int = 10) -> Iterator[int]:
    yield from range(length)


def begins_at_0_again(length: int = 10) -> list[int]:
    return list(range(length))


def fails(length: int = 3) -> Iterator[int]:
    yield from range(length)
    raise KeyError("sample 3")


def returns_nothing() -> Any:
    return None


class Counter:
    """A loader with a state; counts what it has read since it was made."""

    def __init__(self, length: int, *, is_json: bool) -> None:
        self.length = length
        self.is_json = is_json
        self.position = 0
        self.num_read = 0

    def __iter__(self) -> Iterator[int]:
        while self.position < self.length:
            self.num_read += 1
            self.position += 1
            yield self.position - 1

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position if self.is_json else b"no JSON"}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]

    def method(self) -> Iterable[int]:
        return self


def has_state(length: int = 10, is_json: bool = True) -> Counter:
    return Counter(length, is_json=is_json)


def begins_there_with_state(start: Start) -> Counter:
    counter = Counter(10, is_json=False)
    counter.position = start.batch
    return counter
