"""Agents that stand still, die, are cut off and come back, over simulated time."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from resilience.agent.connections.transport import NO_AGENT, Arrival, Gone
from resilience.agent.coordination.events import NodeEnded
from resilience.agent.coordination.membership import Stage
from resilience.agent.coordination.node import EVIDENCE_EVERY_S
from resilience.agent.coordination.votes import find_doubted
from resilience.arguments import NAMELESS_S, NO_NAME
from resilience.comm.messages import Finished
from resilience.testing.network import SimulatedTransport
from tests.scenarios.simulation.simulation import LEASE_S, World

SIZES = [(2, 0), (2, 1), (1, 2), (2, 2), (3, 1)]


def begun(num_nodes: int, num_standby: int, seed: int = 0, **more: Any) -> World:
    world = World(seed, num_nodes=num_nodes, num_standby=num_standby, **more)
    world.run(10)
    assert world.steps > 10, world.describe()
    return world


def test_log_says_once_why_no_generation_has_opened_for_a_lease() -> None:
    world = World(0, num_nodes=2, num_standby=0)
    world.kill("n1")
    world.run(3 * LEASE_S)
    world.start("n1")
    world.run(10)

    (waits,) = [each for each in world.notes if each[3].event == "generation_waits"]
    assert waits[3].fields == {"reason": "waits for nodes to join"}
    assert LEASE_S <= waits[0] <= 2 * LEASE_S


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("leases", [1.3, 3, 4, 10])
@pytest.mark.parametrize("who", ["each", "all", "pairs"])
def test_agents_that_stand_still_lose_nothing(
    size: tuple[int, int], leases: float, who: str
) -> None:
    names = [f"n{number}" for number in range(sum(size))]
    groups = {
        "each": [[name] for name in names],
        "all": [names],
        "pairs": [[one, two] for one in names for two in names if one < two],
    }[who]
    for group in groups:
        world = begun(*size)
        steps = world.steps
        for name in group:
            world.pause(name)
        world.run(leases * LEASE_S)
        for name in group:
            world.resume(name)
        world.run(10)
        assert world.steps > steps + 10, f"{group}\n{world.describe()}"
        present = {
            n
            for node in world.nodes.values()
            if node.member.state
            for n in node.member.state.present
        }
        assert present == set(names), f"{group}\n{world.describe()}"


def test_agents_with_another_token_are_named_once_and_do_not_begin() -> None:
    world = World(0, num_nodes=2, num_standby=1, tokens={"n1": "another"})
    world.run(10)

    assert world.steps > 10  # of n0 and n2
    warnings = sorted(
        f"{name} says {note.fields['text'].partition(' is there')[0]}"
        for _, name, _, note in world.notes
        if note.event == "warning"
    )
    refused = "an agent that does not know the run's token"
    pairs = [("n0", "n1"), ("n1", "n0"), ("n1", "n2"), ("n2", "n1")]
    assert warnings == [f"{one} says {other}:1: {refused}" for one, other in pairs]


@pytest.mark.parametrize(("kind", "patience_s"), [(NO_NAME, NAMELESS_S), (NO_AGENT, LEASE_S)])
def test_address_without_an_agent_for_some_time_is_told_of_once(
    monkeypatch: pytest.MonkeyPatch, kind: str, patience_s: float
) -> None:
    """Pods get their names when they start: a shorter time is usual."""
    receive = SimulatedTransport.receive

    def receive_nameless(transport: SimulatedTransport) -> list[Arrival]:
        """Let a name not resolve, in the place of an address without a listener."""
        return [
            replace(each, reason=f"{kind}: unknown") if isinstance(each, Gone) else each
            for each in receive(transport)
        ]

    monkeypatch.setattr(SimulatedTransport, "receive", receive_nameless)
    world = World(0, num_nodes=3, num_standby=0)
    world.kill("n2")

    def told() -> list[str]:
        return sorted(
            f"{name} says {note.fields['text']}"
            for _, name, _, note in world.notes
            if note.event == "warning" and kind in note.fields["text"]
        )

    world.run(0.9 * patience_s)
    assert told() == []
    world.run(2 * patience_s)
    assert told() == [f"n0 says n2:1: {kind}: unknown"], "by the one that asks"


@pytest.mark.parametrize(("size", "num_silent", "leases"), [((5, 1), 1, 1), ((5, 2), 2, 3)])
def test_next_step_comes_within_leases_of_the_silence(
    size: tuple[int, int], num_silent: int, leases: int
) -> None:
    """And a second, by simulated time."""
    assert_next_step_within(begun(*size), num_silent, leases)


def test_first_half_of_many_nodes_that_falls_silent_takes_four_leases() -> None:
    """Three until all eights of them were asked in vain, and one for the other members to come."""
    assert_next_step_within(begun(32, 16), 16, 4)


def assert_next_step_within(world: World, num_silent: int, leases: int) -> None:
    before, (silent, others) = (
        world.generation,
        (world.names[:num_silent], world.names[num_silent:]),
    )
    world.network.cut(silent, others, is_silent=True)

    world.run(leases * LEASE_S + 1)

    assert world.generation > before, world.describe()


@pytest.mark.parametrize("recovers", [False, True])
def test_run_that_is_asked_to_end_while_it_recovers_leaves_no_word_of_its_end(
    recovers: bool,
) -> None:
    """It may go on elsewhere: another job in its folder waits for its record to fall silent."""
    world = begun(2, 0)
    asked = world.nodes["n0"]
    if recovers:
        world.pause("n1")
        world.fail(asked, 0)
    state = asked.member.state
    assert state
    assert state.stage == (Stage.STOPPING if recovers else Stage.RUNNING)

    asked.member.tell(
        Finished(generation=state.generation, rank=0, status=143, text="asked to end")
    )
    world.run(LEASE_S)

    assert asked.end
    assert asked.end.status == 143
    assert world.folder.founding
    assert world.folder.founding.is_over == (not recovers)


def test_who_waits_for_a_node_looks_for_evidence_from_time_to_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each look's answer wakes the agent, and a place may be empty for hours."""
    world = begun(2, 0)
    waits = world.nodes["n0"]
    world.pause("n1")
    world.fail(waits, 0)
    looks: list[float] = []
    monkeypatch.setattr(waits, "read_record", lambda _: looks.append(world.network.now_s))

    for _ in range(5):
        world.network.now_s += EVIDENCE_EVERY_S
        for _ in range(20):
            waits.member.tick()
        assert waits.member.due_s <= world.network.now_s + EVIDENCE_EVERY_S

    assert waits.member.state
    assert waits.member.state.stage == Stage.STOPPING
    assert len(looks) == len(set(looks)) == 5


def test_limit_member_that_has_not_heard_of_a_new_start_goes_on_with_an_older_state() -> None:
    """As docs/recovery.md says: evidence is of one start of an agent, and another one lives."""
    world = begun(2, 2)
    # The side of n0: a standby node joins it that knows nothing.
    world.kill("n3")
    world.network.cut(["n0", "n3"], ["n1", "n2"], is_silent=True)
    world.run(20)
    world.kill("n1")
    world.start("n1")
    world.run(20)
    world.kill("n2")
    world.start("n3")
    world.run(20)
    newest, alone = world.steps, world.nodes["n0"].member
    assert world.generation == 2
    assert alone.state

    for node, starts in find_doubted(alone.state).items():
        assert world.steps == newest
        ended = NodeEnded(node=node, starts=starts, reason="its node is off")
        alone.answer(ended)
        world.run(10)

    assert 0 < world.steps < newest
    assert [each.step for each in world.nodes["n1"].ranks] == [newest] * 2


@pytest.mark.parametrize("seed", range(20))
def test_a_coordinator_that_is_asked_to_leave_costs_no_step(seed: int) -> None:
    """And a second one behind it, while nodes come back."""
    world = begun(1, 3, seed, sizes=(1, 2, 3, 4))
    for _ in range(2):
        leaders = [name for name, node in world.nodes.items() if node.member.state]
        assert len(leaders) == 1, world.describe()
        world.ask(leaders[0], 30.0)
        world.run(10)
        assert leaders[0] not in world.nodes, world.describe()

    steps = world.steps
    world.start(min(set(world.names) - set(world.nodes)))
    world.run(10)
    assert world.steps > steps + 10, world.describe()
    assert len(world.committed[-1][1].nodes) == 3
    names = [note.event for *_, note in world.notes]
    assert (names.count("generation_broken"), names.count("coordinator_replaced")) == (0, 0)
