"""A worker's side of the local door: shards of shared memory to fill and to read.

Mappings are kept between saves: mapping a gigabyte anew costs some 0.1 s. Without torch.
"""

from __future__ import annotations

import mmap
import os
import select
import socket
import threading
import time
import uuid
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from resilience.runtime.records import read_record
from resilience.tiered.arena import SEGMENT
from resilience.tiered.attempts import BegunRun, HeldShard, KnownSteps
from resilience.tiered.errors import LostError
from resilience.tiered.frames import Frame, FrameSocket, check_owner, raise_error, rest_until
from resilience.tiered.lending import SLOWEST_BYTES_PER_S, TIMEOUT_S, Check, Draft, Loan

_CLOSE_TIMEOUT_S = 2.0
"""How long a close waits for another thread's call before it ends that, and again after it."""
_CHECK_S = 0.1
"""How often a call that waits asks whether it is still wanted."""

_MAPS_MAX = 32
"""How many segments stay mapped; what is mapped and free costs page tables, no memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOnOffer:
    """A step of which there are shards."""

    step: int
    generation: int
    num_shards: int
    """How many make it whole."""
    shards: tuple[str, ...]
    """Those that can be read, by name."""


class TieredClient(AbstractContextManager["TieredClient"]):
    """Speaks to the daemon of this node. Thread-safe: calls take turns.

    Connects on the first call, and once more where the daemon was started again
    meanwhile. Every call has a deadline and raises LostError after it, or where nobody
    listens; RefusedError for a wrong token or a namespace of another job. Without a
    namespace only `status` works. In a forked child it has a connection of its own.

    A `check` is called every now and then while a call waits. What it raises ends the call,
    and with it the connection: what was being written or read on that is given up.
    """

    def __init__(
        self,
        path: Path,
        *,
        token: str = "",
        namespace: str | None = None,
        job: str = "",
        node: str = "",
    ) -> None:
        self._path = path
        self._hello = {"op": "hello", "token": token, "node": node, "process": uuid.uuid4().hex}
        if namespace is not None:
            self._hello |= {"namespace": namespace, "job": job}
        self._lock = threading.Lock()
        self._link: _Link | None = None
        self._is_closing = False
        self.num_domains: int | None = None
        """In how many failure domains the daemon can keep a shard, as it has said last."""
        self.nameless: list[str] = []
        """Addresses of other nodes whose names do not resolve, as the daemon has said last."""
        self._maps: OrderedDict[tuple[int, int, bool], _Map] = OrderedDict()

    @property
    def namespace(self) -> str:
        """Return the namespace that the client's shards are in; empty without one."""
        return str(self._hello.get("namespace", ""))

    @property
    def job(self) -> str:
        """Return the job that has the namespace."""
        return str(self._hello.get("job", ""))

    def prepare(self, num_bytes: int) -> None:
        """Have the memory of this process's next shards made; `begin` need not wait for it then.

        Blocks until it is there, or there is no room for more. The deadline grows as that of
        `begin`. Other calls of this client wait meanwhile: use one of its own (`twin`).
        """
        limit_s = TIMEOUT_S + max(0, num_bytes) / SLOWEST_BYTES_PER_S
        self._request({"op": "prepare", "num_bytes": num_bytes}, limit_s)

    def made_bytes(self) -> int:
        """Return how much memory this node's daemon has made by now, as far as it is seen here.

        It grows while a `begin` waits for memory, and stands still where the daemon does.
        """
        with suppress(OSError), os.scandir(self._path.parent) as files:
            made = [each.stat().st_blocks for each in files if each.name.startswith(SEGMENT)]
            return sum(made) * 512
        return 0

    def twin(self) -> TieredClient:
        """Return another client of the same daemon, namespace and job, not yet connected."""
        twin = TieredClient(self._path)
        twin._hello = dict(self._hello)
        return twin

    def begin(
        self, *, step: int, generation: int, shard: str, num_shards: int, num_bytes: int
    ) -> Draft:
        """Return memory for a shard, to be filled and committed.

        The deadline grows by 8 s a GiB, for memory that has to be made. Raises HeldError,
        StaleError and VaultFullError as the vault does.
        """
        request = {
            "op": "begin",
            "step": step,
            "generation": generation,
            "shard": shard,
            "num_shards": num_shards,
            "num_bytes": num_bytes,
        }
        limit_s = TIMEOUT_S + max(0, num_bytes) / SLOWEST_BYTES_PER_S
        with self._turn(limit_s) as end_s:
            link, frame = self._ask(request, end_s)
            memory = self._open(frame, num_bytes, is_writable=True)
        return Draft(partial(self._ask_on, link), int(frame.message["segment"]), memory)

    def steps(self, *, check: Check | None = None) -> list[StepOnOffer]:
        """Return the steps of the namespace that can be read, newest first."""
        answer = self._request({"op": "steps"}, check=check)
        self._hear_peers(answer)
        return read_record(list[StepOnOffer], answer["steps"], "list of steps")

    def known_steps(self) -> KnownSteps:
        """Return what the daemon knows of all steps ever begun, and of the newest run."""
        answer = self._request({"op": "known"})
        return read_record(KnownSteps, answer["known"], "list of steps")

    def find(self, *, step: int, generation: int, shard: str) -> HeldShard:
        """Return what this node alone has of a shard."""
        request = {"op": "find", "step": step, "generation": generation, "shard": shard}
        answer = self._request(request)
        return HeldShard(digest=answer["digest"], is_being_written=bool(answer["is_being_written"]))

    def read(
        self,
        *,
        step: int,
        generation: int,
        shard: str,
        timeout_s: float = TIMEOUT_S,
        check: Check | None = None,
    ) -> Loan:
        """Return a shard's memory; KeyError where nobody has it.

        One that comes from elsewhere first takes as long as that takes: give it time.
        """
        request = {"op": "read", "step": step, "generation": generation, "shard": shard}
        with self._turn(timeout_s, check) as end_s:
            link, frame = self._ask(request, end_s, check)
            num_bytes = int(frame.message["meta"]["num_bytes"])
            memory = self._open(frame, num_bytes, is_writable=False)
        return Loan(
            partial(self._ask_on, link), int(frame.message["segment"]), memory, frame.message
        )

    def go_back(
        self,
        *,
        step: int,
        first_generation: int | None = None,
        check: Check | None = None,
    ) -> int:
        """Say that a run begins, and goes on from a step; returns where its generations begin.

        To be called before the first save by each rank of a run that was started anew, with
        step 0 where it has found nothing. The rank that decides names no number and gives the
        others the one that it gets: each save is then of that number plus the generation of
        the gate. From then on this node offers no later step of an older run, drops it, and
        refuses with StaleError who still writes one; the daemons tell each other. Idempotent
        with the number. Raises StaleError where a newer run has begun.
        """
        request = {"op": "go_back", "step": step, "first_generation": first_generation}
        return int(self._request(request, check=check)["first_generation"])

    def newest_run(self) -> BegunRun | None:
        """Return where the newest run goes on, as `go_back` has said; None where nobody has.

        For a process that is started into a run that goes on.
        """
        run = self._request({"op": "go_back"})["run"]
        return run and BegunRun(first_generation=int(run[0]), step=int(run[1]))

    def flush(self, *, step: int, generation: int) -> None:
        """Have a step sent to the store whatever its cadence says, as the last of a run.

        To be called on each node with shards of it, once they are committed. Returns at once:
        a daemon that is told to end sends it first, for a while. A no-op without a store.
        """
        self._request({"op": "flush", "step": step, "generation": generation})

    def own(
        self,
        *,
        run: str,
        name: str,
        takes_over: bool = False,
        timeout_s: float = TIMEOUT_S,
        check: Check | None = None,
    ) -> list[str]:
        """Have the store keep the namespace for one run; to be called before anything is loaded.

        `run` is the run's id, of letters and digits, `name` what a person knows it by. Idempotent.
        A run that `takes_over` gets the namespace from another, which must have ended. Returns the
        runs that had it and of which neither life nor end is seen from here. Raises RefusedError
        that names the run that has it, and TierError where the store fails.
        """
        request = {"op": "own", "run": run, "name": name, "takes_over": takes_over}
        return list(self._request(request, timeout_s, check).get("unseen", ()))

    def status(self, *, timeout_s: float = TIMEOUT_S) -> dict[str, Any]:
        """Return what the daemon says of itself: node, budget, and what it holds of whom."""
        return self._request({"op": "status"}, timeout_s)

    def await_daemon(self, timeout_s: float, check: Check | None = None) -> None:
        """Return once the daemon answers, which may be starting again, or after the time."""
        end_s = time.monotonic() + timeout_s
        while True:
            try:
                self._request({"op": "status"}, timeout_s, check)
            except LostError:
                if time.monotonic() >= end_s:
                    return
            else:
                return
            # A socket at which nothing listens tells nothing.
            time.sleep(_CHECK_S)

    def _ask_on(
        self, link: _Link, request: Mapping[str, Any], timeout_s: float, check: Check | None = None
    ) -> dict[str, Any]:
        """Ask on the connection that something was begun on; for a draft or a loan."""
        with self._turn(timeout_s, check) as end_s:
            if link is not self._link or link.pid != os.getpid():
                raise LostError("the daemon was started again, or the connection lost, meanwhile")
            try:
                answer = link.ask(request, end_s, check).message
            except LostError:
                self._hang_up()
                raise
            self._hear_peers(answer)
            return answer

    def _hear_peers(self, answer: Mapping[str, Any]) -> None:
        self.num_domains = answer.get("num_domains", self.num_domains)
        self.nameless = answer.get("nameless", self.nameless)

    def close(self) -> None:
        """End the connection; what is being written is aborted. Memory goes with its last view.

        Takes at most 4 s, also where another thread's call waits for the daemon: that ends.
        """
        if not self._lock.acquire(timeout=_CLOSE_TIMEOUT_S):
            self._is_closing = True
            if (link := self._link) is not None:
                link.frames.shut_down()
            if not self._lock.acquire(timeout=_CLOSE_TIMEOUT_S):
                return  # it is just connecting, and ends at its own deadline
        try:
            self._is_closing = False
            self._hang_up()
            self._maps.clear()
        finally:
            self._lock.release()

    def __exit__(self, *error: object) -> None:
        self.close()

    @contextmanager
    def _turn(self, timeout_s: float, check: Check | None = None) -> Iterator[float]:
        """Have a call's turn on the connection; gives the moment at which it has to be over."""
        end_s = time.monotonic() + timeout_s
        while True:
            rest_s = max(0.0, end_s - time.monotonic())
            wait_s = rest_s if check is None else min(_CHECK_S, rest_s)
            if self._lock.acquire(timeout=wait_s):
                break
            if wait_s == rest_s:
                raise LostError(f"another call has not ended within {timeout_s:.0f} s")
            assert check is not None
            check()
        try:
            yield end_s
        finally:
            self._lock.release()

    def _request(
        self,
        request: Mapping[str, Any],
        timeout_s: float = TIMEOUT_S,
        check: Check | None = None,
    ) -> dict[str, Any]:
        """Return the answer to what may be asked for twice, and opens nothing."""
        with self._turn(timeout_s, check) as end_s:
            return self._ask(request, end_s, check)[1].message

    def _ask(
        self, request: Mapping[str, Any], end_s: float, check: Check | None = None
    ) -> tuple[_Link, Frame]:
        """Ask for something that may be asked for twice."""
        may_retry = self._link is not None
        while True:
            try:
                if self._link is None or self._link.pid != os.getpid():
                    self._link = None  # a parent's is left alone
                    self._link = _Link(self._path, self._hello, end_s, check)
                return self._link, self._link.ask(request, end_s, check)
            except LostError as error:
                self._hang_up()
                is_slow = isinstance(error.__cause__, TimeoutError)
                if not may_retry or is_slow or self._is_closing:
                    raise
                may_retry = False

    def _open(self, frame: Frame, num_bytes: int, *, is_writable: bool) -> memoryview:
        """Return the memory behind the descriptor of an answer, from a map that is kept."""
        try:
            (file,) = frame.files
            status = os.fstat(file)
            if status.st_size < num_bytes:
                raise LostError(f"a segment of {status.st_size} bytes cannot hold {num_bytes}")
            key = (status.st_dev, status.st_ino, is_writable)
            known = self._maps.pop(key, None)
            if known is None and not is_writable:
                # What this process has written it can read where it lies.
                known = self._maps.get((*key[:2], True))
            if known is None:
                known = _Map(file, status.st_size, is_writable=is_writable)
            if known.is_writable == is_writable:
                self._maps[key] = known
            self._let_go_of_old()
        except (OSError, ValueError) as error:
            self._hang_up()
            raise LostError(f"cannot map the memory that the daemon gave: {error}") from error
        finally:
            frame.close()
        memory = known.memory[:num_bytes]
        return memory if is_writable else memory.toreadonly()

    def _let_go_of_old(self) -> None:
        """Forget the maps of segments that are gone, and of those not used for long."""
        for key, each in list(self._maps.items()):
            if each.is_removed():
                del self._maps[key]
        while len(self._maps) > _MAPS_MAX:
            self._maps.popitem(last=False)

    def _hang_up(self) -> None:
        if self._link is not None:
            self._link.frames.close()
            self._link = None


class _Map:
    """A segment in this process's memory."""

    def __init__(self, file: int, size: int, *, is_writable: bool) -> None:
        right = mmap.PROT_READ | (mmap.PROT_WRITE if is_writable else 0)
        flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
        self.is_writable = is_writable
        self.memory = memoryview(mmap.mmap(file, size, flags=flags, prot=right))
        self._file = os.dup(file)

    def is_removed(self) -> bool:
        """Return whether the daemon has removed the segment."""
        return os.fstat(self._file).st_nlink == 0

    def __del__(self) -> None:
        with suppress(AttributeError, OSError):
            os.close(self._file)


class _Link:
    """One connection to a daemon that has accepted our hello."""

    def __init__(
        self, path: Path, hello: Mapping[str, Any], end_s: float, check: Check | None
    ) -> None:
        self.pid = os.getpid()
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.frames = FrameSocket(connection)
        try:
            connection.settimeout(rest_until(end_s))
            connection.connect(str(path))
            check_owner(connection, path)
            self.ask(hello, end_s, check)
        except BaseException as error:
            connection.close()
            if isinstance(error, OSError):
                raise LostError(f"no daemon answers at {path}: {error}") from error
            raise

    def ask(self, request: Mapping[str, Any], end_s: float, check: Check | None = None) -> Frame:
        """Return the answer, whose files the caller has to close; raises what it says."""
        try:
            # A daemon that refuses a connection answers before it is asked.
            with suppress(BrokenPipeError):
                self.frames.send(request, timeout_s=rest_until(end_s))
            if check is not None:
                self._await_answer(end_s, check)
            frame = self._receive(end_s)
        except OSError as error:
            raise LostError(f"lost the daemon in {request['op']}: {error}") from error
        try:
            raise_error(frame.message)
        except BaseException:
            frame.close()
            raise
        return frame

    def _await_answer(self, end_s: float, check: Check) -> None:
        """Return when an answer has begun to come, or its deadline is over."""
        poll = select.poll()
        poll.register(self.frames.socket, select.POLLIN)
        while not poll.poll(1000 * min(_CHECK_S, rest_until(end_s))):
            try:
                check()
            except BaseException:
                self.frames.close()  # the answer would be taken for that to the next request
                raise

    def _receive(self, end_s: float) -> Frame:
        try:
            return self.frames.receive(timeout_s=rest_until(end_s), takes_files=True)
        except ValueError as error:
            raise ConnectionError(f"what answers is no memoryd: {error}") from error
