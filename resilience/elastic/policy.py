"""How many nodes a run has: when it shrinks, when it grows, and who comes in. Pure.

A run shrinks at once where a node is lost and none stands by, to whatever is left: to wait costs
more than to go on with less. It grows when nodes have been there for a while, and not soon after a
change: a node that leaves again and again is waited for twice as long each time.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

_DOUBLED_MAX = 16
"""More than this makes a wait no longer than a run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """What the recipe says of the run's size."""

    sizes: tuple[int, ...] = ()
    """The numbers of nodes that the run may have, rising; empty for a run of one size."""
    shrink_after_s: float = 0.0
    """How long a lost node is waited for before the run goes on without it."""
    hold_s: float = 5.0
    """How long a node has to be there before the run grows by it."""
    snooze_s: float = 60.0
    """How long the run keeps a size before it grows."""

    @property
    def is_elastic(self) -> bool:
        """Return whether the run may change its size."""
        return bool(self.sizes)

    def fit(self, num_nodes: int) -> int:
        """Return the largest allowed size that so many nodes suffice for; 0 where none is."""
        place = bisect_right(self.sizes, num_nodes)
        return self.sizes[place - 1] if place else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizing:
    """What has become of the run's size so far, as one coordinator knows it."""

    changed_s: float = float("-inf")
    """When the number of members changed last."""
    came_s: Mapping[str, float] = field(default_factory=dict)
    """Since when each agent has been there."""
    num_leaves: Mapping[str, int] = field(default_factory=dict)
    """How often each agent was lost, and again before it had been there for long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Growth:
    """Which nodes come in, and why no more of them."""

    nodes: tuple[str, ...] = ()
    reason: str = ""
    due_s: float = float("inf")
    """When to ask again, as far as time alone changes the answer."""


def note_came(sizing: Sizing, node: str, now_s: float) -> Sizing:
    """Note that an agent has come whose workers are warm."""
    if node in sizing.came_s:
        return sizing
    return replace(sizing, came_s={**sizing.came_s, node: now_s})


def note_left(policy: Policy, sizing: Sizing, node: str, now_s: float) -> Sizing:
    """Note that an agent is lost.

    One that was there for twice as long as it had to wait counts as if it had never been lost.
    """
    came_s = {name: at_s for name, at_s in sizing.came_s.items() if name != node}
    was_there_s = now_s - sizing.came_s.get(node, now_s)
    has_stayed = was_there_s > 2 * _snooze_s(policy, sizing, node)
    num = 1 if has_stayed else sizing.num_leaves.get(node, 0) + 1
    return replace(sizing, came_s=came_s, num_leaves={**sizing.num_leaves, node: num})


def note_size(sizing: Sizing, before: int, now: int, now_s: float) -> Sizing:
    """Note with how many members a generation begins."""
    return sizing if before == now else replace(sizing, changed_s=now_s)


def plan_growth(
    policy: Policy, sizing: Sizing, *, size: int, waiting: Sequence[str], now_s: float
) -> Growth:
    """Return which of the nodes that wait the run grows by now."""
    if not waiting or not policy.sizes or size >= policy.sizes[-1]:
        return Growth()
    ripe = [node for node in waiting if now_s >= _ripe_s(policy, sizing, node)]
    target = policy.fit(size + len(ripe))
    if target > size:
        return Growth(nodes=tuple(ripe[: target - size]))
    if len(ripe) < len(waiting):
        due_s = min(_ripe_s(policy, sizing, node) for node in waiting if node not in ripe)
        return Growth(reason="the next node that waits does not count yet", due_s=due_s)
    allowed = ", ".join(map(str, policy.sizes))
    return Growth(reason=f"{size + len(ripe)} nodes are there; sizes allowed: {allowed}")


def _ripe_s(policy: Policy, sizing: Sizing, node: str) -> float:
    """Return when the run may grow by a node."""
    held_s = sizing.came_s.get(node, 0.0) + policy.hold_s
    return max(held_s, sizing.changed_s + _snooze_s(policy, sizing, node))


def _snooze_s(policy: Policy, sizing: Sizing, node: str) -> float:
    """Return how long the run keeps its size before it grows by a node."""
    num_doubled = max(0, sizing.num_leaves.get(node, 0) - 1)
    return policy.snooze_s * (1 << min(num_doubled, _DOUBLED_MAX))
