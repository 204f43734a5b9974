"""Every interleaving of gate, update, fault and recovery in a world of 2 replicas x 2 shards.

Each replica is a node, whose lower rank is its leader. In the gate each rank gives its leader a
word, the leaders add up their nodes' sums, and each leader sends the sum of all to its node.

Ranks are small state machines; gate_search.py visits all states that they can reach
together, and the model asks the real `plan_recovery` wherever a generation ends. A rule of
the design can be switched off, so that a test can see that it is missed.

A history is the tuple of the gradients applied, one number a step: twice the
generation that made them, plus one if they are garbage. Equal bits are equal
histories. A generation ends by the first fault; until it has stopped, each rank
goes on as if nothing had happened. There is no barrier after recovery: a rank
whose part of the plan is done begins its next forward.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from enum import IntEnum
from functools import cache
from typing import NamedTuple

from resilience.checkpointless.plan import Fallback, RecoveryPlan, plan_recovery
from resilience.state.report import Phase, Report

NUM_RANKS = 4
LEADERS = (0, 2)

RULES = {
    "gate over all ranks": "the gate is an all-reduce inside one replica",
    "a gate": "the update begins without any collective",
    "gradients kept": "a rank that is interrupted in the gate drops its gradients",
    "update without collective": "the update waits for peers, so a broken peer interrupts it",
    "abort order": "the queued gate runs on over a reduction that was aborted",
    "gate counted": "an aborted gate is taken for a completed one",
    "sum of the node": "a leader joins the leaders' sum before its node's ranks have entered",
    "sum of all nodes": "a leader sends its node's sum to its node as the sum of all",
    "lost leader": "a rank whose leader is dead passes without the sum",
    "generation of a word": "a leader takes a word of an older generation for a new one",
    "step of a word": "a leader takes a word of an older step for a new one",
    "atomic end": "an exception falls between the update and the step number",
    "late report": "the agent reports while the training thread still runs",
    "fence": "a rank dropped by false suspicion comes back and is believed",
    "interruption": "nobody breaks the collective that a healthy rank is blocked in",
    "gradients outlive a generation": "a fault during recovery drops what had not rolled forward",
    "torn told": "a rank that failed in its update claims to be whole",
    "proof kept": "who is told that its gate was passed forgets it with that generation",
}


class Mode(IntEnum):
    RUN = 0
    READY = 1
    """Holds gradients that no plan needs any more; its next forward drops them."""
    ROLL = 2
    WAIT = 3
    COPY = 4
    HALT = 5
    DEAD = 6


class Step(IntEnum):
    NONE = 0
    COMPUTING = 1
    REDUCED = 2
    GATE = 3
    """Its word is given."""
    NODE = 4
    """A leader that gives its node's sum to the other leaders."""
    SUMMED = 5
    """A leader that has the sum of all, and sends it to its node."""
    PASSED = 6
    UPDATE = 7
    TORN = 8
    TORN_COPY = 9


GATE = (Step.GATE, Step.NODE, Step.SUMMED)
PHASES = {
    Step.NONE: Phase.FRESH,
    Step.COMPUTING: Phase.COMPUTING,
    Step.REDUCED: Phase.REDUCED,
    Step.GATE: Phase.ENTERED,
    Step.NODE: Phase.ENTERED,
    Step.SUMMED: Phase.ENTERED,
    Step.PASSED: Phase.PASSED,
    Step.UPDATE: Phase.PASSED,
    Step.TORN: Phase.TORN_UPDATE,
    Step.TORN_COPY: Phase.TORN_REPAIR,
}


class Rank(NamedTuple):
    mode: int = Mode.RUN
    at: int = Step.COMPUTING
    past: tuple[int, ...] = ()
    grads: int = 0
    """Generation and goodness of the gradients, coded like an entry of `past`."""
    source: int = -1
    is_hit: bool = False
    """A fault took this memory, and it has not been repaired since."""
    is_stale: bool = False
    ghost: tuple[tuple[int, ...], ...] = ()
    """The history that a dropped process of this rank still holds, if there is one."""
    told: tuple[int, int, int] = (-1, -1, -1)
    """What an agent reported too early: at, len(past), grads."""
    word: tuple[int, int] = (-1, -1)
    """Step and generation of the last word given, where a rule about words is switched off."""


class World(NamedTuple):
    generation: int
    num_faults: int
    """That may still happen."""
    ended: int
    """Updates that all ranks have ended at some time."""
    ranks: tuple[Rank, ...]
    fallback: bool = False
    begun: int = 0
    """Updates that the newest generation began with, by its plan."""


Move = tuple[str, World]


class Claim(NamedTuple):
    """What goes into a rank's report."""

    at: int
    num_steps: int
    step_generation: int
    gradient_generation: int
    is_member: bool


@cache
def ask(claims: tuple[Claim, ...]) -> RecoveryPlan | Fallback:
    """Build the reports of a generation's end and let the real function plan."""
    generation = 9
    return plan_recovery(
        [
            Report(
                rank=i,
                node=f"node-{i // 2}",
                generation=generation,
                replica=i // 2,
                shard=f"s{i % 2}",
                phase=PHASES[Step(claim.at)],
                step=claim.num_steps,
                step_generation=claim.step_generation,
                gradient_generation=claim.gradient_generation,
                member_generation=generation if claim.is_member else generation - 1,
            )
            for i, claim in enumerate(claims)
        ]
    )


class Model:
    """The rules in force, the faults that may happen, and the number of steps to take."""

    def __init__(
        self, *, without: str = "", num_faults: int = 2, num_steps: int = 1, ghosts: bool = False
    ) -> None:
        self.without = without
        self.num_faults = num_faults
        self.num_steps = num_steps
        self.ghosts = ghosts or without == "fence"
        self._keeps_words = without.endswith(" of a word")

    def begin(self) -> World:
        return World(0, self.num_faults, 0, (Rank(),) * NUM_RANKS)

    def moves(self, world: World) -> Iterator[Move]:
        """Yield what can happen next that is no fault."""
        stopping = any(rank.mode in (Mode.HALT, Mode.DEAD) for rank in world.ranks)
        for i, rank in enumerate(world.ranks):
            if rank.mode < Mode.HALT:
                yield from self._go_on(world, i, rank, stopping)
                if stopping:
                    yield from self._stop(world, i, rank)
        if stopping and all(self._has_reported(rank) for rank in world.ranks):
            yield "plan", self._plan(world)

    def _has_reported(self, rank: Rank) -> bool:
        told = rank.told[0] >= 0 and rank.at != Step.UPDATE
        return told or rank.mode in (Mode.HALT, Mode.DEAD)

    def _go_on(self, world: World, i: int, rank: Rank, stopping: bool) -> Iterator[Move]:
        if rank.mode == Mode.READY:
            yield f"{i} begins a forward", self._forward(world, i, rank)
        elif rank.mode == Mode.ROLL:
            if rank.at == Step.UPDATE:
                yield f"{i} rolled forward", self._end(world, i, rank)
            else:
                yield f"{i} rolls forward", put(world, i, rank, at=Step.UPDATE)
        elif rank.mode == Mode.WAIT:
            if world.ranks[rank.source].mode in (Mode.RUN, Mode.READY):
                yield (
                    f"{i} receives from {rank.source}",
                    put(world, i, rank, mode=Mode.COPY, at=Step.NONE, past=(), grads=-1),
                )
        elif rank.mode == Mode.COPY:
            if world.ranks[rank.source].mode in (Mode.RUN, Mode.READY):
                yield f"{i} is repaired", self._repair(world, i, rank)
        elif len(rank.past) < self.num_steps:
            yield from self._train(world, i, rank, stopping)

    def _train(self, world: World, i: int, rank: Rank, stopping: bool) -> Iterator[Move]:
        if rank.at == Step.COMPUTING:
            if self._all_at(world, range(NUM_RANKS), rank, Step.COMPUTING):
                yield f"{i} reduced", put(world, i, rank, at=Step.REDUCED)
            if stopping and self.without == "abort order":
                yield (
                    f"{i} enters the gate with garbage",
                    put(world, i, rank, at=Step.GATE, grads=rank.grads | 1),
                )
        elif rank.at == Step.REDUCED:
            word = (len(rank.past), rank.grads >> 1) if self._keeps_words else rank.word
            yield f"{i} enters the gate", put(world, i, rank, at=Step.GATE, word=word)
        elif Step.GATE <= rank.at <= Step.SUMMED:
            yield from self._pass(world, i, rank, stopping)
        elif rank.at == Step.PASSED:
            yield f"{i} begins its update", put(world, i, rank, at=Step.UPDATE)
        elif rank.at == Step.UPDATE:
            yield f"{i} ends its update", self._end(world, i, rank)

    def _pass(self, world: World, i: int, rank: Rank, stopping: bool) -> Iterator[Move]:
        leader = LEADERS[i // 2]
        has_sum = rank.at == Step.SUMMED if i == leader else self._may_pass(world, leader, rank)
        if has_sum or self.without == "a gate":
            yield f"{i} passes", put(world, i, rank, at=Step.PASSED)
        elif stopping and self.without == "gate counted":
            yield f"{i} passes an aborted gate", put(world, i, rank, at=Step.PASSED)
        elif i == leader and rank.at == Step.GATE:
            if self.without == "sum of the node" or self._has_words(world, i + 1, rank):
                yield f"{i} has its node's sum", put(world, i, rank, at=Step.NODE)
        elif i == leader:
            leaders = (i,) if self.without == "gate over all ranks" else LEADERS
            if self._all_at(world, leaders, rank, Step.NODE):
                yield f"{i} has the sum", put(world, i, rank, at=Step.SUMMED)

    def _may_pass(self, world: World, leader: int, rank: Rank) -> bool:
        """Return whether the leader may have sent the sum, or the rank passes without."""
        if self.without == "lost leader" and world.ranks[leader].mode == Mode.DEAD:
            return True
        sends_at = Step.NODE if self.without == "sum of all nodes" else Step.SUMMED
        return self._all_at(world, (leader,), rank, sends_at)

    def _has_words(self, world: World, other: int, leader: Rank) -> bool:
        """Return whether the leader has the other rank's word, or an old word instead."""
        step, generation = world.ranks[other].word
        if self.without == "generation of a word" and step == len(leader.past):
            return True
        if self.without == "step of a word" and generation == leader.grads >> 1:
            return True
        return self._all_at(world, (other,), leader, Step.GATE)

    @staticmethod
    def _all_at(world: World, members: Iterable[int], rank: Rank, at: int) -> bool:
        """Have all members, alive or dead, come to the same place of the same step?"""
        num, made = len(rank.past), rank.grads >> 1
        for other in (world.ranks[j] for j in members):
            if len(other.past) > num:
                if other.past[num] >> 1 != made:
                    return False
            elif len(other.past) < num or other.grads >> 1 != made or other.at < at:
                return False
        return True

    def _forward(self, world: World, i: int, rank: Rank) -> World:
        grads = 2 * world.generation if len(rank.past) < self.num_steps else -1
        return put(
            world, i, rank, mode=Mode.RUN, at=Step.COMPUTING, grads=grads, source=-1, is_hit=False
        )

    def _end(self, world: World, i: int, rank: Rank) -> World:
        world = self._forward(world, i, rank._replace(past=(*rank.past, rank.grads)))
        return world._replace(ended=max(world.ended, min(len(each.past) for each in world.ranks)))

    def _repair(self, world: World, i: int, rank: Rank) -> World:
        source = world.ranks[rank.source]
        past = source.past if source.at != Step.UPDATE else (*source.past, source.grads | 1)
        return self._forward(world, i, rank._replace(past=past, is_stale=False))

    def _stop(self, world: World, i: int, rank: Rank) -> Iterator[Move]:
        """A rank learns of the fault: between phases, in a collective or in a copy."""
        if rank.at == Step.UPDATE:
            if self.without == "update without collective":
                yield f"{i} is interrupted in its update", put(world, i, rank, **TORN)
        elif rank.mode == Mode.COPY:
            yield f"{i} stops receiving", put(world, i, rank, **TORN_COPY)
        elif self.without == "late report" and rank.mode == Mode.RUN:
            if rank.told[0] < 0:
                told = (rank.at, len(rank.past), rank.grads)
                yield f"{i} is reported", put(world, i, rank, told=told)
        elif self.without == "interruption" and rank.at in (Step.COMPUTING, *GATE):
            return
        elif self.without == "gradients kept" and rank.at in GATE:
            yield f"{i} stops", put(world, i, rank, mode=Mode.HALT, at=Step.COMPUTING)
        else:
            yield f"{i} stops", put(world, i, rank, mode=Mode.HALT)

    def faults(self, world: World) -> Iterator[Move]:
        """Yield each way in which one more rank can fail now."""
        if not world.num_faults:
            return
        fewer = world._replace(num_faults=world.num_faults - 1)
        for i, rank in enumerate(world.ranks):
            if rank.mode == Mode.DEAD:
                continue
            if rank.ghost:
                yield (
                    f"kill {i}, the dropped one is back",
                    put(fewer, i, rank, **BACK, past=rank.ghost[0]),
                )
                continue
            yield f"kill {i}", put(fewer, i, rank, mode=Mode.DEAD, is_hit=True)
            if self.ghosts and rank.mode in (Mode.RUN, Mode.READY):
                past = rank.past if rank.at != Step.UPDATE else (*rank.past, rank.grads)
                yield f"drop {i}", put(fewer, i, rank, mode=Mode.DEAD, is_hit=True, ghost=(past,))
            if rank.mode != Mode.HALT:
                yield f"exception in {i}", put(fewer, i, rank, **self._throw(rank))

    def _throw(self, rank: Rank) -> dict[str, object]:
        if rank.at == Step.UPDATE and self.without == "atomic end":
            return {"mode": Mode.HALT, "at": Step.PASSED, "grads": rank.grads | 1}
        if rank.at == Step.UPDATE and self.without == "torn told":
            return {"mode": Mode.HALT, "at": Step.COMPUTING, "past": (*rank.past, rank.grads | 1)}
        if rank.at == Step.UPDATE:
            return {**TORN, "is_hit": True}
        return TORN_COPY if rank.mode == Mode.COPY else {"mode": Mode.HALT}

    def claim(self, rank: Rank, generation: int) -> Claim:
        """Say what the coordinator reads about a rank when the generation ends."""
        if rank.mode == Mode.DEAD or rank.at in (Step.NONE, Step.TORN_COPY):
            at = Step.TORN_COPY if rank.mode == Mode.HALT and rank.at else Step.NONE
            return Claim(at, 0, -1, -1, is_member=True)
        at, num, grads = rank.told if rank.told[0] >= 0 else (rank.at, len(rank.past), rank.grads)
        if self.without == "gradients outlive a generation" and grads >> 1 < generation:
            at = min(at, Step.COMPUTING)
        return Claim(
            at,
            num,
            rank.past[num - 1] >> 1 if num else -1,
            grads >> 1 if at > Step.COMPUTING else -1,
            is_member=not rank.is_stale or self.without == "fence",
        )

    def claims(self, world: World) -> tuple[Claim, ...]:
        return tuple(self.claim(rank, world.generation) for rank in world.ranks)

    def _plan(self, world: World) -> World:
        """Open the next generation: each rank gets its part of the plan, or all fall back."""
        plan = ask(self.claims(world))
        if isinstance(plan, Fallback):
            return world._replace(fallback=True)
        world = world._replace(generation=world.generation + 1, begun=plan.step)
        sources = {transfer.target: transfer.source for transfer in plan.transfers}
        for i, rank in enumerate(world.ranks):
            bare = rank._replace(told=(-1, -1, -1))
            if rank.mode == Mode.DEAD:
                bare = bare._replace(at=Step.NONE, past=(), grads=-1)
            if i in sources:
                world = put(world, i, bare, mode=Mode.WAIT, source=sources[i])
            elif i in plan.roll_forward:
                at = bare.at if self.without == "proof kept" else Step.PASSED
                world = put(world, i, bare, mode=Mode.ROLL, at=at)
            elif rank.at in GATE:
                world = put(world, i, bare, mode=Mode.READY, at=Step.GATE)
            else:
                world = self._forward(world, i, bare)
        return world


TORN: dict[str, object] = {"mode": Mode.HALT, "at": Step.TORN}
TORN_COPY: dict[str, object] = {
    "mode": Mode.HALT,
    "at": Step.TORN_COPY,
    "past": (),
    "grads": -1,
    "source": -1,
}
BACK: dict[str, object] = {
    "mode": Mode.HALT,
    "at": Step.COMPUTING,
    "grads": -1,
    "is_stale": True,
    "ghost": (),
}


def put(world: World, i: int, rank: Rank, **changes: object) -> World:
    changed = rank._replace(**changes)  # type: ignore[arg-type]
    return world._replace(ranks=(*world.ranks[:i], changed, *world.ranks[i + 1 :]))


def find_breaks(model: Model, label: str, before: World, after: World) -> Iterator[str]:
    """Name the promises that this move breaks."""
    if label == "plan":
        yield from _judge_plan(model, before, after)
    running = [rank.past for rank in after.ranks if rank.mode in (Mode.RUN, Mode.READY)]
    if running:
        shared = min(map(len, running))
        if len({past[:shared] for past in running}) > 1 or max(map(len, running)) > shared + 1:
            yield "mixed: ranks go on from different states"
    if any(number & 1 for past in running for number in past):
        yield "garbage: a state holds what no run without faults has"


def _is_whole(claim: Claim) -> bool:
    return Step.COMPUTING <= claim.at <= Step.UPDATE and claim.is_member


def _judge_plan(model: Model, before: World, after: World) -> Iterator[str]:
    claims = model.claims(before)
    if after.fallback:
        held = {i % 2 for i, claim in enumerate(claims) if _is_whole(claim)}
        if held == {0, 1}:
            yield "needless fallback: every shard has a whole holder"
        if {i % 2 for i, rank in enumerate(before.ranks) if not rank.is_hit} == {0, 1}:
            yield "needless fallback: no fault took all copies of a shard"
        return
    plan = ask(claims)
    assert isinstance(plan, RecoveryPlan)
    whole = [
        (claim, rank) for claim, rank in zip(claims, before.ranks, strict=True) if _is_whole(claim)
    ]
    if plan.step < before.ended:
        yield "lost: a step that all ranks had ended"
    if plan.step < before.begun:
        yield "lost: a step that a generation had begun with"
    if plan.step < max(claim.num_steps + (claim.at == Step.PASSED) for claim, _ in whole):
        yield "lost: a step that a whole rank had passed or ended"
    pasts = [rank.past for _, rank in whole]
    if any(a[: len(b)] != b[: len(a)] for a in pasts for b in pasts):
        yield "two histories: whole ranks disagree about a step"
    for rank in after.ranks:
        if rank.mode != Mode.WAIT and len(rank.past) + (rank.mode == Mode.ROLL) != plan.step:
            yield "mixed: the plan meets another state than was reported"
