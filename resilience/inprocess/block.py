"""Run a block of code again, in the same process, under each generation.

    run = reexecutable(train, report=recovery.report)
    run()

The block gets the generation that it runs in. A fault anywhere ends it
everywhere: on this rank by the exception itself, on the others by breaking the
collectives that they wait in. Then every rank reports what it holds, and the
block runs again under the next generation. What the block closes over stays in
memory; what refers to a process group it makes again.
"""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol, TypeVar

from resilience.comm.messages import (
    CLOSED_CONNECTION,
    GAVE_UP_STATUS,
    PLANNED,
    Break,
    End,
    Failed,
    Finished,
    Open,
    Ready,
    SaveState,
    StateSaved,
    Stopped,
)
from resilience.comm.page import Activity, Page
from resilience.errors import (
    BrokenError,
    CorruptionError,
    GroupOpenError,
    PlannedError,
    ResilienceError,
    StateLostError,
)
from resilience.inprocess.generation import Generation
from resilience.inprocess.handles import WorkerHandles, read_handles
from resilience.inprocess.link import AgentLink
from resilience.inprocess.plain import open_link, take_opening
from resilience.inprocess.variables import rank_variables
from resilience.state.report import Report

T = TypeVar("T")
R = TypeVar("R")
GROUP_DEADLINE = timedelta(seconds=30)
COLLECTIVE_DEADLINE = timedelta(minutes=30)
BAD_REPORT_STATUS = 71
"""Exit status of a worker whose `on_fault` or report failed; the agent replaces it."""


class GaveUp(SystemExit):
    """Ends a generation that was opened to save the state, and the run with it.

    `reason` says where the state lies. Raised when nothing more is to be done on any rank: the
    first that hears of it ends the run.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(GAVE_UP_STATUS)
        self.reason = reason


class Reporter(Protocol):
    """Tells the other ranks what this rank holds."""

    def __call__(self, *, rank: int, node: str, generation: int) -> Report:
        """Return the report; called after the block has stopped.

        A process in which it raises is replaced: it holds nothing that others could count on.
        """


class SaveAlone(Protocol):
    """Saves what this rank holds while no generation opens, and changes none of it."""

    def __call__(self, order: SaveState, check: Callable[[], None]) -> StateSaved:
        """Return what came of it; whatever it raises is told as the problem.

        `check` is called every now and then, and raises BrokenError where something else is to be
        done at once.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockOptions:
    """How a block is run."""

    device_type: str = "cpu"
    group_deadline: timedelta = GROUP_DEADLINE
    """How long the ranks may take to form their process group."""
    collective_deadline: timedelta = COLLECTIVE_DEADLINE
    """The time-out of collectives; hangs are found earlier, by their lack of progress."""
    fatal: tuple[type[BaseException], ...] = ()
    """Errors that would come again: they end the run with their `exit_status`, or 1."""
    is_all: bool = False
    """Nothing that anybody needs comes after the block. Once it has returned on all ranks the run
    has succeeded, whatever then ends a process; else each process has to end with status 0."""


def reexecutable(
    block: Callable[[Generation], T],
    *,
    report: Reporter,
    on_fault: Callable[[BaseException], None] | None = None,
    options: BlockOptions | None = None,
    enter: Callable[[Generation], None] | None = None,
    save: SaveAlone | None = None,
) -> Callable[[], T]:
    """Return a function that runs the block under each generation until it ends on all ranks.

    `enter` is told of each generation before anything else is done in it, `on_fault` of each error
    that ends one, and `save` is called between two. The function raises ResilienceError in a
    process that no agent has started.
    """

    def run() -> T:
        session = open_session(report, on_fault=on_fault, options=options, enter=enter, save=save)
        opening = session.begin()
        while True:
            generation, opening = session.make(opening or session.wait_open()), None
            if not session.recovers:
                session.enter(generation)
                return block(generation)
            try:
                session.enter(generation)
                result = block(generation)
            except BaseException as error:
                if session.ends_run(error, generation) and session.finish(generation, error):
                    raise
                session.stop(generation, error)
                continue
            if session.finish(generation, None):
                return result
            session.stop(generation, BrokenError("another rank failed after this one had finished"))

    return run


def open_session(
    report: Reporter,
    *,
    on_fault: Callable[[BaseException], None] | None = None,
    options: BlockOptions | None = None,
    enter: Callable[[Generation], None] | None = None,
    save: SaveAlone | None = None,
) -> WorkerSession:
    """Return this process's session with its agent; the arguments are those of `reexecutable`.

    Raises ResilienceError in a process that no agent has started.
    """
    handles = read_handles(os.environ)
    if handles is None:
        raise ResilienceError(
            "no agent has started this process; start it with "
            "python -m resilience.agent --nproc-per-node N -- python ..."
        )
    page = Page(handles.page_file, handles.num_slots)
    return WorkerSession(
        report=report,
        on_fault=on_fault,
        options=options or BlockOptions(),
        on_enter=enter,
        save=save,
        link=open_link(handles, page),
        page=page,
        handles=handles,
    )


@dataclass(frozen=True, kw_only=True)
class WorkerSession:
    """One process's way through the generations; called from the training thread alone.

    The order of its calls: `begin`; then for each generation `make`, `enter`, and either `finish`
    or `stop`, behind which the next one is waited for with `wait_open`.
    """

    report: Reporter
    on_fault: Callable[[BaseException], None] | None
    options: BlockOptions
    on_enter: Callable[[Generation], None] | None
    save: SaveAlone | None
    link: AgentLink
    page: Page
    handles: WorkerHandles

    @property
    def recovers(self) -> bool:
        """Return whether the run continues in this process after a fault."""
        return self.handles.recovers

    def begin(self) -> Open | None:
        """Tell the agent that this process can train; returns the generation it was started in."""
        opening = take_opening()
        self.link.send(Ready(pid=os.getpid(), has_block=self.recovers))
        return opening

    def wait_open(self) -> Open:
        """Wait for the next generation; the end of the run may come first."""
        while True:
            message = self.link.wait()
            if isinstance(message, Open):
                return message
            if isinstance(message, End):
                # The others have come to this end without the process, which waits for its turn.
                os._exit(message.status)
            if isinstance(message, SaveState) and self.save is not None:
                self._save(message, self.save)

    def _save(self, order: SaveState, save: SaveAlone) -> None:
        try:
            self.link.send(save(order, self.link.check_idle))
        except BrokenError:
            # Who asked for it wants something else by now.
            return
        except Exception as error:  # noqa: BLE001 - a disk or a user's view may fail in any way
            told = StateSaved(
                generation=order.generation,
                rank=order.rank,
                name=order.name,
                problem=_one_line(error),
            )
            self.link.send(told)

    def make(self, opening: Open) -> Generation:
        """Return the generation of an opening; its members have not met yet."""
        os.environ.update(rank_variables(opening))
        return Generation(
            opening,
            node=self.handles.node,
            device_type=self.options.device_type,
            page=self.page,
            slot=self.handles.slot,
            open_store=self.link.open_store,
            is_asked=self.link.is_asked_to_leave,
        )

    def enter(self, generation: Generation) -> None:
        """Meet the other members; raises GroupOpenError after the deadline."""
        if self.on_enter is not None:
            self.on_enter(generation)
        self.page.mark(self.handles.slot, 0, Activity.NOWHERE)
        self.link.on_break(generation.take_break)
        generation.open(
            timeout=self.options.group_deadline, collective_timeout=self.options.collective_deadline
        )

    def ends_run(self, error: BaseException, generation: Generation) -> bool:
        """Return whether the error would come again, or is an orderly end."""
        if generation.broken is not None:
            return False
        ends = (SystemExit, KeyboardInterrupt, StateLostError)
        return isinstance(error, (*ends, *self.options.fatal))

    def finish(self, generation: Generation, error: BaseException | None) -> bool:
        """Report that this rank has finished; False where another rank needs it once more."""
        self.page.mark(self.handles.slot, 0, Activity.NOWHERE)
        status, text = 0, ""
        if isinstance(error, SystemExit):
            status = error.code if isinstance(error.code, int) else int(error.code is not None)
            text = error.reason if isinstance(error, GaveUp) else ""
        elif isinstance(error, KeyboardInterrupt):
            status = 128 + signal.SIGINT
        elif error is not None:
            status, text = getattr(error, "exit_status", 1), _one_line(error)
        number, rank = generation.number, generation.rank
        is_done = self.options.is_all and error is None
        self.link.send(
            Finished(generation=number, rank=rank, status=status, text=text, is_done=is_done)
        )
        while True:
            message = self.link.wait()
            if isinstance(message, End):
                self.link.on_break(None)
                return True
            if isinstance(message, Break) and message.generation == number and not text:
                return False

    def stop(self, generation: Generation, error: BaseException) -> None:
        """Leave the generation and report; the training thread is stopped from here on."""
        if generation.broken is None:
            self.link.send(
                Failed(
                    generation=generation.number,
                    rank=generation.rank,
                    reason=_reason(error),
                    text=_one_line(error),
                    details="".join(traceback.format_exception(error)),
                )
            )
        generation.close()
        self.link.on_break(None)
        self.page.mark(self.handles.slot, 0, Activity.NOWHERE)
        if self.on_fault is not None:
            self._call(lambda: self.on_fault(error))  # type: ignore[misc]
        # The exception's frames hold what the block made for the generation.
        traceback.clear_frames(error.__traceback__)
        error.__traceback__ = None
        report = self._call(
            lambda: self.report(
                rank=generation.rank, node=generation.node, generation=generation.number
            )
        )
        self.link.send(
            Stopped(generation=generation.number, rank=generation.rank, report=report.to_json())
        )

    def _call(self, function: Callable[[], R]) -> R:
        """Call what ends a generation or reports; a process in which that fails is replaced."""
        try:
            return function()
        except BaseException:  # noqa: BLE001 - it may fail in any way
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(BAD_REPORT_STATUS)


def _reason(error: BaseException) -> str:
    if isinstance(error, CorruptionError):
        return "corrupt"
    if isinstance(error, PlannedError):
        return PLANNED
    is_consequence = isinstance(error, (GroupOpenError, BrokenError)) or CLOSED_CONNECTION in str(
        error
    )
    return "group" if is_consequence else "exception"


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}"[:500] if text else type(error).__name__
