"""The connection that a daemon keeps to another one: says what is held here, and sends it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from resilience.runtime.tls import explain_tls
from resilience.tiered.catalog import Copy, StepAt
from resilience.tiered.errors import HeldError, RefusedError, StaleError, TieredError
from resilience.tiered.frames import raise_error
from resilience.tiered.memoryd.notes import NodeNotes
from resilience.tiered.memoryd.output import complain
from resilience.tiered.memoryd.peer_house import OwnState, PeerHouse
from resilience.tiered.memoryd.peer_plan import Held, StepKey, choose_next, plan_pushes, step_key
from resilience.tiered.memoryd.peer_wire import (
    ROWS_MAX,
    PeerSocket,
    describe_shard,
    memory_timeout_s,
    send_shard,
    step_back,
)
from resilience.tiered.shard import ShardId
from resilience.tiered.vault import show

_BACKOFF_FIRST_S = 0.1
_BACKOFF_MAX_S = 5.0
_ROUND_S = 0.03
"""How long one round of a link takes at least, where it waits at its end."""
_PINGS = 4
"""How often this node is heard of within the time after which it would be gone."""

_PAUSE_S: Mapping[type[Exception], float] = {HeldError: 2.0, StaleError: 60.0, RefusedError: 60.0}
"""When a shard that was not taken is offered again, if nothing changes there before."""
_PAUSE_FULL_S = 30.0
_FAILED_FIRST_S = 0.1
_FAILED_MAX_S = 60.0


@dataclass(slots=True)
class _Pause:
    """A shard that was not taken, and waits."""

    until_s: float = 0.0
    version: int | None = None
    """The inventory that it waits for a change of; None: it waits for the time alone."""
    num_failed: int = 0
    """How often in a row the way has failed it."""


Pauses = dict[ShardId, _Pause]


class Link:
    """A thread that keeps a connection to one node, from `start` to `close`."""

    def __init__(self, house: PeerHouse, name: str) -> None:
        self._house = house
        self._name = name
        self._is_closed = threading.Event()
        self._retry = threading.Event()
        self._connection: PeerSocket | None = None
        self._complaint = ""
        self._pauses: Pauses = {}
        self._thread = threading.Thread(target=self._run, name=f"peer-{name}", daemon=True)

    def start(self) -> None:
        """Begin to connect."""
        self._thread.start()

    def retry(self) -> None:
        """Connect at once if there is no connection: the other node is there."""
        self._retry.set()

    def close(self) -> None:
        """End the connection, as soon as the directory wakes the thread."""
        self._is_closed.set()
        self._retry.set()

    def join(self, cut_s: float, end_s: float) -> None:
        """Wait for the thread until `end_s`; whatever it does at `cut_s` is cut off."""
        if self._thread.ident is None:
            return
        self._thread.join(max(0.0, cut_s - time.monotonic()))
        if self._thread.is_alive() and (connection := self._connection):
            connection.shut_down()
            self._thread.join(max(0.0, end_s - time.monotonic()))

    def _run(self) -> None:
        step_back()
        backoff_s = _BACKOFF_FIRST_S
        while not self._is_closed.is_set():
            self._retry.clear()
            try:
                connection = self._dial()
                backoff_s = _BACKOFF_FIRST_S
                self._serve(connection)
            except (OSError, ValueError, KeyError, TieredError) as error:
                self._complain(f"no connection to node {self._name}: {explain_tls(error)}")
            self._house.directory.look()
            if self._is_closed.is_set() or self._retry.wait(backoff_s):
                continue
            backoff_s = min(2 * backoff_s, _BACKOFF_MAX_S)

    def _dial(self) -> PeerSocket:
        """Connect; while that fails nobody waits for what this node would be told."""
        unreachable = self._house.unreachable
        try:
            # It may be another address than the last time.
            node = self._house.directory.find(self._name)
            assert node is not None, "nodes are never forgotten"
            connection = self._house.dial(node, is_link=True)
        except BaseException:
            if self._name not in unreachable:
                unreachable.add(self._name)
                self._house.directory.stir()
            raise
        unreachable.discard(self._name)
        return connection

    def _serve(self, connection: PeerSocket) -> None:
        self._connection = connection
        try:
            Talk(self._house, self._name, connection, self._pauses, self._complain).go_on(
                self._is_closed
            )
        finally:
            self._connection = None
            connection.close()

    def _complain(self, text: str) -> None:
        """Tell it, but not again and again."""
        if text != self._complaint and not self._is_closed.is_set():
            self._complaint = text
            complain(text)


class Talk:
    """What is said over one connection, from its begin to its end. One thread."""

    def __init__(
        self,
        house: PeerHouse,
        peer: str,
        connection: PeerSocket,
        pauses: Pauses,
        say: Callable[[str], None],
    ) -> None:
        self._house = house
        self._peer = peer
        self._connection = connection
        self._say = say
        self._told: Mapping[ShardId, Copy] = {}
        self._told_state: OwnState | None = None
        self._told_complete: Mapping[str, Sequence[StepAt]] = {}
        self._told_notes: NodeNotes | None = None
        self._current: StepKey | None = None
        self._served: dict[str, int] = {}
        self._num_sent = 0
        self._pauses = pauses
        self._is_known_there = False
        self._asked_s = 0.0

    def go_on(self, is_closed: threading.Event) -> None:
        """Tell, send and be heard of until the connection fails or is closed."""
        directory = self._house.directory
        ping_s = self._house.settings.gone_s / _PINGS
        while not is_closed.is_set():
            round_s = time.monotonic() + _ROUND_S
            seen, seen_own = directory.wait(-1, 0.0), directory.own_changes
            self._tell()
            is_target = self._peer in self._house.targets.names()
            waiting = self._waiting() if is_target else []
            if chosen := choose_next(waiting, self._current, self._served):
                self._send(chosen)
                continue
            rest_s = self._asked_s + ping_s - time.monotonic()
            if rest_s <= 0:
                self._ask({"op": "ping"})
                directory.look()
                continue
            rest_s = self._rest_s(rest_s)
            if is_target:
                directory.wait(seen, rest_s)
            else:
                directory.wait_own(seen_own, rest_s)
            # What changes in quick succession is told at once: there are hundreds of links.
            is_closed.wait(max(0.0, round_s - time.monotonic()))
        with suppress(OSError, ValueError, TieredError):
            self._connection.ask({"op": "bye"}, timeout_s=1.0)

    def _rest_s(self, rest_s: float) -> float:
        """Return when to look again though nothing changes, which is soon enough at `rest_s`."""
        now_s = time.monotonic()
        until_s = [each.until_s - now_s for each in self._pauses.values() if each.until_s > now_s]
        targets_s = self._house.targets.rest_s()
        return max(0.0, min([rest_s, *until_s, rest_s if targets_s is None else targets_s]))

    def _ask(self, message: Mapping[str, object]) -> None:
        self._connection.ask(message, timeout_s=2 * self._house.settings.gone_s)
        self._asked_s = time.monotonic()

    def _tell(self) -> None:
        """Tell what is held here: all of it first, then what has changed."""
        house = self._house
        taken = house.pop_taken(self._peer)
        state = house.own_state()
        if state is self._told_state and taken <= state.copies.keys():
            return
        # Notes first: they say how what is held is to be taken.
        if state.notes is not self._told_notes and state.notes != self._told_notes:
            self._ask({"op": "notes", "notes": state.notes})
        self._told_notes = state.notes
        if house.num_told.get(self._peer) != state.num_notes:
            house.num_told[self._peer] = state.num_notes
            house.directory.stir()
        self._tell_complete(state)
        self._tell_copies(state, taken)
        self._told_state = state

    def _tell_copies(self, state: OwnState, taken: set[ShardId]) -> None:
        copies = state.copies
        new = [each for name, each in copies.items() if self._told.get(name) is not each]
        gone = [each for each in {*self._told, *taken} if each not in copies]
        parts = [new[begin : begin + ROWS_MAX] for begin in range(0, len(new), ROWS_MAX)]
        if not self._is_known_there:
            for number, part in enumerate(parts or [[]]):
                self._tell_part(
                    state,
                    part,
                    {
                        "op": "inventory",
                        "is_first": number == 0,
                        "is_last": number >= len(parts) - 1,
                        "lost": self._house.vault.lost(),
                    },
                )
            self._is_known_there = True
        else:
            for part in parts:
                self._tell_part(state, part, {"op": "changes", "gone": []})
            for begin in range(0, len(gone), ROWS_MAX):
                # What went because it was damaged is wanted again.
                lost, rows = self._house.vault.lost(), gone[begin : begin + ROWS_MAX]
                self._tell_part(state, [], {"op": "changes", "gone": rows, "lost": lost})
        self._told = copies

    def _tell_complete(self, state: OwnState) -> None:
        """Tell which steps were complete here: a node that begins anew offers them, too."""
        if state.complete != self._told_complete:
            message = {"op": "changes", "gone": [], "complete": state.complete}
            self._tell_part(state, [], message)
            self._told_complete = state.complete

    def _tell_part(self, state: OwnState, part: list[Copy], message: Mapping[str, object]) -> None:
        names = {each.meta_id.namespace for each in part}
        jobs = {name: job for name, job in state.jobs.items() if name in names}
        self._ask({**message, "copies": part, "jobs": jobs})

    def _waiting(self) -> list[Held]:
        """Return what is to be sent and may be offered now, to a node that is chosen."""
        house, own = self._house, self._house.settings.own
        held = [
            Held(id=name, digest=copy.digest, origin=house.origins.of(name) or own.name)
            for name, copy in self._told.items()
        ]
        wanted = plan_pushes(
            own.name,
            held,
            house.directory.views(house.jobs()),
            target=self._peer,
            replicas=house.settings.replicas,
            holds_instead=house.settings.holds_instead,
        )
        names = {each.id for each in wanted}
        for name in self._pauses.keys() - names:
            del self._pauses[name]
        return [each for each in wanted if not self._is_paused(each.id)]

    def _is_paused(self, shard_id: ShardId) -> bool:
        pause = self._pauses.get(shard_id)
        if pause is None or time.monotonic() >= pause.until_s:
            return False
        return pause.version in (None, self._house.directory.version_of(self._peer))

    def _send(self, shard: Held) -> None:
        """Send a shard, or put it off."""
        self._num_sent += 1
        self._served[shard.id.namespace] = self._num_sent
        self._current = step_key(shard.id)
        version = self._house.directory.version_of(self._peer)
        try:
            is_intact = self._push(shard)
        except KeyError:  # dropped meanwhile
            return
        except (OSError, ValueError):
            self._fail(shard.id)
            raise
        except TieredError as error:
            if not isinstance(error, (StaleError, HeldError)):
                self._say(f"node {self._peer} does not take {show(shard.id)}: {error}")
            pause_s = _PAUSE_S.get(type(error), _PAUSE_FULL_S)
            waits_for_change = not isinstance(error, (StaleError, RefusedError))
            self._pause(shard.id, pause_s, version if waits_for_change else None)
        else:
            if is_intact:
                copy = replace(self._told[shard.id], place=self._peer, is_passing=False)
                self._house.directory.note_copy(self._peer, copy, version)
            else:
                self._distrust(shard.id)
        self._asked_s = time.monotonic()

    def _push(self, shard: Held) -> bool:
        """Send a shard; returns whether it is there, False where it did not come intact."""
        with self._house.vault.read(shard.id) as reading:
            meta = reading.meta
            timeout_s = memory_timeout_s(meta.num_bytes)
            message = {
                "op": "push",
                "shard": describe_shard(meta),
                "job": self._house.vault.job_of(meta.id.namespace),
                "origin": shard.origin,
            }
            if self._connection.ask(message, timeout_s=timeout_s).get("is_held"):
                return True
            if not send_shard(self._connection, reading):
                return False
            raise_error(self._connection.receive(timeout_s=timeout_s).message)
            return True

    def _distrust(self, shard_id: ShardId) -> None:
        """See whether the copy here is at fault, or the way."""
        self._say(f"{show(shard_id)} did not come intact to node {self._peer}")
        self._fail(shard_id)
        with suppress(KeyError):
            if not self._house.vault.check(shard_id):
                self._say(f"{show(shard_id)} is damaged here and was dropped")

    def _pause(self, shard_id: ShardId, pause_s: float, version: int | None) -> None:
        pause = self._pauses.setdefault(shard_id, _Pause())
        pause.until_s, pause.version = time.monotonic() + pause_s, version

    def _fail(self, shard_id: ShardId) -> None:
        """Put a shard off for longer each time, so that it never stands in the others' way."""
        pause = self._pauses.setdefault(shard_id, _Pause())
        pause.until_s = time.monotonic() + min(
            _FAILED_FIRST_S * 2.0**pause.num_failed, _FAILED_MAX_S
        )
        pause.version, pause.num_failed = None, pause.num_failed + 1
