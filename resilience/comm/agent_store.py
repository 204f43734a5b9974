"""A generation's store as torch uses it: calls go over the link to the agent, which passes them on.

torch calls it from any thread, C++ among them, and holds no Python reference: a store of Python
whose last reference is gone ends the process with an internal assert of torch's. So each store of
this process is kept. A call ends with its answer, its time-out or its generation.
"""

from __future__ import annotations

import base64
import itertools
import os
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta

from torch.distributed import DistStoreError
from torch.distributed.distributed_c10d import Store

from resilience.comm.messages import Message, StoreCall, StoreReply, StoreRequest, encode
from resilience.errors import BrokenError

VALUE_BYTES_MAX = 16 << 20
CALL_BYTES_MAX = 32 << 20
"""Keys and values of one call, as they travel."""
_UNANSWERED = 0
"""Number of all calls that wait for no reply: one is told only of a problem."""

_kept: list[AgentStore] = []


class AgentStore(Store):
    """The store of one generation.

    `send` takes requests, from any thread, and `take` gets the replies. Beside what each method
    says, all raise BrokenError once the generation has ended, and DistStoreError after the time-out
    (`set_timeout`, or a `wait`'s own), in a forked process, and for more than there is room for.
    """

    def __init__(self, generation: int, send: Callable[[Message], None]) -> None:
        super().__init__()
        self.generation = generation
        self._send = send
        self._pid = os.getpid()
        self._numbers = itertools.count(1)
        self._calls: dict[int, tuple[threading.Lock, list[StoreReply]]] = {}
        """Calls that wait. The thread that takes one out releases its lock, with a reply or not.

        SimpleQueue's `get` waits for ever where a signal's handler returns after its time-out.
        """
        self._is_broken = False
        self._problem = ""
        """Of a call that waits for no reply; the next call fails with the problem."""
        _kept.append(self)

    def take(self, reply: StoreReply) -> None:
        """Take in what the agent says; replies of an earlier generation may still come."""
        if reply.generation != self.generation:
            return
        if call := self._calls.pop(reply.number, None):
            call[1].append(reply)
            call[0].release()
        elif reply.number == _UNANSWERED:
            self._problem = reply.problem

    def break_now(self) -> None:
        """End all calls, now and later; from any thread."""
        self._is_broken = True
        for number in list(self._calls):
            if call := self._calls.pop(number, None):
                call[0].release()

    # ---- what torch calls, by these names

    def set(self, key: str, value: bytes | str) -> None:  # noqa: D102
        self._tell("set", [key], [value])

    def multi_set(self, keys: Sequence[str], values: Sequence[bytes | str]) -> None:  # noqa: D102
        if len(keys) != len(values):
            raise ValueError(f"{len(keys)} keys have {len(values)} values; allowed: as many")
        if keys:
            self._tell("set", keys, values)

    def append(self, key: str, value: bytes | str) -> None:  # noqa: D102
        self._tell("append", [key], [value])

    def get(self, key: str) -> bytes:  # noqa: D102
        return self.multi_get([key])[0]

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:  # noqa: D102
        return [base64.b64decode(each) for each in self._ask("get", keys)]

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:  # noqa: D102
        self._ask("wait", keys, timeout=timeout)

    def check(self, keys: Sequence[str]) -> bool:  # noqa: D102
        return bool(self._ask("check", keys))

    def add(self, key: str, amount: int) -> int:  # noqa: D102
        return int(base64.b64decode(self._ask("add", [key], [str(amount)])[0]))

    def compare_set(self, key: str, expected: bytes | str, wanted: bytes | str) -> bytes:  # noqa: D102
        return base64.b64decode(self._ask("compare_set", [key], [expected, wanted])[0])

    def delete_key(self, key: str) -> bool:  # noqa: D102
        return bool(self._ask("delete", [key]))

    def num_keys(self) -> int:  # noqa: D102
        return int(base64.b64decode(self._ask("count", [])[0]))

    def has_extended_api(self) -> bool:  # noqa: D102
        return True

    def clone(self) -> AgentStore:
        """Return the store itself: it serves any number of threads, and ends for all together."""
        return self

    # As C++ calls them.
    deleteKey, getNumKeys, hasExtendedApi = delete_key, num_keys, has_extended_api  # noqa: N815

    # ---- calls

    def _ask(
        self,
        call: StoreCall,
        keys: Sequence[str],
        values: Sequence[bytes | str] = (),
        timeout: timedelta | None = None,
    ) -> tuple[str, ...]:
        self._check()
        number, has_ended, replies = next(self._numbers), threading.Lock(), list[StoreReply]()
        has_ended.acquire()
        self._calls[number] = has_ended, replies
        try:
            # Again: a break from here on finds the call.
            self._check()
            self._request(call, number, keys, values)
            timeout_set = self.timeout  # type: ignore[attr-defined]
            wait_s = (timeout or timeout_set).total_seconds()
            if not has_ended.acquire(timeout=wait_s):
                names = ", ".join(keys[:3]) + (", ..." if len(keys) > 3 else "")
                raise DistStoreError(f"wait timeout after {wait_s:g} s, keys: {names}")
        finally:
            # Also where a signal's handler has raised.
            if self._calls.pop(number, None) and not self._is_broken:
                self._request("cancel", number, (), ())
        if not replies:
            raise BrokenError("the generation ended during a call of its store")
        (reply,) = replies
        if reply.problem:
            raise DistStoreError(reply.problem)
        return reply.values

    def _tell(self, call: StoreCall, keys: Sequence[str], values: Sequence[bytes | str]) -> None:
        self._check()
        self._request(call, _UNANSWERED, keys, values)

    def _request(
        self, call: StoreCall, number: int, keys: Sequence[str], values: Sequence[bytes | str]
    ) -> None:
        for key, value in zip(keys, values, strict=False):
            if len(value) > VALUE_BYTES_MAX:
                raise DistStoreError(
                    f"the value of {key!r} has {len(value)} bytes; allowed: {VALUE_BYTES_MAX}"
                )
        request = StoreRequest(
            generation=self.generation,
            number=number,
            call=call,
            keys=tuple(keys),
            values=tuple(map(_encode, values)),
        )
        if (num_bytes := len(encode(request))) > CALL_BYTES_MAX:
            raise DistStoreError(
                f"{call} of {len(keys)} keys takes {num_bytes} bytes; allowed: {CALL_BYTES_MAX}"
            )
        self._send(request)

    def _check(self) -> None:
        if os.getpid() != self._pid:
            raise DistStoreError(
                "the store belongs to the process that opened its generation, not to its children"
            )
        if self._is_broken:
            raise BrokenError("the generation has ended")
        if problem := self._problem:
            self._problem = ""
            raise DistStoreError(problem)


def _encode(value: bytes | str) -> str:
    return base64.b64encode(value if isinstance(value, bytes) else value.encode()).decode()
