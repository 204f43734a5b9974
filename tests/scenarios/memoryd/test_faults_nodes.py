"""Workers, daemons and nodes that go: the newest complete checkpoint is there all the same."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from resilience.tiered.errors import TierError
from tests.resilience.tiered.cluster import make_cluster
from tests.resilience.tiered.daemons import MIB, Daemon, make_content, make_id, save
from tests.resilience.tiered.kept import wait_until
from tests.scenarios.memoryd.scene import GONE_S, Scene, StepId, make_scene

slow = pytest.mark.slow
Fault = Callable[[Scene, StepId], None]


def daemon_in_mid_save(scene: Scene, at: StepId) -> None:
    scene.save(halting=["a", "b"])
    scene.kill_daemon("a")
    scene.start_daemon("a")
    scene.begin_generation()


def peer_gone(scene: Scene, at: StepId) -> None:
    scene.kill_daemon("b")
    scene.living.discard("b")
    scene.begin_generation()


FAULTS = [
    pytest.param(daemon_in_mid_save, id="daemon-in-mid-save"),
    pytest.param(peer_gone, id="peer-gone", marks=slow),
]


@pytest.mark.parametrize("fault", FAULTS)
def test_newest_complete_checkpoint_stays(tmp_path: Path, fault: Fault) -> None:
    with make_scene(tmp_path) as scene:
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
