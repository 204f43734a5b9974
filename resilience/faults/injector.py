"""Makes a run's faults happen at the places that the trainer names.

A fault fires once in a run, over any number of processes and nodes: whoever is about to
fire it creates its marker in the run's folder first, and who finds it there lets it be.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from resilience.events import EventLog
from resilience.settings import Fault
from resilience.state.layout import Layout
from resilience.whole_files import replace_text

EXIT_STATUS = 13
"""With which a fault of kind exit ends the process."""

_Numbered = tuple[int, Fault]


class InjectedFault(RuntimeError):  # noqa: N818 - events and logs call it so
    """The exception that a fault of kind exception raises."""


class Injector:
    """Fires the faults of one rank. Used by its training thread only.

    `on_corrupt` gets the kind of a tensor, parameter or moment, and changes one value of one;
    no digest notes the change. Without it no fault may be of kind corrupt.
    Faults of a node fire on its local rank 0. A sigkill of a node takes its other workers
    along, known by the files that their injectors left, each with its process and when that
    was started, and the agent where `agent_pid` names it.
    """

    def __init__(
        self,
        faults: Sequence[Fault],
        *,
        rank: int,
        layout: Layout,
        run_dir: Path,
        on_corrupt: Callable[[str], None] | None = None,
        events: EventLog | None = None,
        agent_pid: int | None = None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        seat = layout.seat(rank)
        self._rank = rank
        self._folder = run_dir / "faults"
        self._on_corrupt = on_corrupt
        self._events = events
        self._sleep = sleep
        self._agent_pid = agent_pid
        self._node_folder = self._folder / f"node-{seat.node_index}"
        self._due = _by_place(
            (number, fault)
            for number, fault in enumerate(faults)
            if fault.rank == rank or (fault.node, 0) == (seat.node_index, seat.local_rank)
        )
        if any(fault.node is not None for fault in faults):
            self._sign_in(seat.local_rank)

    @property
    def places(self) -> set[str]:
        """Return the places at which this rank may yet get a fault."""
        return {place for place, _ in self._due}

    def reach(self, place: str, step: int) -> None:
        """Fire what is scheduled for this rank here; returns at once where nothing is.

        For the place recovery, `step` is the one that training goes on with.
        """
        if not self._due:
            return
        key = (place, -1 if place == "recovery" else step)
        for number, fault in tuple(self._due.get(key, ())):
            if fault.step <= step:
                self._drop(key, number, fault)
                if self._claim(number):
                    self._fire(fault, step)

    def _drop(self, key: tuple[str, int], number: int, fault: Fault) -> None:
        self._due[key].remove((number, fault))
        if not self._due[key]:
            del self._due[key]

    def _claim(self, number: int) -> bool:
        """Take the right to fire a fault; False where it has been fired."""
        self._folder.mkdir(exist_ok=True)
        try:
            (self._folder / str(number)).touch(exist_ok=False)
        except FileExistsError:
            return False
        return True

    def _fire(self, fault: Fault, step: int) -> None:
        if self._events is not None:
            self._events.write_through(
                "fault_injected", step=step, fault_kind=fault.kind, place=fault.place
            )
        match fault.kind:
            case "exception":
                raise InjectedFault(
                    f"injected in {fault.place} of step {step} on rank {self._rank}"
                )
            case "sigkill":
                if fault.node is not None:
                    self._kill_siblings()
                os.kill(os.getpid(), signal.SIGKILL)
            case "sigstop":
                os.kill(os.getpid(), signal.SIGSTOP)
            case "exit":
                os._exit(EXIT_STATUS)
            case "corrupt":
                assert fault.tensor is not None
                assert self._on_corrupt is not None
                self._on_corrupt(fault.tensor)
            case "slow":
                assert fault.seconds is not None
                self._sleep(fault.seconds)

    def _sign_in(self, local_rank: int) -> None:
        self._folder.mkdir(exist_ok=True)
        self._node_folder.mkdir(exist_ok=True)
        pid = os.getpid()
        text = f"{pid} {_read_start(pid)}"
        replace_text(self._node_folder / str(local_rank), text, str(pid))

    def _kill_siblings(self) -> None:
        """Kill the node's other workers, no process that got a dead one's number, and the agent."""
        for path in self._node_folder.glob("[0-9]*"):
            pid, start = path.read_text("ascii").split()
            with suppress(FileNotFoundError, ProcessLookupError):
                if int(pid) != os.getpid() and _read_start(int(pid)) == start:
                    os.kill(int(pid), signal.SIGKILL)
        if self._agent_pid is not None:
            os.kill(self._agent_pid, signal.SIGKILL)


def _by_place(faults: Iterable[_Numbered]) -> dict[tuple[str, int], list[_Numbered]]:
    """Return faults by place and step; those in a recovery know no step of their own."""
    due: dict[tuple[str, int], list[_Numbered]] = {}
    for number, fault in faults:
        step = -1 if fault.place == "recovery" else fault.step
        due.setdefault((fault.place, step), []).append((number, fault))
    return due


def _read_start(pid: int) -> str:
    """Return when a process was started, in ticks since the machine was."""
    stat = Path(f"/proc/{pid}/stat").read_text("utf-8", "replace")
    return stat.rpartition(")")[2].split()[19]
