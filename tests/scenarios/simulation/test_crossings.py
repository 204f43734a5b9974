"""What crosses within milliseconds or is long past: traces that random ones seldom have."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from resilience.agent.coordination.membership import Stage, State
from resilience.agent.coordination.votes import find_doubted
from tests.scenarios.simulation import simulation
from tests.scenarios.simulation.simulation import BrokenPromiseError, SimNode, World

INSTANT_S = 0.00001


def is_agreeing(state: State) -> bool:
    return state.stage == Stage.AGREEING


def begin(num_nodes: int, num_standby: int, **options: bool) -> tuple[World, SimNode, list[str]]:
    """Return a world that trains, its coordinator, and all names, members first."""
    world = World(3, num_nodes=num_nodes, num_standby=num_standby, **options)
    world.run(30)
    (leader,) = (node for node in world.nodes.values() if node.member.state)
    members = leader.opening.layout.nodes if leader.opening else ()
    assert members[0] == leader.name
    return world, leader, [*members, *(name for name in world.names if name not in members)]


def test_standby_node_that_agreed_to_a_lost_coordinator_agrees_to_the_next_one() -> None:
    """The members know nothing of that proposal, and the silent one is back by then."""
    world, leader, (first, second, third, standby) = begin(3, 1)
    world.network.cut([third], [first, second, standby], is_silent=True)
    while leader.member.state is None or leader.member.state.stage != Stage.AGREEING:
        world.run(INSTANT_S)
    world.network.cut([first], [second], is_silent=True)
    while world.nodes[standby].standing.agreed is None:
        world.run(INSTANT_S)
    world.network.cut([first], [standby], is_silent=True)
    world.kill(first)
    world.network.reset([first], [second, standby])
    world.network.heal(world.names, world.names)
    num_steps = world.steps

    world.run(40)

    assert world.steps > num_steps


def test_standby_node_that_was_silent_may_have_gone_on_with_those_that_are_cut_off() -> None:
    """Once heard of, it is never forgotten: what has no majority waits for word of it."""
    world, _, (first, second, standby) = begin(2, 1, shares_folder=False)
    world.pause(standby)
    world.run(8)
    world.network.cut([second], [first, standby], is_silent=True)
    world.resume(standby)
    world.run(12)
    num_steps = world.steps
    world.network.cut([standby], [first, second], is_silent=True)
    world.kill(first)
    world.network.heal([first], [second])
    world.start(first)

    # Each commit is held against those before it.
    world.run(30)
    assert world.steps == num_steps
    world.network.heal(world.names, world.names)
    world.run(20)
    assert world.steps > num_steps


def test_side_that_gives_up_does_not_call_the_run_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its agents are started again, and the other half goes on meanwhile."""
    monkeypatch.setattr(simulation, "PATIENCE_S", 20.0)
    world, _, (first, second, third, fourth) = begin(2, 2)
    world.network.cut([first, third], [second, fourth], is_silent=True)
    while sum(node.end is not None for node in world.nodes.values()) < 2:
        world.run(1)
    ended = [name for name in world.names if world.nodes[name].end]
    assert ended in ([first, third], [second, fourth])
    for name in ended:
        world.kill(name)
        world.start(name)

    # Each commit is held against those before it.
    world.run(30)
    num_steps = world.steps
    world.network.heal(world.names, world.names)
    world.run(20)
    assert world.steps > num_steps


def run_until(world: World, holds: Callable[[], bool]) -> None:
    for _ in range(10**6):
        if holds():
            return
        world.run(INSTANT_S)
    raise AssertionError(world.describe())


def test_members_that_one_coordinator_asked_for_never_stand_beside_those_of_another() -> None:
    """One is cut off as it asks, the next one opens a generation with others, and a second cut
    leaves the first one with a member that has agreed to the next one's, and not heard more."""
    world, first, (one, two, three, *standbys) = begin(3, 3)
    world.fail(world.nodes[three], 0)
    run_until(world, lambda: first.member.state is not None and is_agreeing(first.member.state))
    world.network.cut([one], [two, three, *standbys], is_silent=True)
    others = [node for node in world.nodes.values() if node is not first]
    run_until(world, lambda: any(node.standing.generation == 1 for node in others))
    (next_one,) = (node for node in others if node.member.state)
    members = next_one.standing.layout
    assert members is not None
    assert one not in members.nodes
    late = three if next_one.name == two else two
    assert world.nodes[late].standing.agreed == members
    rest = [name for name in standbys if name not in members.nodes]
    cut_off = [name for name in members.nodes if name != late]
    world.network.cut([one, late, rest[0]], [*cut_off, rest[1]], is_silent=True)
    world.network.heal([one], [late, rest[0]])
    num_steps = world.steps

    # Each commit is held against those before it.
    world.run(20)
    assert world.steps > num_steps
    world.network.heal(world.names, world.names)
    world.run(20)
    assert {node.standing.generation for node in world.nodes.values()} == {world.generation}


@pytest.mark.parametrize("heals_first", [False, True])
def test_new_member_that_never_heard_of_its_generation_s_begin_has_a_vote(
    heals_first: bool,
) -> None:
    """Its coordinator is cut off in that moment: it can have committed nothing without it."""
    world, leader, (one, two, three, four) = begin(3, 1, shares_folder=False)
    world.network.cut([three], [one, two, four], is_silent=True)
    run_until(world, lambda: leader.standing.generation == 1)
    assert world.nodes[four].standing.generation == 0
    world.network.cut([one], [two, three, four], is_silent=True)
    world.network.heal([three], [two, four])
    num_steps = world.steps

    world.run(0 if heals_first else 20)
    assert heals_first or world.steps > num_steps
    world.network.heal(world.names, world.names)
    world.run(20)
    assert world.steps > num_steps
    assert len({node.standing.generation for node in world.nodes.values()}) == 1


def test_standby_node_that_has_led_nobody_takes_a_place_when_it_is_back() -> None:
    """It has promised to agree to nothing that is asked in an earlier ballot than its own."""
    world, leader, (first, second, standby) = begin(2, 1)
    world.network.cut([standby], [first, second], is_silent=True)
    run_until(world, lambda: world.nodes[standby].member.state is not None)
    world.network.heal(world.names, world.names)
    run_until(
        world, lambda: standby in (leader.member.state or State(options=world.options)).present
    )
    world.kill(second)
    num_steps = world.steps

    world.run(10)

    assert world.steps > num_steps
    assert set(world.committed[-1][1].nodes) == {first, standby}


def test_half_goes_on_with_its_agreement_where_the_half_with_the_record_has_ended() -> None:
    """Nobody is left who could know which of the two has come about."""
    world, leader, (first, second, standby) = begin(2, 1)
    world.network.cut([first], [second], is_silent=True)
    run_until(world, lambda: leader.member.state is not None and leader.member.state.is_claiming)
    world.network.reset([first], [second])
    world.network.heal(world.names, world.names)
    run_until(world, lambda: world.nodes[second].standing.agreed is not None)
    agreed = world.nodes[second].standing.agreed
    world.network.cut([first], [second, standby], is_silent=True)
    world.kill(first)
    world.network.heal(world.names, world.names)
    world.start(first)
    num_steps = world.steps

    world.run(30)

    assert world.folder.records[1] != agreed
    assert world.steps > num_steps


def test_number_of_a_generation_is_not_given_again_where_its_members_have_ended() -> None:
    world, _, (first, second, standby) = begin(2, 1, shares_folder=False)
    world.network.cut([second], [first, standby], is_silent=True)
    world.run(15)
    assert world.generation == 1
    for name in (first, standby):
        world.kill(name)
    world.network.heal(world.names, world.names)
    for name in (first, standby):
        world.start(name)

    # Each commit is held against those before it.
    world.run(20)

    assert world.generation > 100


def test_agent_that_only_members_have_heard_of_is_known_to_standby_nodes_that_lead() -> None:
    """It may go on with those that ended since, and hold what they have committed."""
    world, _, (first, second, third, silent, *fresh) = begin(3, 3)
    world.pause(silent)
    world.run(6)
    for name in fresh:
        world.kill(name)
        world.start(name)
    world.run(5)
    leader = fresh[0]
    world.network.cut([leader], [name for name in world.names if name != leader], is_silent=True)
    run_until(world, lambda: world.nodes[leader].member.state is not None)
    world.network.cut([first, second, silent], [third, *fresh], is_silent=True)
    world.resume(silent)
    world.network.reset([third, fresh[1]], [first])
    world.network.heal([leader], [third, fresh[1]])
    world.run(6)

    state = world.nodes[leader].member.state
    assert state is not None
    assert third in state.present
    assert silent in find_doubted(state)


@pytest.mark.parametrize("skew_s", [0.2, 0.5, 1.0, 2.0])
def test_coordinator_that_is_cut_off_takes_the_record_with_nobody(skew_s: float) -> None:
    """It notices the silence of the standby node after that of the other member."""
    world, _, (first, second, standby) = begin(2, 1)
    world.network.cut([first], [second], is_silent=True)
    world.run(skew_s)
    world.network.cut([first], [standby], is_silent=True)
    num_steps = world.steps

    world.run(8)

    assert world.steps > num_steps + 10, world.describe()
    world.network.heal([first], [second, standby])
    world.run(8)
    assert {name for node in world.nodes.values() for name in present(node)} == set(world.names)


def present(node: SimNode) -> set[str]:
    return set(node.member.state.present) if node.member.state else set()


def test_coordinator_that_sees_another_folder_has_no_record() -> None:
    """Each half could have one there."""
    world, leader, (first, second, standby) = begin(2, 1)
    world.shares_folder = False
    leader.standing = replace(leader.standing, shares_folder=False)
    leader.join()
    world.network.cut([second], [first, standby], is_silent=True)
    world.run(8)
    num_steps = world.steps

    world.run(20)

    assert world.folder.records == {}
    assert world.steps == num_steps


@pytest.mark.parametrize("still_s", [2.0, 8.0])
@pytest.mark.parametrize("who", ["coordinator", "link"])
def test_place_is_given_away_by_what_the_others_hold_now(who: str, still_s: float) -> None:
    """What the coordinator was told before is past: only the silent node still holds the state."""
    world, leader, (first, second, third, fourth, _) = begin(4, 1)
    world.pause(third)
    world.run(2)
    world.pause(fourth)
    while leader.member.state is None or len(leader.member.state.reports) < 4:
        world.run(INSTANT_S)
    assert not leader.member.state.nodes[2]
    num_steps = world.steps
    if who == "coordinator":
        world.pause(first)
    else:
        world.network.cut([first], [second], is_silent=True)
    lose_state(world, fourth)
    world.resume(fourth)
    world.run(still_s)
    lose_state(world, first)
    lose_state(world, second)
    world.network.heal([first], [second])
    world.resume(first)
    world.run(1)

    world.resume(third)

    # Each commit is held against those before it.
    world.run(30)
    assert world.steps > num_steps + 10, world.describe()


def lose_state(world: World, name: str) -> None:
    for local_rank in range(world.options.num_local_ranks):
        world.fail(world.nodes[name], local_rank)


def begin_with_deadlines(
    num_nodes: int, num_standby: int, **options: int
) -> tuple[World, list[str]]:
    """Return a world that trains, with the times of a real run, and the names of its nodes."""
    world = World(3, num_nodes=num_nodes, num_standby=num_standby, **options)
    times = {"join_deadline_s": 120.0, "stop_deadline_s": 15.0, "partition_patience_s": 600.0}
    world.options = replace(world.options, **times)
    world.run(30)
    members = world.committed[-1][1].nodes
    return world, [*members, *(name for name in world.names if name not in members)]


def test_run_goes_on_when_the_last_holder_of_a_shard_was_waited_for() -> None:
    world, (first, second, third, standby) = begin_with_deadlines(3, 1, num_shards=6)
    world.network.cut([third], [first, second, standby], is_silent=True)
    world.run(590)
    num_steps = world.steps

    # Nobody keeps a state beyond memory here.
    with pytest.raises(BrokenPromiseError, match=f"begins at 0, {num_steps} was committed"):
        world.run(60)

    assert [node.end for node in world.nodes.values()] == [None] * 4


@pytest.mark.parametrize("apart_s", [300, 900])
def test_nodes_that_meet_again_have_all_their_time_for_the_rest(apart_s: float) -> None:
    world, (first, second, third) = begin_with_deadlines(3, 0)
    for one, other in ((first, second), (second, third), (first, third)):
        world.network.cut([one], [other], is_silent=True)
    world.run(apart_s)
    num_steps = world.steps
    world.network.heal([first], [second])
    world.run(100)

    world.network.heal(world.names, world.names)
    world.run(30)

    assert world.steps > num_steps
    assert [node.end for node in world.nodes.values()] == [None] * 3


def test_standby_node_that_came_while_ranks_stopped_has_a_vote_as_a_member() -> None:
    world, leader, (first, second, third, standby) = begin(3, 1, shares_folder=False)
    world.kill(standby)
    world.network.cut([third], [first, second], is_silent=True)
    world.run(6)
    world.start(standby)
    while leader.standing.generation < 1:
        world.run(INSTANT_S)
    world.network.cut([first], [standby], is_silent=True)
    while world.nodes[second].standing.generation < 1:
        world.run(INSTANT_S)
    world.network.cut([first], [second, third, standby], is_silent=True)
    world.network.heal([third], [second, standby])
    num_steps = world.steps

    world.run(30)

    assert world.steps > num_steps + 10, world.describe()


def test_without_recovery_nobody_takes_the_place_of_another() -> None:
    """An agent too many has come, and each half of the members has one."""
    world = World(3, num_nodes=2, num_standby=2)
    world.options = replace(world.options, recovers=False)
    world.run(30)
    first, second = world.committed[-1][1].nodes
    third, fourth = (name for name in world.names if name not in (first, second))
    world.network.cut([first, third], [second, fourth], is_silent=True)
    world.run(8)
    num_steps = world.steps

    world.run(60)

    assert world.steps == num_steps
