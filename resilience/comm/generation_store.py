"""The store of one generation, at which its workers meet. Pure.

The coordinator holds it and serves the calls of all workers, whose agents pass them on. It holds
texts: a value is what a worker has encoded, and only `add` and `append` look into one.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from resilience.comm.messages import StoreReply, StoreRequest

STORE_BYTES_MAX = 256 << 20
"""Keys and encoded values of one generation. NCCL's and gloo's of 8,192 ranks take some 10 MB."""
REPLY_BYTES_MAX = 32 << 20
"""Encoded values that one call may get."""

Client: TypeAlias = tuple[int, int]
"""A worker: the connection of its agent, and the agent's number of it."""


@dataclass(slots=True, kw_only=True)
class _Wait:
    client: Client
    request: StoreRequest
    missing: set[str]


@dataclass(slots=True)
class GenerationStore:
    """Keys and values of one generation, and the calls that wait for keys."""

    generation: int
    _values: dict[str, str] = field(default_factory=dict)
    _waits: dict[tuple[Client, int], _Wait] = field(default_factory=dict)
    """By caller and number of the call."""
    _waiting: dict[str, dict[tuple[Client, int], _Wait]] = field(default_factory=dict)
    """The same by missing key."""
    _num_bytes: int = 0

    def serve(self, client: Client, request: StoreRequest) -> list[tuple[Client, StoreReply]]:
        """Carry out one call; returns the replies that it brings about, to whomever.

        A call of "get" or "wait" is answered once all its keys are there. "set" and "append" are
        answered only where they fail.
        """
        if request.generation != self.generation:
            return []
        keys = request.keys
        if request.call in ("get", "wait"):
            missing = {key for key in keys if key not in self._values}
            wait = _Wait(client=client, request=request, missing=missing)
            if not missing:
                return [self._answer(wait)]
            self._waits[client, request.number] = wait
            self._await_missing(wait)
            return []
        if request.call == "cancel":
            given_up = self._waits.pop((client, request.number), None)
            for key in given_up.missing if given_up else ():
                waiting = self._waiting[key]
                del waiting[client, request.number]
                if not waiting:
                    del self._waiting[key]
            return []
        try:
            values, woken = self._change(request)
        except (IndexError, ValueError) as error:
            return [(client, _reply(request, problem=f"{_describe(request)}: {error}"))]
        is_silent = request.call in ("set", "append")
        return [*([] if is_silent else [(client, _reply(request, values))]), *woken]

    def _change(
        self, request: StoreRequest
    ) -> tuple[tuple[str, ...], list[tuple[Client, StoreReply]]]:
        """Return what a call that does not wait is answered, and the replies to calls that did."""
        keys, values, known = request.keys, request.values, self._values
        if request.call == "check":
            return _flag(all(key in known for key in keys)), []
        if request.call == "count":
            return _number(len(known)), []
        key = keys[0]
        old = known.get(key)
        if request.call == "delete":
            if old is not None:
                del known[key]
                self._num_bytes -= len(key) + len(old)
            return _flag(old is not None), []
        if request.call == "set":
            return (), self._put(dict(zip(keys, values, strict=True)))
        if request.call == "append":
            joined = base64.b64decode(old or "") + base64.b64decode(values[0])
            return (), self._put({key: base64.b64encode(joined).decode()})
        if request.call == "add":
            total = int(base64.b64decode(old or "") or b"0") + int(base64.b64decode(values[0]))
            (told,) = _number(total)
            return (told,), self._put({key: told})
        expected, wanted = values  # compare_set: as torch's own, "" stands for a missing key
        if old == expected or (old is None and not expected):
            return (wanted,), self._put({key: wanted})
        return (expected if old is None else old,), []

    def _put(self, values: Mapping[str, str]) -> list[tuple[Client, StoreReply]]:
        """Set all of these or, without room, none; returns the replies to calls that waited."""
        num_bytes = self._num_bytes
        for key, value in values.items():
            old = self._values.get(key)
            num_bytes += len(value) + (len(key) if old is None else -len(old))
            if len(value) > REPLY_BYTES_MAX:
                raise ValueError(
                    f"the value of {key!r} would take {len(value)} bytes; "
                    f"allowed: {REPLY_BYTES_MAX}"
                )
            if num_bytes > STORE_BYTES_MAX:
                raise ValueError(
                    f"no room for {len(value)} bytes of {key!r}: the generation's keys and values "
                    f"would take {num_bytes} bytes; allowed: {STORE_BYTES_MAX}"
                )
        self._values.update(values)
        self._num_bytes = num_bytes
        return [reply for key in values for reply in self._wake(key)]

    def _wake(self, key: str) -> list[tuple[Client, StoreReply]]:
        replies = []
        for asked, wait in self._waiting.pop(key, {}).items():
            wait.missing.discard(key)
            if self._waits.get(asked) is wait and not wait.missing:
                # A key that was deleted since is missing again.
                wait.missing |= {each for each in wait.request.keys if each not in self._values}
                self._await_missing(wait)
                if not wait.missing:
                    del self._waits[asked]
                    replies.append(self._answer(wait))
        return replies

    def _await_missing(self, wait: _Wait) -> None:
        for key in wait.missing:
            self._waiting.setdefault(key, {})[wait.client, wait.request.number] = wait

    def _answer(self, wait: _Wait) -> tuple[Client, StoreReply]:
        request = wait.request
        found = [self._values[key] for key in request.keys] if request.call == "get" else []
        num_bytes = sum(map(len, found))
        if num_bytes > REPLY_BYTES_MAX:
            problem = f"the values take {num_bytes} bytes; allowed in one call: {REPLY_BYTES_MAX}"
            return wait.client, _reply(request, problem=f"{_describe(request)}: {problem}")
        return wait.client, _reply(request, tuple(found))


def _describe(request: StoreRequest) -> str:
    names = ", ".join(request.keys[:3]) + (", ..." if len(request.keys) > 3 else "")
    return f"{request.call} of {names}"


def _reply(request: StoreRequest, values: tuple[str, ...] = (), *, problem: str = "") -> StoreReply:
    return StoreReply(
        generation=request.generation,
        worker=request.worker,
        number=request.number,
        values=values,
        problem=problem,
    )


def _flag(is_so: bool) -> tuple[str, ...]:
    return ("1",) if is_so else ()


def _number(value: int) -> tuple[str, ...]:
    return (base64.b64encode(b"%d" % value).decode(),)
