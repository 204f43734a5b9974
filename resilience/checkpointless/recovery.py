"""Commits steps through the gate, and brings a rank back to the newest committed one.

One object lives as long as the process, over all generations, and knows how far
its rank is. `mark` is replaced in one assignment; everything that an update
writes lies between the begin and the end of `commit`.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.distributed_c10d import Store

from resilience.checkpointless.plan import Fallback, RecoveryPlan, plan_recovery
from resilience.checkpointless.resize import plan_resize
from resilience.comm.forbid import forbid_collectives
from resilience.comm.gate import Gate
from resilience.comm.page import Activity
from resilience.errors import CorruptionError, StateLostError
from resilience.state.device import await_kernels, check_readable, on_devices
from resilience.state.digest import digest_state
from resilience.state.layout import Layout
from resilience.state.move import run_transfers
from resilience.state.report import Phase, Report
from resilience.state.shared import SharedState
from resilience.state.transfer_buffer import TransferBuffer
from resilience.state.view import Growing, StateView, ViewWithRest

_DEFERRED = (signal.SIGINT, signal.SIGTERM)


class Opening(Protocol):
    """What is known of a generation before its members have met."""

    number: int
    rank: int
    layout: Layout

    @property
    def reports(self) -> Sequence[Report]:
        """Return what every rank held at the end of the generation before."""

    @property
    def before(self) -> Layout | None:
        """Return whose ranks the reports are of, where the number of nodes has changed."""

    @property
    def keeps_state(self) -> bool:
        """Return whether the generation counts on what this process holds."""


class Members(Opening, Protocol):
    """What a recovery asks of the generation that it takes place in."""

    group: ProcessGroup
    gate: Gate

    @property
    def is_passing(self) -> bool:
        """Return whether the ranks leave the generation as soon as all have one state."""

    @property
    def store(self) -> Store:
        """Return the generation's own store."""

    @property
    def lock(self) -> AbstractContextManager[Any]:
        """Return what every break of the generation holds."""

    def is_current(self) -> bool:
        """Return whether the generation still goes on."""

    def check(self) -> None:
        """Raise BrokenError where it does not."""

    def mark(self, activity: Activity, step: int, micro_batch: int = 0) -> None:
        """Show where the training thread is; raises BrokenError as `check` does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """How far this rank is: (step, phase) and which generations made it so."""

    step: int = 0
    phase: Phase = Phase.FRESH
    step_generation: int = -1
    gradient_generation: int = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumed:
    """How a rank came to the step that the generation begins with."""

    step: int
    role: str
    """started, kept, rolled_forward or repaired."""
    reason: str
    source: int | None = None
    num_bytes: int = 0


class Recovery:
    """The part of a rank that survives generations.

    `apply` ends the update of a step from the
    gradients in memory, without a collective; it is called within `commit`'s
    rules when the rank rolls forward. `self_check_every_n_steps` compares the
    state with its digest before the gate of every nth step. `reach` is told
    where the rank is, for fault injection. `before_update` is called when the gate
    of a step is passed, which makes the state before it stable: the last moment to
    read that; what it raises ends the generation, and the rank can still roll forward.
    `keep` is called next where the state is still right: so is what was read of it.
    """

    def __init__(
        self,
        *,
        apply: Callable[[int], None],
        transfer_buffer: TransferBuffer | None = None,
        shared: SharedState | None = None,
        self_check_every_n_steps: int | None = None,
        reach: Callable[[str, int], None] | None = None,
        before_update: Callable[[], None] | None = None,
        keep: Callable[[], None] | None = None,
    ) -> None:
        self.mark = Mark()
        self.rest: dict[str, Any] = {}
        """Small data that goes with the committed state, such as the last step's loss."""
        self.pending: dict[str, Any] = {}
        """What becomes `rest` when the update of this step has ended."""
        self._apply = apply
        self._transfer_buffer = transfer_buffer
        self._shared = shared
        self._is_prepared = shared is None
        """The other ranks of the node can be read, or there is no shared memory."""
        self._every = self_check_every_n_steps
        self._reach = reach or (lambda place, step: None)
        self._before_update = before_update or (lambda: None)
        self._keep = keep or (lambda: None)
        self._view: StateView | None = None
        self._on_devices: list[Tensor] = []
        self._member_generation = -1
        self._layout: Layout | None = None
        self._digest: str | None = None
        self._is_healthy = True
        self._is_guarded = False
        self._has_trained = False
        """An update has written to the state that this process has made or loaded."""
        self._whole_step: int | None = None
        """Updates of the whole state in memory; None where the memory may hold parts of two."""
        self._update_error = ""

    @property
    def step(self) -> int:
        """Return how many updates this rank's memory has seen."""
        return self.mark.step

    @property
    def update_error(self) -> str:
        """Return what the last update has raised; empty where it has ended."""
        return self._update_error

    @property
    def step_generation(self) -> int:
        """Return the generation whose gradients made the last of them; -1 where none did."""
        return self.mark.step_generation

    def take_rest(self, rest: dict[str, Any]) -> None:
        """Take over the `rest` of a state that was loaded or made."""
        self.rest = rest

    def pend(self, values: dict[str, Any]) -> None:
        """Have values become a part of `rest` when the update of this step has ended."""
        self.pending = values

    def bind(self, view: StateView) -> None:
        """Take the state that all else is about; before each `resume`."""
        self._view = view
        self._on_devices = on_devices([each.tensor for each in view.tensors()])

    # ---- reports

    def enter(self, opening: Opening) -> None:
        """Note that this process is a member of a generation, before anything else in it.

        What it holds counts as nothing where the others went on without it: its own report in the
        opening is fresh then.
        """
        if not opening.keeps_state:
            self.mark = Mark()
        self._member_generation, self._layout = opening.number, opening.layout
        plan = _plan(opening)
        if isinstance(plan, RecoveryPlan) and opening.rank in plan.roll_forward:
            # Who proves that the gate was passed may be gone before this rank has ended its update.
            self.mark = replace(self.mark, phase=Phase.PASSED)

    def report(self, *, rank: int, node: str, generation: int) -> Report:
        """Return what this rank holds; only after its training thread has stopped.

        What is on a device is read before. Raises DeviceLostError where that fails: the rank holds
        nothing then, and its process has to end.
        """
        assert self._layout is not None
        check_readable(self._on_devices)
        seat = self._layout.seat(rank)
        return Report(
            rank=rank,
            node=node,
            generation=generation,
            replica=seat.replica,
            shard=seat.shard,
            phase=self.mark.phase,
            step=self.mark.step,
            step_generation=self.mark.step_generation,
            gradient_generation=self.mark.gradient_generation,
            member_generation=self._member_generation,
            is_healthy=self._is_healthy,
            digest=self._digest,
        )

    # ---- recovery

    def resume(self, members: Members, start: Callable[[Fallback], int]) -> Resumed:
        """Bring this rank to the state that the generation begins with.

        Called by every rank. `start` makes the first state, or loads one, in
        place, where no replica can help; it returns the step and is called on
        every rank or none. Raises StateLostError, which ends the run, where a trained state
        is after `start` what it was before.
        """
        assert self._view is not None
        members.mark(Activity.RECOVERY, self.mark.step)
        plan = _plan(members)
        if isinstance(plan, Fallback):
            resumed = self._start(plan, start, members.layout.seat(members.rank).local_rank)
            has_transfers = False
        else:
            resumed = self._carry_out(plan, members, self._view)
            has_transfers = bool(plan.transfers)
        if has_transfers or members.is_passing:
            # The slowest transfer may take longer than a rank may be without progress, and who
            # leaves a generation ends it for those that have no state yet.
            members.mark(Activity.WAITING, resumed.step)
            members.group.allreduce([torch.zeros(1)]).wait()
        return resumed

    def roll_forward(self, members: Members) -> AbstractContextManager[None] | None:
        """Return what the rest of this rank's update runs in; None where its step is repeated.

        For a caller whose update is not `apply`; `resume` is called after the block.
        """
        plan = _plan(members)
        if not isinstance(plan, RecoveryPlan) or members.rank not in plan.roll_forward:
            return None
        self._check_digest(self.mark.step)
        return self._update(self.mark.step)

    def _start(
        self, fallback: Fallback, start: Callable[[Fallback], int], local_rank: int
    ) -> Resumed:
        self.mark = replace(self.mark, phase=Phase.TORN_REPAIR)
        # Not emptied: a save that is under way may hold them.
        self.rest, self.pending = {}, {}
        step = self._make_state(fallback, start)
        if self._shared is not None and self._view is not None:
            self._shared.adopt(self._view, local_rank)
        self._settle(step, step_generation=-1)
        return Resumed(step=step, role="started", reason=fallback.reason)

    def _make_state(self, fallback: Fallback, start: Callable[[Fallback], int]) -> int:
        """Have `start` make the state; returns its step."""
        assert self._view is not None
        whole_step, self._whole_step = self._whole_step, None
        before = self._trace() if self._has_trained else None
        step = start(fallback)
        # A checkpoint of the step that this rank holds has the bits that are in memory already.
        if before is not None and step != whole_step and self._trace() == before:
            cause = f"; the last update raised {self._update_error}" if self._update_error else ""
            raise StateLostError(
                f"{fallback.reason}, and `start` returned step {step} without writing to the "
                f"trained tensors; have it make or load the state of that step{cause}"
            )
        self._has_trained, self._update_error = False, ""
        return step

    def _trace(self) -> tuple[str, int]:
        """Return what a write to the state changes, also one of the same bits by torch."""
        assert self._view is not None
        num_writes = sum(each.tensor._version for each in self._view.tensors())  # noqa: SLF001
        return digest_state(self._view), num_writes

    def _carry_out(self, plan: RecoveryPlan, members: Members, view: StateView) -> Resumed:
        rank = members.rank
        role, source, num_bytes = "kept", None, 0
        if rank in plan.roll_forward:
            role = "rolled_forward"
        if rank in plan.roll_forward and self.mark.step < plan.step:
            # What was changed while this rank waited would be updated, and noted as right.
            self._check_digest(self.mark.step)
            with self._update(self.mark.step):
                self._apply(self.mark.step)
        for each in plan.transfers:
            if each.target == rank:
                role, source, self._whole_step = "repaired", each.source, None
                self.mark = replace(self.mark, phase=Phase.TORN_REPAIR)
        self._reach("recovery", plan.step)
        if role != "repaired":
            # Who sends a changed state would spread it.
            self._check_digest(plan.step)
        elif self._shared is not None:
            self._shared.adopt(view, members.layout.seat(rank).local_rank, is_overwritten=True)
        if plan.transfers:
            num_bytes = self._move(plan, members, view)
        if role == "repaired":
            self._has_trained = True
            self._settle(plan.step, step_generation=plan.step_generation)
            self._is_prepared = self._shared is None
        self._prepare()
        return Resumed(
            step=plan.step, role=role, reason=plan.reason, source=source, num_bytes=num_bytes
        )

    def _move(self, plan: RecoveryPlan, members: Members, view: StateView) -> int:
        """Do this rank's part of the transfers; returns how many bytes passed through it."""

        def show_progress(number: int) -> None:
            members.mark(Activity.RECOVERY, plan.step)

        if isinstance(view, Growing):
            _grow(plan, members, view)
        if any(each.target == members.rank for each in plan.transfers):
            # Its source may have others to serve first.
            members.mark(Activity.WAITING, plan.step)
        result = run_transfers(
            [(each.source, each.target, each.is_same_node) for each in plan.transfers],
            view=ViewWithRest(view, self),
            rank=members.rank,
            group=members.group,
            transfer_buffer=self._transfer_buffer,
            shared=self._shared,
            local_ranks=members.layout.local_ranks,
            on_chunk=show_progress,
            on_sent=show_progress,
        )
        return result.num_bytes

    def _prepare(self) -> None:
        """Map what the other ranks of the node hold, before a repair needs it in a hurry."""
        if not self._is_prepared and self._shared is not None:
            # Without a map of them a repair goes through the transfer buffer, and is as right.
            with suppress(OSError):
                self._shared.prepare()
            self._is_prepared = True

    def _settle(self, step: int, *, step_generation: int) -> None:
        """Note that the memory holds a whole state again."""
        self._is_healthy, self._whole_step = True, step
        self._note_digest(step)
        self.mark = Mark(step=step, phase=Phase.COMPUTING, step_generation=step_generation)

    # ---- steps

    def begin(self) -> None:
        """Begin a forward: gradients and a passed gate of before are valid no more."""
        self.mark = replace(self.mark, phase=Phase.COMPUTING, gradient_generation=-1)

    @contextmanager
    def commit(self, members: Members, place: str = "") -> Iterator[None]:
        """Pass the gate, then run the block, which ends the update of this step.

        All that changes gradients was called before, on this rank as on every
        other; what a device still has to do of it is waited for here. The block
        may hold no collective. Raises BrokenError where the gate was not passed,
        CorruptionError where this rank's state is not what its last update left,
        PlacesDifferError where ranks are at different places of their program.
        """
        step = self.mark.step
        await_kernels(self._on_devices)
        self.mark = replace(self.mark, phase=Phase.REDUCED, gradient_generation=members.number)
        members.mark(Activity.GATE, step)
        self._reach("gate", step)
        self._check_digest(step)
        self.mark = replace(self.mark, phase=Phase.ENTERED)
        members.gate.enter(step, lock=members.lock, is_current=members.is_current, place=place)
        self.mark = replace(self.mark, phase=Phase.PASSED)
        self._reach("before_update", step)
        self._before_update()
        # What was changed since the check before the gate would be kept, updated, noted as right.
        self._check_digest(step)
        self._keep()
        members.mark(Activity.UPDATE, step)
        with self._update(step):
            yield
        # All ranks have passed a gate, so all have their place.
        self._prepare()
        self._reach("after_update", step)

    @contextmanager
    def _update(self, step: int) -> Iterator[None]:
        """Run an update: it ends, or the rank is torn."""
        guard = nullcontext() if self._is_guarded else forbid_collectives()
        torn = replace(self.mark, phase=Phase.TORN_UPDATE)
        with _without_signals():
            before, self.mark = self.mark, torn
            self._has_trained, self._whole_step = True, None
            try:
                with guard:
                    yield
            except Exception as error:
                self._update_error = f"{type(error).__name__}: {error}"
                raise
            self._is_guarded, self._whole_step = True, step + 1
            self._note_digest(step + 1)
            self.rest, self.pending = {**self.rest, **self.pending}, {}
            self.mark = Mark(
                step=step + 1,
                phase=Phase.COMPUTING,
                step_generation=before.gradient_generation,
            )

    # ---- digests

    def _note_digest(self, step: int) -> None:
        if self._every is not None and step % self._every == 0:
            assert self._view is not None
            self._digest = digest_state(self._view)
        else:
            self._digest = None

    def check(self) -> None:
        """Raise CorruptionError where the state is not what the last update left.

        For the end of a run, after which no gate follows.
        """
        self._check_digest(self.mark.step)

    def distrust(self) -> None:
        """Have this rank's state count as unhealthy: another holder of its shard repairs it."""
        self._is_healthy = False

    def _check_digest(self, step: int) -> None:
        if self._digest is None or self._view is None:
            return
        if (found := digest_state(self._view)) != self._digest:
            noted, self._digest = self._digest, None
            self._is_healthy = False
            raise CorruptionError(
                f"the state of step {step} has the digest {found}, and had {noted} when its "
                "last update ended; something has changed it since"
            )


def _grow(plan: RecoveryPlan, members: Members, view: Growing) -> None:
    """Have the targets make the tensors that their sources have made while they trained."""
    for each in plan.transfers:
        key = f"tensors/{each.target}"
        if each.source == members.rank:
            members.store.set(key, view.describe())
        elif each.target == members.rank:
            view.grow(members.store.get(key).decode())


def _plan(opening: Opening) -> RecoveryPlan | Fallback:
    if opening.before is None:
        return plan_recovery(opening.reports)
    return plan_resize(opening.reports, before=opening.before, after=opening.layout)


@contextmanager
def _without_signals() -> Iterator[None]:
    """Have Python's handlers of signals, which may raise, wait for the end of the block.

    To mask the signals would not do: another thread would take them, and Python
    runs their handlers in the main thread all the same.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    noted: list[int] = []
    handlers = {number: signal.getsignal(number) for number in _DEFERRED}
    taken = [number for number, handler in handlers.items() if callable(handler)]
    for number in taken:
        signal.signal(number, lambda number, frame: noted.append(number))
    try:
        yield
    finally:
        for number in taken:
            signal.signal(number, handlers[number])
        for each in noted:
            signal.raise_signal(each)
