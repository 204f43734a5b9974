"""Workers, daemons and nodes that go: the newest complete checkpoint is there all the same."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from resilience.tiered.errors import TierError
from tests.resilience.tiered.cluster import make_cluster, wait_until
from tests.resilience.tiered.daemons import LIMIT_S, MIB, Daemon, make_content, make_id, save
from tests.scenarios.memoryd.scene import GONE_S, Rank, Scene, StepId, make_scene

slow = pytest.mark.slow
Fault = Callable[[Scene, StepId], None]


def worker_in_mid_save(scene: Scene, at: StepId) -> None:
    scene.save(halting=["a"])
    scene.kill_ranks()
    scene.begin_generation()


def daemon_in_mid_save(scene: Scene, at: StepId) -> None:
    scene.save(halting=["a", "b"])
    scene.kill_daemon("a")
    scene.start_daemon("a")
    scene.begin_generation()


def daemon_in_mid_replication(scene: Scene, at: StepId) -> None:
    wire = scene.cluster.wires["a", "b"]
    wire.stop_at = wire.bytes_up + 3 * MIB // 2
    scene.save()
    assert wire.is_stopped.wait(LIMIT_S)
    scene.kill_daemon("a")
    wire.go_on()
    scene.start_daemon("a")
    scene.begin_generation()


def peer_gone(scene: Scene, at: StepId) -> None:
    scene.kill_daemon("b")
    scene.living.discard("b")
    scene.begin_generation()


def all_daemons_killed(scene: Scene, at: StepId) -> None:
    for name in scene.cluster.nodes:
        scene.kill_daemon(name)
    for name in scene.cluster.nodes:
        scene.start_daemon(name)
    scene.begin_generation()


def all_workers_and_one_node(scene: Scene, at: StepId) -> None:
    scene.wait_safe(at)
    scene.kill_ranks()
    scene.lose_node("a")
    scene.begin_generation()


def all_workers_and_one_node_replaced(scene: Scene, at: StepId) -> None:
    all_workers_and_one_node(scene, at)
    scene.replace_node("a")
    scene.begin_generation()


def bit_in_memory(scene: Scene, at: StepId) -> None:
    scene.wait_safe(at)
    scene.flip_bit("b", at)


FAULTS = [
    pytest.param("ab", worker_in_mid_save, id="worker-in-mid-save"),
    pytest.param("ab", daemon_in_mid_save, id="daemon-in-mid-save"),
    pytest.param("ab", bit_in_memory, id="bit-in-memory"),
    pytest.param("ab", daemon_in_mid_replication, id="daemon-in-mid-replication", marks=slow),
    pytest.param("ab", peer_gone, id="peer-gone", marks=slow),
    pytest.param("abc", peer_gone, id="peer-of-three-gone", marks=slow),
    pytest.param("abc", all_daemons_killed, id="all-daemons-killed", marks=slow),
    pytest.param("ab", all_workers_and_one_node, id="one-of-two-nodes", marks=slow),
    pytest.param("abc", all_workers_and_one_node, id="one-of-three-nodes", marks=slow),
    pytest.param("abc", all_workers_and_one_node_replaced, id="node-replaced", marks=slow),
]


@pytest.mark.parametrize(("names", "fault"), FAULTS)
def test_newest_complete_checkpoint_stays(tmp_path: Path, names: str, fault: Fault) -> None:
    with make_scene(tmp_path, names, wired=[("a", "b")]) as scene:
        scene.save(3)
        before = scene.wait_complete()

        fault(scene, before)

        scene.check(before)
        assert scene.go_on() > before


@slow
def test_complete_step_stays_on_offer_until_lost_copies_are_made_anew(tmp_path: Path) -> None:
    with make_scene(tmp_path, "abc") as scene:
        scene.save(2)
        before = scene.wait_complete()
        scene.wait_safe(before)
        for name in "abc":
            scene.kill_daemon(name)
            scene.cluster[name].start("--replicas", "0")
        assert scene.wait_complete() == before
        scene.lose_node("a")

        scene.watch(before, 3 * GONE_S)
        scene.replace_node("a")
        scene.begin_generation()
        scene.watch(before, GONE_S)


def test_one_namespace_is_of_one_job(tmp_path: Path) -> None:
    with make_scene(tmp_path) as scene:
        scene.save(2)
        before = scene.wait_complete()
        thief = Rank(scene.cluster["b"], job="thief")

        refused = thief.ask("save", step=9, generation=9, shard="0", num_shards=1, num_bytes=5)

        thief.kill()
        assert refused["error"] == "RefusedError"
        assert "namespace 'run' belongs to the job 'job', not to 'thief'" in refused["text"]
        assert scene.check(before) == before


@slow
def test_a_daemon_that_is_started_again_does_not_take_silence_for_nothing(tmp_path: Path) -> None:
    """All daemons have ended; who is started first has half of the step, and cannot know."""
    options = ("--peer-gone-s", str(GONE_S), "--replicas", "0", "--domains-min", "1")
    with make_cluster(tmp_path, options=options) as cluster:
        cluster.start()
        for shard, name in enumerate("ab"):
            save(cluster[name].client(), make_id(990, str(shard)), make_content(MIB), num_shards=2)
        for name in "ab":
            cluster[name].kill()
        cluster["a"].start()

        with pytest.raises(TierError, match=r"step 990 .* may be with b, not heard"):
            cluster["a"].client().steps()
        cluster["b"].start()

        wait_until(lambda: knows(cluster["a"], 990))


def knows(daemon: Daemon, step: int) -> bool:
    try:
        return [each.step for each in daemon.client().steps()] == [step]
    except TierError:
        return False
