"""The store of one generation, at which its workers meet. Pure.

The coordinator holds it and serves the calls of all workers, whose agents pass them on. It holds
texts: a value is what a worker has encoded, and only `add` and `append` look into one.
"""

from __future__ import annotations

import base64
from dataclasses import dataclass, field
from typing import TypeAlias

from resilience.comm.messages import StoreReply, StoreRequest

STORE_BYTES_MAX = 256 << 20
"""Keys and encoded values of one generation. NCCL's and gloo's of 8,192 ranks take some 10 MB."""

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
    _waiting: dict[str, list[_Wait]] = field(default_factory=dict)
    """By missing key."""
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
            for key in missing:
                self._waiting.setdefault(key, []).append(wait)
            return []
        if request.call == "cancel":
            self._waits.pop((client, request.number), None)
            return []
        try:
            values, woken = self._change(request)
        except (IndexError, ValueError) as error:
            problem = f"{request.call} of {', '.join(keys)}: {error}"
            return [(client, _reply(request, problem=problem))]
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
            pairs = zip(keys, values, strict=True)
            return (), [reply for pair in pairs for reply in self._put(*pair)]
        if request.call == "append":
            joined = base64.b64decode(old or "") + base64.b64decode(values[0])
            return (), self._put(key, base64.b64encode(joined).decode())
        if request.call == "add":
            total = int(base64.b64decode(old or "") or b"0") + int(base64.b64decode(values[0]))
            (told,) = _number(total)
            return (told,), self._put(key, told)
        expected, wanted = values  # compare_set: as torch's own, "" stands for a missing key
        if old == expected or (old is None and not expected):
            return (wanted,), self._put(key, wanted)
        return (expected if old is None else old,), []

    def _put(self, key: str, value: str) -> list[tuple[Client, StoreReply]]:
        old = self._values.get(key)
        num_bytes = self._num_bytes + len(value) + (len(key) if old is None else -len(old))
        if num_bytes > STORE_BYTES_MAX:
            raise ValueError(
                f"no room for {len(value)} bytes of {key!r}: the generation's keys and values "
                f"would take {num_bytes} bytes; allowed: {STORE_BYTES_MAX}"
            )
        self._values[key], self._num_bytes = value, num_bytes
        replies = []
        for wait in self._waiting.pop(key, ()):
            wait.missing.discard(key)
            asked = wait.client, wait.request.number
            if self._waits.get(asked) is wait and not wait.missing:
                # A key that was deleted since is missing again.
                wait.missing |= {each for each in wait.request.keys if each not in self._values}
                for each in wait.missing:
                    self._waiting.setdefault(each, []).append(wait)
                if not wait.missing:
                    del self._waits[asked]
                    replies.append(self._answer(wait))
        return replies

    def _answer(self, wait: _Wait) -> tuple[Client, StoreReply]:
        request = wait.request
        found = [self._values[key] for key in request.keys] if request.call == "get" else []
        return wait.client, _reply(request, tuple(found))


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
