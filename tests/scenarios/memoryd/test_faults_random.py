"""Random faults, one after the other: after each, the newest complete checkpoint is there.

A failure prints the seed and what had happened; MEMORYD_SEEDS=7,8 runs those seeds alone.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.scenarios.memoryd.scene import Scene, StepId, make_scene

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

NUM_SAVES = 30
FAULT_EVERY = 4
"""A fault comes with every so manyth save, on average."""
NUM_BYTES = 300_001
SEEDS = [int(each) for each in os.environ.get("MEMORYD_SEEDS", "").split(",") if each] or range(20)

Fault = Callable[[Scene, random.Random, StepId], None]


def any_node(scene: Scene, rng: random.Random) -> str:
    return rng.choice(sorted(scene.living))


def workers_killed(scene: Scene, rng: random.Random, at: StepId) -> None:
    """All in mid-save, some of them behind their commit."""
    halting = rng.sample(sorted(scene.ranks), rng.randint(1, len(scene.ranks)))
    scene.save(halting=halting)


def workers_killed_anywhere(scene: Scene, rng: random.Random, at: StepId) -> None:
    scene.order_save()


def daemon_killed(scene: Scene, rng: random.Random, at: StepId) -> None:
    name = any_node(scene, rng)
    if rng.random() < 0.7:
        scene.order_save()
    scene.kill_daemon(name)
    scene.start_daemon(name)


def daemon_ended(scene: Scene, rng: random.Random, at: StepId) -> None:
    name = any_node(scene, rng)
    assert scene.cluster[name].end() in (0, 3)
    scene.start_daemon(name)


def all_daemons_killed(scene: Scene, rng: random.Random, at: StepId) -> None:
    names = sorted(scene.living)
    rng.shuffle(names)
    for name in names:
        scene.kill_daemon(name)
    rng.shuffle(names)
    for name in names:
        scene.start_daemon(name)


def node_lost(scene: Scene, rng: random.Random, at: StepId) -> None:
    """For good, or another one takes its place."""
    if len(scene.living) < 3:
        return node_replaced(scene, rng, at)
    scene.wait_safe(at)
    return scene.lose_node(any_node(scene, rng))


def node_replaced(scene: Scene, rng: random.Random, at: StepId) -> None:
    scene.wait_safe(at)
    name = any_node(scene, rng)
    scene.lose_node(name)
    scene.replace_node(name)


def node_comes_back(scene: Scene, rng: random.Random, at: StepId) -> None:
    gone = sorted(scene.cluster.nodes.keys() - scene.living)
    if gone:
        scene.replace_node(rng.choice(gone))


def all_memory_lost(scene: Scene, rng: random.Random, at: StepId) -> None:
    if scene.has_store:
        scene.wait_stored(at)
        scene.lose_all()


def bit_flipped(scene: Scene, rng: random.Random, at: StepId) -> None:
    scene.wait_safe(at)
    scene.flip_bit(any_node(scene, rng), at)


def bit_flipped_on_the_way(scene: Scene, rng: random.Random, at: StepId) -> None:
    for wire in scene.cluster.wires.values():
        wire.flip_at = [rng.randrange(1000, 3 * NUM_BYTES)]


def way_cut(scene: Scene, rng: random.Random, at: StepId) -> None:
    wire = rng.choice(list(scene.cluster.wires.values()))
    wire.cut()


def daemon_stopped(scene: Scene, rng: random.Random, at: StepId) -> None:
    """So long that others call it gone; its own workers wait for it."""
    name = any_node(scene, rng)
    scene.stop_daemon(name)
    try:
        others = sorted(scene.living - {name})
        scene.wait_gone(name, others)
    finally:
        scene.continue_daemon(name)


FAULTS: list[Fault] = [
    workers_killed, workers_killed_anywhere, daemon_killed, daemon_ended, all_daemons_killed,
    node_lost, node_replaced, node_comes_back, all_memory_lost, bit_flipped, bit_flipped_on_the_way,
    way_cut, daemon_stopped,
]  # fmt: skip


@pytest.mark.parametrize("seed", SEEDS)
def test_random_faults(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    names = "abcd"[: rng.randint(2, 4)]
    (tmp_path / "disk").mkdir()
    store = ("--store", f"folder:{tmp_path / 'disk' / 'store'}") if rng.random() < 0.5 else ()
    words = (*store, "--keep", str(rng.randint(1, 3)))
    history = [f"seed {seed}: nodes {names}, {words}"]
    with make_scene(
        tmp_path, names, num_bytes=NUM_BYTES, options=words, wired=[("a", "b"), ("b", "a")]
    ) as scene:
        scene.has_store = bool(store)
        try:
            run(scene, rng, history)
        except BaseException:
            print("\n".join(history))  # noqa: T201
            raise
        assert all("Traceback" not in said for said in scene.end_daemons()), history


def run(scene: Scene, rng: random.Random, history: list[str]) -> None:
    """Save, and break something now and then."""
    scene.save()
    before = scene.wait_complete()
    for _ in range(NUM_SAVES):
        if rng.random() >= 1 / FAULT_EVERY:
            scene.save()
            history.append(f"saved {scene.step}")
            continue
        # Steps that are on their way may be complete by now, or not.
        before = scene.wait_complete() if rng.random() < 0.5 else max(before, scene.newest())
        fault = rng.choice(FAULTS)
        history.append(f"{fault.__name__} behind {before}")
        fault(scene, rng, before)
        scene.begin_generation()
        # What was saved behind it may be lost.
        before = scene.saved = scene.check(before)
        history.append(f"checked {before}, nodes {''.join(sorted(scene.living))}")
    assert scene.go_on() > before
