"""What happens to runs in the recovery suite, over whatever the ranks communicate.

Each scenario takes the channels and a layout, checks everything itself, and can be
run in a process of its own.
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from resilience.errors import CorruptionError, StateError
from resilience.state.report import Phase
from tests.resilience.checkpointless.recovery_channels import Seat
from tests.resilience.checkpointless.recovery_runs import (
    ANY,
    LAYOUTS,
    MOST_STEPS,
    NUM_RANKS,
    Fault,
    Run,
    Stance,
    assert_undisturbed,
)

EARLY = ("forward", "half", "reduced", "gate", "entering")
"""Places of a step at which no rank can have passed its gate."""
LATE = ("summed", "before_update", "in_update", "after_update")
PLACES = EARLY + LATE
RANKS = range(NUM_RANKS)
NOWHERE = "nowhere"
"""The place of a fault that another hand brings about."""


def blocked(place, step):
    """Return where ranks come to wait for one that never gets beyond a place of a step."""
    if place in LATE:
        return Stance("reducing-0", step + 1)
    return Stance({"forward": "reducing-0", "half": "reducing-1"}.get(place, "entering"), step)


def held(place, step):
    return Stance(place, step, is_held=True)


def choose_stance(name, place, step):
    if name == "blocked":
        return blocked(place, step)
    return held(place if name == "beside" else name, step)


def names_of_stances(place):
    """Return where others can be when a rank fails at a place."""
    if place in EARLY:
        return ("blocked", "beside")
    return ("blocked", "summed", "before_update")


def expect(fault, stances):
    """Tell the step and the roles that have to come of a fault, from the rules alone.

    A gate counts as passed where a rank that is alive says so, or began the update.
    """
    is_past = {rank: each != "summed" for rank, each in stances.items()}
    is_committed = fault.place in LATE and (
        any(is_past.values()) or (not fault.is_replaced and fault.place != "summed")
    )
    roles = {}
    for rank, is_ahead in is_past.items():
        roles[rank] = "rolled_forward" if is_committed and not is_ahead else "kept"
    if fault.is_replaced or fault.place == "in_update":
        roles[fault.rank] = "repaired"
    elif is_committed and fault.place != "after_update":
        roles[fault.rank] = "rolled_forward"
    else:
        roles[fault.rank] = "kept"
    return fault.step + is_committed, roles


def break_once(run, fault, names):
    """End a generation by one fault, the others being at the stances of these names."""
    stances = {rank: choose_stance(each, fault.place, fault.step) for rank, each in names.items()}
    return run.play(MOST_STEPS, [fault], stances)


def assert_resumed(resumed, step, roles, hint=""):
    assert {each.step for each in resumed} == {step}, f"{hint} {resumed}"
    found = {rank: each.role for rank, each in enumerate(resumed)}
    assert found == dict(roles), f"{hint} {resumed}"
    for each in resumed:
        is_repaired = each.role == "repaired"
        assert (each.source is not None) == is_repaired
        assert not is_repaired or each.num_bytes > 0


def finish(run, step, roles, num_steps):
    """Go on without faults to the end; all bits have to be those of an undisturbed run."""
    resumed = run.play(num_steps)
    assert_resumed(resumed, step, roles)
    assert_undisturbed(run, num_steps)


def each_rank_fails_in_turn(channels, layout, place, is_replaced):
    """Rank r fails in step r, at the place, with the others wherever they can be."""
    for name in ("mixed",) if channels.is_costly else ("mixed", *names_of_stances(place)):
        run = Run(channels, layout)
        expected = (0, dict.fromkeys(RANKS, "started"))
        for rank in RANKS:
            names = _name_stances(name, place, rank)
            fault = Fault(rank, place, rank, is_replaced)
            assert_resumed(break_once(run, fault, names), *expected, f"{name}, {fault}")
            expected = expect(fault, names)
        finish(run, *expected, num_steps=NUM_RANKS + 2)


def _name_stances(name, place, faulty):
    others = [rank for rank in RANKS if rank != faulty]
    if name != "mixed":
        return dict.fromkeys(others, name)
    names = names_of_stances(place)
    return {rank: names[number % len(names)] for number, rank in enumerate(others)}


def first_step(channels, layout, place, is_replaced):
    for rank in channels.ranks:
        run = Run(channels, layout)
        fault, names = Fault(rank, place, 0, is_replaced), _name_stances("mixed", place, rank)
        break_once(run, fault, names)
        finish(run, *expect(fault, names), num_steps=3)


def random_faults(channels, layout, seed):
    rng = random.Random(seed)
    run, step = Run(channels, layout, seed=seed), 0
    expected = (0, dict.fromkeys(RANKS, "started"))
    story = []
    for _ in range(5):
        rank, place = rng.randrange(NUM_RANKS), rng.choice(PLACES)
        fault = Fault(rank, place, min(step + rng.randrange(2), 5), rng.random() < 0.5)
        names = {each: rng.choice(names_of_stances(place)) for each in RANKS if each != rank}
        story.append((fault, names))
        assert_resumed(break_once(run, fault, names), *expected, f"seed {seed}: {story}")
        expected = expect(fault, names)
        step = expected[0]
    finish(run, *expected, num_steps=8)


# ---- faults within a recovery


def _source(layout):
    """Return who repairs rank 0: of its node if it can be, else with its shard."""
    return 2 if layout == "2-replicas-x-2-shards" else 1


def transfer_fails(channels, layout, who, place, is_replaced):
    """Rank 0 was replaced; while it is repaired, it, its source or a bystander fails."""
    source = _source(layout)
    rank = {"target": 0, "source": source, "bystander": 3}[who]
    # At step 0 a rank that was to be repaired and one that was not look alike but for the phase.
    step = 0 if who == "target" else 1
    run = Run(channels, layout)
    break_once(run, Fault(0, "half", step, is_replaced=True), _name_stances("blocked", "half", 0))
    stances = {each: Stance("waiting") for each in RANKS if each != rank}
    if who == "source":
        stances[0] = Stance("receiving")
    elif who == "target" and place != "received":
        stances[source] = Stance("sending")

    run.play(MOST_STEPS, [Fault(rank, place, ANY, is_replaced)], stances)

    if is_replaced and who == "source" and layout == "2-replicas-x-2-shards":
        finish(run, 0, dict.fromkeys(RANKS, "started"), 3)
        return
    roles = dict.fromkeys(RANKS, "kept")
    if who != "bystander":
        roles[0] = "repaired"
    if is_replaced:
        roles[rank] = "repaired"
    finish(run, step, roles, 3)


def roll_forward_fails(channels, layout, rank, is_replaced):
    """Only rank 1 knows that the gate was passed; a rank fails while all roll forward.

    Those that have not begun to know it by then from its report, whatever becomes of rank 1.
    """
    for stance in (Stance("reducing-0", 2), Stance("resume", is_held=True)):
        run = Run(channels, layout)
        break_once(run, Fault(1, "before_update", 1), _name_stances("summed", "before_update", 1))
        others = [each for each in RANKS if each != rank]
        run.play(
            MOST_STEPS, [Fault(rank, "in_update", 1, is_replaced)], dict.fromkeys(others, stance)
        )

        roles = {**dict.fromkeys(RANKS, "kept"), rank: "repaired"}
        if stance.is_held:
            roles = {**dict.fromkeys(RANKS, "rolled_forward"), rank: "repaired"}
        finish(run, 2, roles, 4)


def fails_before_it_resumes(channels, layout, rank, is_replaced):
    """A rank that has to roll forward fails before; the others have done so."""
    run = Run(channels, layout)
    break_once(run, Fault(1, "before_update", 1), _name_stances("summed", "before_update", 1))
    stances = {each: Stance("reducing-0", 2) for each in RANKS if each != rank}
    resumed = run.play(MOST_STEPS, [Fault(rank, "resume", ANY, is_replaced)], stances)
    assert resumed[rank] is None

    role = "repaired" if is_replaced else "rolled_forward"
    finish(run, 2, {**dict.fromkeys(RANKS, "kept"), rank: role}, 4)


def same_rank_fails_again_and_again(channels, layout, is_replaced):
    """The third generation still knows what the first had committed."""
    run = Run(channels, layout)
    names = _name_stances("summed", "before_update", 3)
    break_once(run, Fault(3, "before_update", 1), names)
    others = [each for each in RANKS if each != 3]
    for _ in range(3):
        stances = dict.fromkeys(others, Stance("resume", is_held=True))
        run.play(MOST_STEPS, [Fault(3, "resume", ANY)], stances)
    if is_replaced:
        stances = dict.fromkeys(others, Stance("reducing-0", 2))
        run.play(MOST_STEPS, [Fault(3, "resume", ANY, is_replaced=True)], stances)
        finish(run, 2, {**dict.fromkeys(others, "kept"), 3: "repaired"}, 4)
    else:
        finish(run, 2, dict.fromkeys(RANKS, "rolled_forward"), 4)


# ---- states that are not to be trusted


def flip_a_bit(run, rank, number):
    tensor = run.workers[rank].tensors()[number]
    tensor.view(torch.int32).view(-1)[0] ^= 1 << 12


def changed_state_is_repaired(channels, layout, place, name, number):
    """A bit flips; the rank's own check finds it before the bit can do harm."""
    for rank in channels.ranks:
        run = Run(channels, layout, self_check=1)
        action = {(rank, place, 1): lambda run=run, rank=rank: flip_a_bit(run, rank, number)}
        others = [each for each in RANKS if each != rank]
        at = "gate" if place in EARLY else place
        stances = dict.fromkeys(others, choose_stance(name, at, 1))
        run.play(MOST_STEPS, [Fault(rank, NOWHERE)], stances, action)
        assert isinstance(run.errors[rank], CorruptionError)
        assert not run.reports[rank].is_healthy

        is_committed = place in LATE and name == "blocked"
        finish(run, 1 + is_committed, {**dict.fromkeys(others, "kept"), rank: "repaired"}, 4)


def changed_source_sends_nothing(channels, layout):
    source = _source(layout)
    run = Run(channels, layout, self_check=1)
    break_once(run, Fault(0, "half", 1, is_replaced=True), _name_stances("blocked", "half", 0))
    action = {(source, "recovery", 1): lambda: flip_a_bit(run, source, 0)}
    stances = {each: Stance("waiting") for each in RANKS if each != source}
    stances[0] = Stance("receiving")
    run.play(MOST_STEPS, [Fault(source, NOWHERE)], stances, action)
    assert isinstance(run.errors[source], CorruptionError)

    if layout == "2-replicas-x-2-shards":
        finish(run, 0, dict.fromkeys(RANKS, "started"), 3)
    else:
        finish(run, 1, {0: "repaired", 1: "repaired", 2: "kept", 3: "kept"}, 3)


def changed_at_the_end(channels, layout):
    """No gate follows the last update, so the end has a check of its own."""
    run = Run(channels, layout, self_check=1)
    run.play(2)
    run.workers[0].recovery.check()
    flip_a_bit(run, 0, 1)

    with pytest.raises(CorruptionError, match="the state of step 2 has the digest"):
        run.workers[0].recovery.check()


def missed_generation(channels, layout):
    """The others went on without a rank, whose state then counts as none."""
    run = Run(channels, layout)
    away = run.workers[0]
    fault = Fault(0, "after_update", 1, is_replaced=True)
    break_once(run, fault, _name_stances("summed", "after_update", 0))
    break_once(
        run, Fault(0, "forward", 1, is_replaced=True), _name_stances("blocked", "forward", 0)
    )
    assert away.recovery.mark.step == 2, "it is ahead of the others"
    run.workers[0] = away
    run.reports[0] = away.recovery.report(rank=0, node="node-0", generation=1)
    finish(run, 1, {0: "repaired", 1: "kept", 2: "kept", 3: "kept"}, 6)

    assert away.recovery.mark.phase is Phase.COMPUTING
    away.recovery.enter(Seat(run.number, 0, LAYOUTS[layout], run.reports, away.reach))
    assert away.recovery.mark.step == 6
    missed = [replace(each, generation=run.number + 1) for each in run.reports]
    away.recovery.enter(Seat(run.number + 2, 0, LAYOUTS[layout], missed, away.reach))
    assert away.recovery.mark.phase is Phase.FRESH


def update_with_a_collective(channels, layout):
    run = Run(
        channels,
        layout,
        work_in_update=lambda seat: seat.open_group().allreduce([torch.ones(1)]),
    )
    run.play(1, [Fault(rank, NOWHERE) for rank in RANKS])

    for rank in RANKS:
        assert isinstance(run.errors[rank], StateError)
        assert "c10d.allreduce_" in str(run.errors[rank])
        assert run.reports[rank].phase is Phase.TORN_UPDATE


def one_shard_fails_before_the_gate(channels, layout):
    """Ranks 1 and 3 stop with their gradients reduced; the others are broken in the gate."""
    run = Run(channels, layout)
    faults = [Fault(1, "reduced", 1), Fault(3, "reduced", 1)]
    run.play(MOST_STEPS, faults, {rank: Stance("entering", 1) for rank in (0, 2)})
    finish(run, 1, dict.fromkeys(RANKS, "kept"), 3)
