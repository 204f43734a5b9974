"""Carries one rank's steps through the generations of a run; or takes them alone, without an agent.

A fault is handled in two places. In the gate a rank waits for the next generation, and learns from
its plan whether the step counts: then the program goes on behind the gate, and else its step is
unwound. At the begin of the next step the rank carries the plan out: only there has the program
done all that belongs to the step before.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist

from resilience.checkpointless.plan import Fallback
from resilience.checkpointless.recovery import Recovery
from resilience.comm.messages import OTHER_SHARD_STATUS, Open
from resilience.comm.page import Activity
from resilience.comm.world import drop_groups, opening_groups
from resilience.errors import BrokenError, PlacesDifferError, StateError, StateLostError
from resilience.faults.injector import InjectedFault, Injector
from resilience.inprocess.block import GROUP_DEADLINE, BlockOptions, WorkerSession, open_session
from resilience.inprocess.generation import Generation
from resilience.inprocess.handles import WorkerHandles
from resilience.inprocess.lasting import bind_groups, current_set_up, end_set_up
from resilience.inprocess.set_up import PAST_SET_UP, teller_of_notes, write_notes
from resilience.protection.drill import open_injector
from resilience.protection.first_state import (
    RankProgress,
    find_done,
    find_first_step,
    plan_first_state,
)
from resilience.protection.models import Binding
from resilience.protection.state import ProtectedState, Snapshot
from resilience.script import rank_info
from resilience.state.move import run_transfers
from resilience.state.report import SHARDS, Report
from resilience.state.transfer_buffer import TransferBuffer

_FATAL = (StateError, StateLostError)
_ABSENT = RankProgress(is_new=True, step=0, done=0, first=0)
"""Progress of a process that was started for this generation."""
_taking: Recovering | None = None
"""The engine of this process, once there is one."""


class RetryStep(BaseException):
    """Unwinds the body of a step that is run again; an `except Exception` there lets it pass."""


class Engine(Protocol):
    """How a rank's steps are committed and brought back."""

    done: int
    """The last step whose functions between steps have ended on this rank."""

    @property
    def rank(self) -> int:
        """Return this process's rank."""

    @property
    def step(self) -> int:
        """Return how many steps count."""

    def begin_at(self, step: int) -> None:
        """Begin with a state that has seen so many steps; before the first `settle`."""

    def settle(self) -> None:
        """Follow what a fault has left to do, if there was one; then all ranks are at one step."""

    def note_done(self, step: int) -> None:
        """Note that the functions after so many steps have ended on this rank."""

    def keep(self, name: str, snapshot: Snapshot) -> None:
        """Keep a copy that is restored where what comes next in this step is repeated."""

    def mark(self, activity: Activity) -> bool:
        """Show where the rank is; returns whether its generation goes on, else `settle` is due."""

    def begin_step(self) -> None:
        """Begin a forward."""

    def check(self) -> None:
        """Raise the error of a generation that is over."""

    def reach(self, place: str) -> None:
        """Let a fault of the recipe strike at a place of the step."""

    def pass_gate(self, before: Callable[[], None], place: str) -> AbstractContextManager[None]:
        """Return what the update runs in, entered, once every rank's gradients are complete.

        `before` may communicate. Raises RetryStep where the step is to be run again, StateError
        where ranks are at different places of the program.
        """

    def meet_at(self, place: str) -> None:
        """Return once all ranks are at this place; raises StateError where they are not."""

    def fail(self, error: BaseException) -> bool:
        """Note the fault of a step; returns whether it ends the run instead."""

    def finish(self) -> bool:
        """End the run's steps; returns False where another rank needs this one once more."""


class Alone:
    """A process without an agent that recovers: its first fault ends it."""

    def __init__(self, binding: Binding) -> None:
        self.rank = rank_info().rank
        self.step = self.done = 0
        binding.take_groups()

    def begin_at(self, step: int) -> None:
        """Begin with a state that has seen so many steps."""
        self.step = self.done = step

    def settle(self) -> None:
        """Do nothing."""

    def note_done(self, step: int) -> None:
        """Note that the functions after so many steps have ended."""
        self.done = max(self.done, step)

    def keep(self, name: str, snapshot: Snapshot) -> None:
        """Do nothing: no step is run again."""

    def mark(self, activity: Activity) -> bool:
        """Return True."""
        return True

    def begin_step(self) -> None:
        """Do nothing."""

    def check(self) -> None:
        """Do nothing."""

    def reach(self, place: str) -> None:
        """Do nothing."""

    def pass_gate(self, before: Callable[[], None], place: str) -> AbstractContextManager[None]:
        """Return what the update runs in; it has no gate."""
        before()
        update = self._count()
        update.__enter__()
        return update

    @contextmanager
    def _count(self) -> Iterator[None]:
        yield
        self.step += 1

    def meet_at(self, place: str) -> None:
        """Do nothing: ranks that differ wait for each other, as without protection."""

    def fail(self, error: BaseException) -> bool:
        """Return True: nothing is recovered."""
        return True

    def finish(self) -> bool:
        """Return True."""
        return True


class Recovering:
    """A rank of a run whose agents recover it.

    Made by all ranks at the end of their first set-up, and by one that takes a lost rank's place.
    """

    def __init__(self, handles: WorkerHandles, state: ProtectedState, binding: Binding) -> None:
        self._state, self._binding = state, binding
        self._snapshots: dict[str, tuple[int, Snapshot]] = {}
        self._injector: Injector | None = None
        self._error: BaseException | None = None
        self._is_due = True
        """The plan of the generation has not been carried out yet."""
        self.done = self._first = 0
        self._layout_rank: int | None = None
        self._told: list[RankProgress] = []
        self._has_ended = False
        """The run has ended, by its last step or by an error of this rank."""
        set_up = current_set_up()
        self._is_new = set_up is not None and set_up.is_replay
        longest_s, self._notes = _end_set_up()
        global _taking  # noqa: PLW0603 - a process has one place in its run
        _taking = self
        buffer = TransferBuffer(
            handles.transfer_file, handles.num_local_ranks, handles.transfer_bytes
        )
        buffer.touch()
        self._recovery = Recovery(apply=_never_apply, transfer_buffer=buffer, reach=self.reach)
        self._recovery.bind(state)
        self._session: WorkerSession = open_session(
            self._report,
            # The others wait in the opening while a new process runs its set-up.
            options=BlockOptions(
                fatal=_FATAL, group_deadline=GROUP_DEADLINE + timedelta(seconds=2 * longest_s)
            ),
            enter=self._recovery.enter,
        )
        self._members: Generation
        self._meet(self._session.begin())

    @property
    def rank(self) -> int:
        """Return this process's rank."""
        return self._members.rank

    @property
    def step(self) -> int:
        """Return how many steps count."""
        return self._recovery.step

    def begin_at(self, step: int) -> None:
        """Begin with a state that has seen so many steps; before the first `settle`."""
        self.done = self._first = step

    # ---- generations

    def _report(self, *, rank: int, node: str, generation: int) -> Report:
        own = self._recovery.report(rank=rank, node=node, generation=generation)
        rest = {SHARDS: self._binding.num_shards, PAST_SET_UP: self._progress}
        return replace(own, rest=rest)

    @property
    def _progress(self) -> RankProgress:
        return RankProgress(self._is_new, self.step, self.done, self._first)

    def _meet(self, opening: Open | None = None, error: BaseException | None = None) -> None:
        """Leave the generation that an error has ended, and enter the next one that opens."""
        while True:
            if error is not None:
                self._session.stop(self._members, error)
            try:
                self._enter(opening or self._session.wait_open())
            except Exception as problem:  # a group or the layout may fail in any way
                if not hasattr(self, "_members"):
                    raise
                if self._session.ends_run(problem, self._members) and self._session.finish(
                    self._members, problem
                ):
                    raise
                opening, error = None, problem
            else:
                self._is_due = True
                return

    def _enter(self, opening: Open) -> None:
        if self._layout_rank not in (None, opening.rank):
            # The program has made its groups, shards and samplers for the rank that it had.
            os._exit(OTHER_SHARD_STATUS)
        self._layout_rank = opening.rank
        members = self._members = self._session.make(self._in_shards(opening))
        seat = members.layout.seat(members.rank)
        self._state.take_place(seat.replica, seat.shard)
        self._injector = open_injector(self._session.handles, members)
        if teller_of_notes(opening) == members.rank:
            write_notes(self._session.link.open_store(members.number), self._notes)
        self._session.enter(members)
        with opening_groups():
            before = bind_groups()
        drop_groups(before)
        self._binding.take_groups()

    def _in_shards(self, opening: Open) -> Open:
        """Return an opening whose ranks hold what the program's mesh gives them."""
        own = self._binding.num_shards
        layout = replace(opening.layout, num_shards=own, is_sharded=own > 1)
        return replace(opening, layout=layout)

    def settle(self) -> None:
        """Follow what a fault has left to do, if there was one; then all ranks are at one step."""
        while self._error is not None or self._is_due:
            error, self._error = self._error, None
            try:
                if error is not None:
                    self._meet(error=error)
                self._carry_out()
                self._is_due = False
            except Exception as problem:
                if self.fail(problem):
                    raise

    def _carry_out(self) -> None:
        members = self._members
        members.mark(Activity.RECOVERY, self.step)
        told = self._told = self._read_progress(members)
        at, done = find_done(told)
        for name in ("step", "functions"):
            kept = self._snapshots.get(name)
            # A rank that sends its state has to be where the others begin.
            is_to_be_repeated = name == "step" or done < at
            if kept is not None and kept[0] == self.step and is_to_be_repeated:
                self._state.restore(kept[1])
        resumed = self._recovery.resume(members, self._start)
        if resumed.role != "rolled_forward":
            self._binding.clear()
        self._is_new = False
        self.done = max(done, 0) if at == self.step else min(self.done, self.step)

    def _read_progress(self, members: Generation) -> list[RankProgress]:
        """Return how far each rank was at the end of the generation before."""
        told = [each.rest.get(PAST_SET_UP) for each in members.reports]
        if any(told) and members.before is None:
            return [RankProgress(*each) if each else _ABSENT for each in told]
        # There was none: what the programs begin with has to be asked for.
        rows = torch.zeros(members.world_size, len(self._progress), dtype=torch.int64)
        rows[members.rank] = torch.tensor(self._progress)
        members.group.allreduce([rows]).wait()
        return [RankProgress(bool(is_new), *rest) for is_new, *rest in rows.tolist()]

    def _start(self, fallback: Fallback) -> int:
        """Begin with what the programs of all ranks have made.

        Torch's wrappers bring all ranks to one rank's weights in their first set-up; a process
        that has run its set-up alone is given them here.
        """
        if self.step > self._first:
            cause = self._recovery.update_error
            raise StateLostError(
                f"{fallback.reason}; start the run again, from the program's own checkpoint"
                + (f"; the last update raised {cause}" if cause else "")
            )
        members = self._members
        self._first = find_first_step(self._told)
        run_transfers(
            plan_first_state(members.layout, [each.is_new for each in self._told]),
            view=self._state,
            rank=members.rank,
            group=members.group,
            transfer_buffer=None,
            local_ranks=members.layout.local_ranks,
        )
        return self._first

    # ---- steps

    def note_done(self, step: int) -> None:
        """Note that the functions after so many steps have ended on this rank."""
        self.done = max(self.done, step)

    def keep(self, name: str, snapshot: Snapshot) -> None:
        """Keep a copy that is restored where what comes next in this step is repeated."""
        self._snapshots[name] = (self.step, snapshot)

    def mark(self, activity: Activity) -> bool:
        """Show where the rank is; returns whether its generation goes on, else `settle` is due."""
        try:
            self._members.mark(activity, self.step)
            if activity is Activity.DATA:
                self.reach("data")
        except (BrokenError, InjectedFault) as error:
            self._error = error
            return False
        return True

    def begin_step(self) -> None:
        """Begin a forward. Where the generation is over, the next `check` says so."""
        self._recovery.begin()
        self.mark(Activity.FORWARD)

    def check(self) -> None:
        """Raise the error of a generation that is over, whose step would be computed in vain."""
        if self._error is not None:
            raise self._error
        self._members.check()

    def reach(self, place: str, step: int | None = None) -> None:
        """Let a fault of the recipe strike at a place of a step; None: of the one that is taken."""
        if self._injector is not None:
            self._injector.reach(place, self.step if step is None else step)

    def pass_gate(self, before: Callable[[], None], place: str) -> AbstractContextManager[None]:
        """Return what the update runs in, entered, once every rank's gradients are complete."""
        try:
            self._members.check()
            before()
            update = self._recovery.commit(self._members, place)
            update.__enter__()
        except PlacesDifferError as error:
            raise self._name_difference(place) from error
        except _FATAL:
            raise
        except Exception as error:  # noqa: BLE001 - whatever it is, this rank has not passed
            self._error = None
            return self._follow(error)
        return update

    def _follow(self, error: Exception) -> AbstractContextManager[None]:
        """Within the gate: wait for the next generation, and do what its plan says of this rank."""
        self._meet(error=error)
        update = self._recovery.roll_forward(self._members)
        if update is None:
            self._recovery.begin()  # no later plan may end the update of this step
            raise RetryStep
        update.__enter__()
        return update

    def meet_at(self, place: str) -> None:
        """Return once all ranks are at this place of the program."""
        members, lock = self._members, self._members.lock
        try:
            members.gate.enter(self.step, lock=lock, is_current=members.is_current, place=place)
        except PlacesDifferError as error:
            raise self._name_difference(place) from error

    def _name_difference(self, place: str) -> StateError:
        """Return what to say where ranks are at different places; all of them call it."""
        members, other, found = self._members, self.rank, place
        members.store.set(f"place/{members.rank}", place)
        while found == place:
            other = (other + 1) % members.world_size
            found = members.store.get(f"place/{other}").decode()
        return StateError(
            f"this rank is at {place}, and rank {other} at {found}; all ranks have to take the "
            "same steps with the same calls and state in also=, over epochs of one length"
        )

    def fail(self, error: BaseException) -> bool:
        """Note the fault of a step; returns whether it ends the run instead."""
        if isinstance(error, RetryStep) or self._has_ended:
            return self._has_ended
        if isinstance(error, (KeyboardInterrupt, SystemExit)) and not self._members.is_current():
            return True  # the process ends, and is replaced
        if self._session.ends_run(error, self._members):
            if self._session.finish(self._members, error):
                self._has_ended = True
                return True
            error = BrokenError("another rank failed after this one had ended the run")
        self._error = error
        return False

    def finish(self) -> bool:
        """End the run's steps; returns False where another rank needs this one once more."""
        if self.mark(Activity.NOWHERE) and self._session.finish(self._members, None):
            self._has_ended = True
            return True
        self._error = self._error or BrokenError("another rank failed after this one had finished")
        return False


def _end_set_up() -> tuple[float, str]:
    """Bring the notes of all set-ups to each rank; returns the longest set-up, and the notes."""
    set_up = current_set_up()
    if set_up is None or not dist.is_initialized():
        end_set_up()
        return 0.0, "{}"
    longest = torch.tensor([time.monotonic() - set_up.begun_s], dtype=torch.float64)
    # In a replay as well: it is one of the noted collectives.
    dist.all_reduce(longest, op=dist.ReduceOp.MAX)
    end_set_up()
    if not set_up.is_replay:
        set_up.share()
    return float(longest), set_up.write_notes()


def _never_apply(step: int) -> None:
    raise AssertionError("an update is rolled forward by the program itself")


def refuse_second() -> None:
    """Raise StateError where this process takes the steps of a run already; the run ends by it."""
    if _taking is not None:
        error = StateError(
            "protect, or a Trainer's train(), a second time in this process; one takes all steps "
            "of a run, with all its models"
        )
        _taking.fail(error)
        raise error
