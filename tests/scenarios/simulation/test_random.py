"""Random faults of agents over simulated time, from printed seeds."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.scenarios.simulation.simulation import World

SIZES = [(2, 0), (2, 1), (1, 2), (2, 2), (3, 1), (4, 1)]
ELASTIC = [(1, 2), (1, 2, 3), (1, 2, 4), (2, 4), (1, 2, 3, 4), (2, 3, 5)]
"""The sizes that a run may have."""
COPIES = [(2, 4), (2, 4, 6), (4, 6), (2, 6)]
"""And one whose copies of the state take two nodes each."""


def make_world(seed: int) -> World:
    num_nodes, num_standby = SIZES[seed % len(SIZES)]
    return World(
        seed,
        num_nodes=num_nodes,
        num_standby=num_standby,
        num_shards=2 if seed % 4 < 2 else 1,
        shares_folder=seed % 5 != 0,
    )


def make_elastic_world(seed: int) -> World:
    sizes = ELASTIC[seed % len(ELASTIC)]
    num_shards = 2 if seed % 4 < 2 else 1
    return make_world_of_sizes(seed, sizes, num_more=seed % 2, num_shards=num_shards)


def make_copies_world(seed: int) -> World:
    return make_world_of_sizes(seed, COPIES[seed % len(COPIES)], num_more=seed % 3, num_shards=4)


def make_world_of_sizes(
    seed: int, sizes: tuple[int, ...], *, num_more: int, num_shards: int
) -> World:
    """Return a world whose run may have these sizes, with more nodes than the largest takes."""
    return World(
        seed,
        num_nodes=min(sizes),
        num_standby=max(sizes) - min(sizes) + num_more,
        num_shards=num_shards,
        shares_folder=seed % 7 != 0,
        sizes=sizes,
    )


def play(seed: int, num_events: int = 300, make: Callable[[int], World] = make_world) -> World:
    world = make(seed)
    try:
        disturb(world, num_events)
        settle(world)
    except (AssertionError, KeyError, ValueError, TypeError) as error:
        raise AssertionError(f"seed {seed}: {error!r}\n{world.describe()}") from error
    return world


def disturb(world: World, num_events: int) -> None:
    chance = world.random
    # Who has left and comes back begins no run of its own where the run's record says better.
    are_asked = world.options.policy.is_elastic and world.shares_folder
    world.run(chance.uniform(0, 8))
    for _ in range(num_events):
        names = list(world.nodes)
        some = chance.sample(world.names, chance.randint(1, len(world.names) - 1))
        others = [name for name in world.names if name not in some]
        kind = chance.choices(
            ["pause", "resume", "kill", "start", "cut", "heal", "reset", "fault", "wait", "ask"],
            [6, 8, 1 if world.shares_folder else 0, 4, 2, 4, 2, 8, 6, 4 if are_asked else 0],
        )[0]
        if kind == "pause" and names:
            world.pause(chance.choice(names))
        elif kind == "resume" and world.paused:
            world.resume(chance.choice(sorted(world.paused)))
        elif kind == "kill" and len(names) > 1:
            world.kill(chance.choice(names))
        elif kind == "start" and (gone := sorted(set(world.names) - set(names))):
            world.start(chance.choice(gone))
        elif kind == "cut":
            world.network.cut(some, others, is_silent=chance.random() < 0.6)
        elif kind == "heal":
            world.network.heal(world.names, world.names)
        elif kind == "reset":
            world.network.reset(some, others)
        elif kind == "fault" and names:
            node = world.nodes[chance.choice(names)]
            if node.place >= 0:
                world.fail(node, chance.randrange(len(node.ranks)))
        elif kind == "ask" and names:
            world.ask(chance.choice(names), chance.choice([0.1, 5.0, 30.0]))
        world.run(chance.choice([0.01, 0.1, 0.5, 2.0, 6.0]))


def settle(world: World) -> None:
    """Nothing more goes wrong: the run goes on."""
    world.network.heal(world.names, world.names)
    for name in sorted(world.paused):
        world.resume(name)
    for name in sorted(set(world.names) - set(world.nodes)):
        world.start(name)
    for node in world.nodes.values():
        if node.leaves_within_s is not None:
            node.leaves_within_s = None
            node.join()
    world.run(40)
    steps = world.steps
    world.run(5)
    assert world.steps > steps, f"the run stands still\n{world.describe()}"


def test_random_faults_of_agents_lose_nothing() -> None:
    worlds = [play(seed) for seed in range(6)]

    assert sum(world.generation for world in worlds) > 100, "too little happens to show anything"


def test_random_faults_of_agents_lose_nothing_in_a_run_that_changes_its_size() -> None:
    worlds = [play(seed, make=make_elastic_world) for seed in range(6)]

    num = sum(note.event == "generation_left" for world in worlds for *_, note in world.notes)
    assert num > 20, "too little happens to show anything"


def test_random_faults_of_agents_lose_nothing_where_a_copy_takes_two_nodes() -> None:
    worlds = [play(seed, 200, make=make_copies_world) for seed in range(4)]

    sizes = {len(layout.nodes) for world in worlds for layout in world.layouts.values()}
    assert sizes == {2, 4, 6}


@pytest.mark.parametrize(
    ("seed", "num_events"), [(3122, 300), (3277, 300), (300529, 200), (316880, 200)]
)
def test_what_once_broke_a_run_that_changes_its_size_does_so_no_more(
    seed: int, num_events: int
) -> None:
    """The only holder left for one that had nothing; a newcomer knew none of those cut off.

    And who had said goodbye to one coordinator went on alone in another one's generation.
    Who stood still went on alone with old news of whom it knew, beside who had come since.
    """
    play(seed, num_events, make=make_elastic_world)


@pytest.mark.slow
@pytest.mark.parametrize("block", range(20))
def test_many_more_random_faults_lose_nothing_in_a_run_that_changes_its_size(block: int) -> None:
    for seed in range(3000 + 40 * block, 3000 + 40 * (block + 1)):
        play(seed, make=make_elastic_world)


@pytest.mark.slow
@pytest.mark.parametrize("block", range(20))
def test_many_more_random_faults_lose_nothing_where_a_copy_takes_two_nodes(block: int) -> None:
    for seed in range(5000 + 20 * block, 5000 + 20 * (block + 1)):
        play(seed, make=make_copies_world)


@pytest.mark.slow
@pytest.mark.parametrize("block", range(20))
def test_many_more_random_faults_of_agents_lose_nothing(block: int) -> None:
    for seed in range(1000 + 40 * block, 1000 + 40 * (block + 1)):
        play(seed)
