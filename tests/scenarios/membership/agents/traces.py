"""Random troubles of agents, each trace from a seed: drawn beforehand, so that it is played again.

Times are in leases, since it is by these that the agents judge.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from tests.scenarios.membership.agents.real_world import RealWorld, pause

NUM_TROUBLES = 7
_SIZES = ((4, 0), (3, 1), (2, 2), (1, 3))
"""Nodes and standby nodes."""
_KINDS = {"stand_still": 5, "freeze": 2, "kill": 5, "kill_worker": 2, "cut": 4}
_GAPS = (0.0, 0.3, 1.0, 2.5, 5.0)
_SPANS = (0.3, 1.3, 3.0, 4.0, 10.0)
_AWAY = (0.0, 0.7, 3.0, 8.0, None)
"""How long a killed agent is away; None: until all troubles are over."""


@dataclass(frozen=True, kw_only=True)
class Act:
    """What is done to the world at a moment."""

    at: float
    what: str
    names: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.at:6.1f} {self.what} {' '.join(self.names)}"


@dataclass(frozen=True, kw_only=True)
class Trace:
    """All that happens to one world."""

    seed: int
    num_nodes: int
    num_standby: int
    num_shards: int
    num_spares: int
    has_cuts: bool
    is_impatient: bool
    """Whether nobody is waited for so long that all come back."""
    acts: tuple[Act, ...]

    def __str__(self) -> str:
        head = (
            f"seed {self.seed}: {self.num_nodes} nodes, {self.num_standby} stand by, "
            f"{self.num_shards} shards, {self.num_spares} spares"
            f"{', impatient' * self.is_impatient}"
        )
        return "\n".join([head, *map(str, self.acts)])


def draw(seed: int) -> Trace:
    """Return the trace of a seed; those of odd seeds cut agents off."""
    rng = random.Random(seed)
    num_nodes, num_standby = rng.choice(_SIZES)
    has_cuts = seed % 2 == 1
    kinds = {kind: weight for kind, weight in _KINDS.items() if has_cuts or kind != "cut"}
    names = [f"n{number}" for number in range(num_nodes + num_standby)]
    begins = accumulate(rng.choice(_GAPS) for _ in range(NUM_TROUBLES))
    acts: list[Act] = []
    for begin in begins:
        (kind,) = rng.choices(list(kinds), list(kinds.values()))
        acts += _trouble(rng, kind, begin, names)
    return Trace(
        seed=seed,
        num_nodes=num_nodes,
        num_standby=num_standby,
        num_shards=2 if num_nodes % 2 == 0 and rng.random() < 0.4 else 1,
        num_spares=rng.choice((0, 1)),
        has_cuts=has_cuts,
        is_impatient=seed % 5 == 0,
        acts=tuple(sorted(acts, key=lambda act: act.at)),
    )


def _trouble(rng: random.Random, kind: str, begin: float, names: Sequence[str]) -> list[Act]:
    """Return a trouble and its end."""
    (number,) = rng.choices((1, 2, 3, len(names)), (10, 5, 2, 1))
    some = tuple(sorted(rng.sample(names, number)))
    if kind == "kill_worker":
        return [Act(at=begin, what=kind, names=some[:1])]
    first = Act(at=begin, what=kind, names=some)
    if kind == "kill":
        away = rng.choice(_AWAY)
        return [first] if away is None else [first, Act(at=begin + away, what="start", names=some)]
    end = begin + rng.choice(_SPANS)
    if kind == "cut":
        return [Act(at=begin, what=kind, names=some[: len(names) - 1]), Act(at=end, what="heal")]
    return [first, Act(at=end, what="go_on", names=some)]


def play(trace: Trace, world: RealWorld) -> None:
    """Do to a world what stands in the trace, and let it come to rest."""
    world.start(*world.names)
    world.wait_for_progress()
    begin_s = time.monotonic()
    for act in trace.acts:
        pause(begin_s + act.at * world.lease_s - time.monotonic())
        _do(act, world)
    world.heal()
    world.go_on(*world.names)
    world.start(*world.names)


def _do(act: Act, world: RealWorld) -> None:
    if act.what == "kill_worker":
        world.kill_worker(*act.names)
    elif act.what == "heal":
        world.heal()
    else:
        {
            "stand_still": world.stand_still,
            "freeze": world.freeze,
            "go_on": world.go_on,
            "kill": world.kill,
            "start": world.start,
            "cut": world.cut,
        }[act.what](*act.names)
