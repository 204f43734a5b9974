"""The gate behind a long kernel: one rank, whose gradients a device has still to end.

Part of `benchmarks.gpu`. On a CPU everything has ended when its call returns.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from resilience.checkpointless.recovery import Recovery
from resilience.comm.gate import Gate
from resilience.comm.page import Activity
from resilience.errors import BrokenError
from resilience.state.layout import make_layout
from resilience.state.report import Phase, Report, fresh_report
from resilience.state.torch_state import TorchState, materialise

LONG_CYCLES = 2_000_000_000
"""Of a GPU's clock: about a second."""
BREAK_AFTER_S = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What came of one step."""

    had_ended_at_gate: bool | None
    """Whether the device had ended the gradients when the gate was entered; None: it was not."""
    had_ended_after: bool
    """The same when the rank had left the step."""
    phase: Phase
    """What the rank would report."""


class _Queue:
    """What the device has to do for the gradients."""

    def __init__(self, device: torch.device) -> None:
        self._event: Any = None if device.type == "cpu" else torch.cuda.Event()  # type: ignore[no-untyped-call]

    def fill(self, gradients: Sequence[Tensor]) -> None:
        """Queue a long kernel, and one that changes the gradients behind it."""
        for each in gradients:
            # Its first call loads the kernel, which may wait for all that runs.
            each.mul_(1.0)
        if self._event is not None:
            torch.cuda._sleep(LONG_CYCLES)  # type: ignore[no-untyped-call]  # noqa: SLF001
        for each in gradients:
            each.mul_(0.5)
        if self._event is not None:
            self._event.record()

    def has_ended(self) -> bool:
        """Return whether all that was queued has run."""
        return self._event is None or bool(self._event.query())


class _Channel:
    """The gate's communicator in a world of one rank: the sum is what this rank gave."""

    def __init__(self, queue: _Queue) -> None:
        self._queue = queue
        self.had_ended: bool | None = None

    def reduce(self, buffer: Tensor) -> None:
        """Note what the device had done when the gate was entered."""
        self.had_ended = self._queue.has_ended()


class _Members:
    """A generation of one rank."""

    number = 0
    rank = 0
    layout = make_layout(nodes=["node-0"], num_local_ranks=1)
    group: ProcessGroup
    before = None
    keeps_state = False
    is_passing = False
    reports: Sequence[Report] = (fresh_report(layout, 0, -1),)

    def __init__(self, channel: _Channel) -> None:
        self.gate = Gate(channel, world_size=1)
        self.lock: AbstractContextManager[Any] = threading.RLock()
        self._is_broken = threading.Event()

    def break_now(self) -> None:
        with self.lock:
            self._is_broken.set()

    def is_current(self) -> bool:
        return not self._is_broken.is_set()

    def check(self) -> None:
        if self._is_broken.is_set():
            raise BrokenError("the generation was broken on purpose")

    def mark(self, activity: Activity, step: int, micro_batch: int = 0) -> None:
        if activity is not Activity.UPDATE:
            self.check()


def take_step(device: torch.device, *, is_broken: bool = False, is_awaited: bool = True) -> Seen:
    """Take a step behind a long kernel, during which the generation is broken where asked.

    Without `is_awaited` the gate is entered as by a program that waits for nothing, which shows
    that the kernel is long enough.
    """
    torch.manual_seed(1)
    model = nn.Linear(64, 64).to(device)
    optimizer = torch.optim.AdamW(model.parameters())
    materialise(optimizer)
    recovery = Recovery(apply=lambda step: None)
    queue = _Queue(device)
    channel = _Channel(queue)
    members = _Members(channel)
    recovery.enter(members)
    recovery.bind(TorchState(model, optimizer))
    recovery.resume(members, lambda fallback: 0)
    recovery.begin()
    model(torch.ones(8, 64, device=device)).sum().backward()
    queue.fill([each.grad for each in model.parameters() if each.grad is not None])
    breaker = threading.Timer(BREAK_AFTER_S, members.break_now)
    if is_broken:
        breaker.start()
        if device.type == "cpu":
            # There it has nothing to overtake.
            breaker.join()
    try:
        if is_awaited:
            with recovery.commit(members):
                optimizer.step()
        else:
            members.gate.enter(0, lock=members.lock, is_current=members.is_current)
    except BrokenError:
        assert is_broken
    had_ended = queue.has_ended()
    if is_broken:
        breaker.join()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return Seen(
        had_ended_at_gate=channel.had_ended, had_ended_after=had_ended, phase=recovery.mark.phase
    )
