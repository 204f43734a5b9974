"""What a training program of any kind may say to its run and ask of it, without torch.

`import resilience` gives `log` and `rank_info`. Both work in a program that no agent has started.
"""

from __future__ import annotations

import operator
import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, SupportsFloat, SupportsIndex

_KEPT_NAMES = ("rank", "start", "duration_s")
_SAID = (str, int, float, type(None))
_Say = Callable[[int, Mapping[str, object]], None]
_say: _Say | None = None
_owner = 0
"""The process that `_say` is for: one that is forked from it has none of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankInfo:
    """Which process of the run this is; of a program that is started alone, the only one."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node_rank: int
    """Index of the node, from 0."""
    num_nodes: int
    start: int
    """Which start of the run this is, from 0: a scheduler or `launcher continue` begins another."""
    restart: int
    """How often all processes were started again within that start."""


def rank_info() -> RankInfo:
    """Return which process this is, by the variables that the agent and torchrun set."""
    from resilience.run_record import START_VARIABLE

    def number(name: str, default: int) -> int:
        return int(os.environ.get(name) or default)

    # A program that is alone on its node, before it starts any ranks, is told of nodes alone.
    node_rank, num_nodes = number("NODE_RANK", 0), number("NUM_NODES", 1)
    return RankInfo(
        rank=number("RANK", node_rank),
        world_size=number("WORLD_SIZE", num_nodes),
        local_rank=number("LOCAL_RANK", 0),
        local_world_size=number("LOCAL_WORLD_SIZE", 1),
        node_rank=number("GROUP_RANK", node_rank),
        num_nodes=number("GROUP_WORLD_SIZE", num_nodes),
        start=number(START_VARIABLE, 0),
        restart=number("TORCHELASTIC_RESTART_COUNT", 0),
    )


def log(
    step: SupportsIndex, loss: SupportsFloat | None = None, **values: SupportsFloat | str | None
) -> None:
    """Tell the run that this process has done a step, and what came of it.

    The step is the number that the program counts by. `loss`, `lr` and `grad_norm` are shown; all
    values go into the event log. A value that is a tensor becomes a number, for which the device
    is waited. Call it on rank 0 or on all ranks: those of rank 0 are written down, and of the
    others it is seen that they get on. Without an agent rank 0 prints a line.

    Never blocks. Raises TypeError for a step that is no whole number and for a value that is
    neither a number nor text, ValueError for a step below 0 and for the names rank, start and
    duration_s.
    """
    global _say, _owner
    try:
        number = operator.index(step)
    except TypeError:
        raise TypeError(f"step {step!r} is no whole number; allowed: 0, 1 and so on") from None
    if number < 0:
        raise ValueError(f"step {number} is less than 0")
    if _say is None or _owner != os.getpid():
        _say, _owner = _find_listener(), os.getpid()
    told = {"loss": loss, **values}
    _say(number, {name: _said(name, value) for name, value in told.items()})


def _said(name: str, value: object) -> object:
    if name in _KEPT_NAMES:
        raise ValueError(f"{name} is the run's own; call the value something else")
    if isinstance(value, _SAID):
        return value
    try:
        # Of a tensor that needs a gradient torch warns in float().
        return float(value.item() if hasattr(value, "item") else value)  # type: ignore[arg-type]
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(f"{name} is a {type(value).__name__}; want a number or text") from error


def _find_listener() -> _Say:
    """Return what takes steps: the agent, nobody, or the terminal of a program without an agent."""
    from resilience.inprocess.handles import reach_agent, read_handles

    handles, info = read_handles(os.environ), rank_info()
    handles = handles and reach_agent(handles, os.environ)
    if handles is None:
        return _print if info.rank == 0 else _say_nothing
    from resilience.comm.page import Activity, Page
    from resilience.inprocess.event_pipe import EventPipe

    page, slot, mark = Page(handles.page_file, handles.num_slots), handles.slot, Activity.UPDATE

    def mark_step(step: int, values: Mapping[str, object]) -> None:
        page.mark(slot, step, mark)

    if info.rank:
        return mark_step
    from pathlib import Path

    from resilience.events import EventLog
    from resilience.inprocess.variables import GENERATION

    events = EventLog(
        Path(handles.events_path),
        node=handles.node,
        rank=0,
        generation=info.restart,
        sink=EventPipe(handles.events_file),
    )
    last_step, last_s = -1, 0.0

    def write(step: int, values: Mapping[str, Any]) -> None:
        nonlocal last_step, last_s
        page.mark(slot, step, mark)
        # A run that recovers goes on in this process, in another generation.
        own = os.environ.get(GENERATION) or os.environ.get("TORCHELASTIC_RESTART_COUNT")
        events.generation = int(own or 0)
        now_s = time.perf_counter()
        is_next = 0 <= last_step < step
        duration_s = (now_s - last_s) / (step - last_step) if is_next else None
        last_step, last_s = step, now_s
        events.write("step", step=step, **values, duration_s=duration_s, start=info.start)

    return write


def _say_nothing(step: int, values: Mapping[str, object]) -> None:
    """Leave it to rank 0."""


def _print(step: int, values: Mapping[str, object]) -> None:
    told = (
        f"{name} {value:.6g}" if isinstance(value, float) else f"{name} {value}"
        for name, value in values.items()
        if value is not None
    )
    sys.stdout.write(f"{', '.join([f'step {step}', *told])}\n")
    sys.stdout.flush()
