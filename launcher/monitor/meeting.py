"""The nodes that have joined a start of a run without a generation. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from resilience.events import Event

USUAL_S = 30.0
"""Agents that meet at all mostly have by then."""


@dataclass(frozen=True, slots=True)
class Meeting:
    """The nodes whose agents have begun, and those that have found each other."""

    begun_s: Mapping[str, float] = field(default_factory=dict)
    """By node, when its agent began, in unix seconds."""
    joined: Mapping[str, frozenset[str]] = field(default_factory=dict)
    """By coordinator, the nodes with it. Agents that do not reach each other have one each."""
    surrender: str = ""
    """The reason for which a coordinator has ended the run."""

    def missing_text(self, num_nodes: int, now: float) -> str:
        """Return which of the nodes have not joined; empty while that is usual, or none is known.

        A node that has written nothing has no name here.
        """
        if not self.begun_s or now - min(self.begun_s.values()) < USUAL_S:
            return ""
        joined = max(self.joined.values(), key=len, default=frozenset())
        absent = sorted(self.begun_s.keys() - joined)
        num_seen = len(joined | self.begun_s.keys())
        num_nodes = max(num_nodes, num_seen)  # nodes may stand by
        parts = [
            f"{', '.join(absent)} {'has' if len(absent) == 1 else 'have'} not joined"
            if absent
            else "",
            f"no agent has begun on {num_nodes - num_seen} of them" if num_nodes > num_seen else "",
        ]
        text = ", ".join(filter(None, parts))
        return text and f"waiting for {num_nodes - len(joined)} of {num_nodes} nodes: {text}"


def next_meeting(meeting: Meeting, event: Event) -> Meeting:
    """Return the meeting after an event of an agent."""
    node = str(event.fields.get("node", event.node))
    joined = meeting.joined.get(event.node, frozenset())
    if event.event == "agent_started":
        begun_s = {**meeting.begun_s, event.node: event.time}
        return Meeting(begun_s, {**meeting.joined, event.node: frozenset()})
    if event.event == "node_joined":
        return replace(meeting, joined={**meeting.joined, event.node: joined | {node}})
    if event.event == "node_lost":
        return replace(meeting, joined={**meeting.joined, event.node: joined - {node}})
    if event.event == "gave_up":
        return replace(meeting, surrender=str(event.fields.get("reason", "")))
    return meeting
