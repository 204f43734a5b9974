"""The folder of a simulated run, whose disk takes its time."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from resilience.agent.coordination.events import Claimed, Judged, Recorded
from resilience.agent.coordination.founding import Record
from resilience.agent.coordination.node import MembershipNode
from resilience.state.layout import Layout

Question = Callable[[], Claimed | Judged | Recorded | None]
_READ_S = 0.3
"""How long the disk takes for the record of the run."""


class Asker(Protocol):
    """An agent's process."""

    name: str
    member: MembershipNode


@dataclass
class Folder:
    """The folder of the run, as far as it is seen by all."""

    records: dict[int, Layout] = field(default_factory=dict)
    founding: Record | None = None
    waiting: list[tuple[float, Asker, Question]] = field(default_factory=list)
    reads: list[tuple[float, Asker, Question]] = field(default_factory=list)
    """Questions that wait for nothing which was asked before."""

    def ask(self, node: Asker, question: Question, due_s: float) -> None:
        """Ask behind what the process has asked before."""
        last_s = max((each for each, asker, _ in self.waiting if asker is node), default=0)
        self.waiting.append((max(due_s, last_s), node, question))

    def read(self, node: Asker, question: Question, now_s: float) -> None:
        """Ask beside that."""
        self.reads.append((now_s + _READ_S, node, question))

    def answer(self, now_s: float, paused: Collection[str], nodes: Mapping[str, Asker]) -> None:
        """Answer what is due, and do what a process has asked that is dead since."""
        due = [each for each in [*self.waiting, *self.reads] if each[0] <= now_s]
        if not due:
            return
        self.waiting = [each for each in self.waiting if each[0] > now_s]
        self.reads = [each for each in self.reads if each[0] > now_s]
        for _, node, question in due:
            if node.name in paused:
                self.waiting.append((now_s + 0.5, node, question))
                continue
            answer = question()
            if answer is not None and nodes.get(node.name) is node:
                node.member.answer(answer)
