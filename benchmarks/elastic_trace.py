"""Which nodes there are at what time, and what a run has made of them. Pure: no clock, no file.

Times are seconds since the window began.
"""

from __future__ import annotations

import dataclasses
import random
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from itertools import count

from resilience.events import Event

NODES_MIN, NODES_MAX = 1, 4
NUM_AT_FIRST = 3
GAP_S = 10.0
"""Between two comings or goings, on average."""
NOTICE_S = 5.0
"""A node that is asked to go is there for so long, and then killed if it still is."""
SETTLED_S = 15.0
"""The last node that has been there for so long stays: what only it has is not at stake here."""
FOREVER_S = float("inf")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Stay:
    """A node from when its processes may be started until the last of them has ended."""

    node: str
    came_s: float = 0.0
    asked_s: float | None = None
    """When it is told that it will go; None where nobody tells it."""
    gone_s: float = FOREVER_S

    def overlap(self, begin_s: float, end_s: float) -> float:
        """Return for how long it is there between two times."""
        return max(0.0, min(self.gone_s, end_s) - max(self.came_s, begin_s))


@dataclasses.dataclass(frozen=True, slots=True, order=True)
class Happening:
    """What is done to a node: start, ask or kill."""

    at_s: float
    what: str
    node: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A step that was kept: when it ended, in which generation."""

    number: int
    end_s: float
    generation: int


def node_name(slot: int) -> str:
    """Return the name of a node, which one that comes later may have again."""
    return f"node-{slot}"


def plan_stays(seed: int, seconds: float) -> tuple[Stay, ...]:
    """Plan who is there when, from the seed alone.

    As many comings and goings as fit on average, at times drawn evenly; half of those that go are
    told so before.
    """
    draw = random.Random(seed)
    stays = [Stay(node=node_name(slot)) for slot in range(NUM_AT_FIRST)]
    notices: list[bool] = []
    for at_s in sorted(draw.uniform(0, seconds) for _ in range(round(seconds / GAP_S))):
        here = [each for each in stays if each.gone_s > at_s]
        free = _free_to_go(here, at_s)
        is_full = len(here) == NODES_MAX
        if free and (is_full or draw.random() < 0.5):
            if not notices:
                notices = draw.sample([True, False], 2)
            place = stays.index(draw.choice(free))
            is_told = notices.pop()
            stays[place] = dataclasses.replace(
                stays[place],
                asked_s=at_s if is_told else None,
                gone_s=at_s + NOTICE_S if is_told else at_s,
            )
        elif not is_full:
            taken = {each.node for each in here}
            node = next(name for slot in count() if (name := node_name(slot)) not in taken)
            stays.append(Stay(node=node, came_s=at_s))
    return tuple(stays)


def _free_to_go(here: Sequence[Stay], at_s: float) -> list[Stay]:
    """Return the nodes beside which another one stays that has been there for a while."""
    staying = [each for each in here if each.gone_s == FOREVER_S]
    settled = [each for each in staying if each.came_s == 0 or at_s - each.came_s > SETTLED_S]
    return [each for each in staying if len(staying) > NODES_MIN and settled not in ([], [each])]


def plan_happenings(stays: Sequence[Stay]) -> list[Happening]:
    """Return what is to be done after the beginning, in order."""
    found = []
    for each in stays:
        if each.came_s > 0:
            found.append(Happening(each.came_s, "start", each.node))
        if each.asked_s is not None:
            found.append(Happening(each.asked_s, "ask", each.node))
        if each.gone_s < FOREVER_S:
            found.append(Happening(each.gone_s, "kill", each.node))
    return sorted(found)


def until_ended(stays: Sequence[Stay], ended: Sequence[tuple[str, float]]) -> tuple[Stay, ...]:
    """Return the stays of nodes that may be given back before they are killed.

    `ended` has which node's processes were seen to have ended, and when; only who was asked to go
    is given back for that.
    """
    found = []
    for each in stays:
        asked_s = FOREVER_S if each.asked_s is None else each.asked_s
        times = [at_s for node, at_s in ended if node == each.node and at_s >= asked_s]
        found.append(dataclasses.replace(each, gone_s=min([each.gone_s, *times])))
    return tuple(found)


def capacity(stays: Sequence[Stay], seconds: float) -> float:
    """Return the node-seconds that there were."""
    return sum(each.overlap(0.0, seconds) for each in stays)


def goodput(num_steps: int, stays: Sequence[Stay], *, seconds: float, alone_per_s: float) -> float:
    """Return the kept steps as a share of what the nodes could have done, each as one alone."""
    return num_steps / (capacity(stays, seconds) * alone_per_s)


def keep_steps(events: Sequence[Event], began_s: float, seconds: float) -> list[Step]:
    """Return the steps that a window added.

    A step that was done again counts when that was. Rank 0 tells of the last one once more when a
    generation begins, without a duration.
    """
    kept: list[Step] = []
    steps = [each for each in events if each.event == "step" and each.step is not None]
    for each in sorted(steps, key=lambda each: each.time):
        end_s = each.time - began_s
        if end_s > seconds:
            break
        number = each.step or 0
        if kept and kept[-1].number == number and each.fields["duration_s"] is None:
            continue
        while kept and kept[-1].number >= number:
            kept.pop()
        kept.append(Step(number=number, end_s=end_s, generation=each.generation))
    last = max((each.step or 0 for each in steps if each.time <= began_s), default=-1)
    return [each for each in kept if each.number > last]


def account(
    steps: Sequence[Step], stays: Sequence[Stay], events: Sequence[Event],
    *, began_s: float, seconds: float, alone_per_s: float,
) -> dict[str, float]:  # fmt: skip
    """Return which node-seconds were lost to what; with the kept steps they are the capacity."""
    members = members_by_generation(events)
    broken = {each.generation for each in events if each.event == "generation_broken"}
    joined = [(e.time - began_s, e.fields["node"]) for e in events if e.event == "node_joined"]
    lost: Counter[str] = Counter()
    begin_s, before = 0.0, steps[0].generation if steps else -1
    for step in steps:
        known = members.get(step.generation, frozenset())
        known_before = members.get(before, frozenset())
        lost.update(_outside(begin_s, step.end_s, stays, known, known_before, joined))
        inside_s = sum(e.overlap(begin_s, step.end_s) for e in stays if e.node in known)
        if step.generation == before:
            what = f"steps of {len(known)}"
        else:
            what = "a lost node" if before in broken else "an agreed change"
        lost[what] += inside_s - 1 / alone_per_s
        begin_s, before = step.end_s, step.generation
    lost["the window's end"] += sum(each.overlap(begin_s, seconds) for each in stays)
    return dict(lost)


def _outside(
    begin_s: float, end_s: float, stays: Sequence[Stay], members: Collection[str],
    before: Collection[str], joined: Sequence[tuple[float, str]],
) -> dict[str, float]:  # fmt: skip
    """Return the node-seconds of those that are there and no members, by why they are not."""
    lost: Counter[str] = Counter()
    for each in stays:
        if each.node in members:
            continue
        told_s = FOREVER_S if each.asked_s is None else each.asked_s
        lost["a node that is to go"] += each.overlap(max(begin_s, told_s), end_s)
        until_s = min(end_s, told_s)
        if each.node in before and each.came_s <= begin_s:
            lost["a lost node"] += each.overlap(begin_s, until_s)
            continue
        times = [at_s for at_s, node in joined if node == each.node and at_s >= each.came_s]
        joined_s = min(times, default=FOREVER_S)
        lost["a node that starts"] += each.overlap(begin_s, min(until_s, joined_s))
        lost["a node that waits"] += each.overlap(max(begin_s, joined_s), until_s)
    return dict(lost)


def members_by_generation(events: Sequence[Event]) -> Mapping[int, frozenset[str]]:
    """Return the nodes that had a rank in each generation."""
    found: dict[int, set[str]] = {}
    for each in events:
        if each.event == "process_group_ready":
            found.setdefault(each.generation, set()).add(each.node)
    return {number: frozenset(nodes) for number, nodes in found.items()}
