"""Real daemons that hold each other's shards instead of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from resilience.tiered.errors import VaultFullError
from tests.resilience.tiered.cluster import Cluster, count_held, make_cluster
from tests.resilience.tiered.daemons import (
    LIMIT_S,
    MIB,
    Daemon,
    make_content,
    make_id,
    make_meta,
    save,
    segments,
)
from tests.resilience.tiered.kept import stored, wait_until
from tests.scenarios.memoryd.scene import make_scene

INSTEAD = ("--peers-hold", "instead", "--peer-gone-s", "2")
SIZE = 5 * MIB


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Cluster]:
    """Two nodes with memory for three states."""
    with make_cluster(tmp_path, options=INSTEAD, budget_mib=3 * SIZE // MIB) as cluster:
        cluster.start()
        yield cluster


def content(name: str, step: int) -> bytes:
    return make_content(SIZE, 1000 * step + ord(name))


def save_all(cluster: Cluster, step: int) -> None:
    """Let every node write its shard of a step."""
    for name, daemon in cluster.nodes.items():
        shard = make_id(step, f"{name}0")
        save(daemon.client(), shard, content(name, step), num_shards=len(cluster.nodes))


def save_at_once(cluster: Cluster, step: int, *, shared: str = "") -> list[Callable[[], None]]:
    """Let every node write its shard of a step, or the same; what is returned ends it."""
    ends = []
    num_shards = 1 if shared else len(cluster.nodes)
    for name, daemon in cluster.nodes.items():
        shard, written = make_id(step, shared or f"{name}0"), content(shared or name, step)
        draft = daemon.client().begin(
            step=step, generation=0, shard=shard.shard, num_shards=num_shards, num_bytes=SIZE
        )
        draft.memory[:] = written
        ends.append(partial(draft.commit, make_meta(shard, written, num_shards=num_shards)))
    return ends


def status(daemon: Daemon) -> dict[str, Any]:
    with daemon.client(None) as client:
        return client.status()


def holds(daemon: Daemon) -> dict[int, set[str]]:
    """Return the shards that a daemon has, by step."""
    jobs = status(daemon)["jobs"]
    steps = jobs["run"]["steps"] if "run" in jobs else []
    return {each["step"]: set(each["shards_here"]) for each in steps if each["shards_here"]}


def wait_settled(cluster: Cluster, step: int, expected: dict[str, set[str]]) -> None:
    """Wait until each node has what it is to keep of a step, and nothing else."""
    for name, shards in expected.items():
        wait_until(
            lambda n=name, s=shards: holds(cluster[n]) == {step: s},
            cluster[name].client(None).status,
        )


def arena_bytes(daemon: Daemon) -> int:
    return sum(each.stat().st_size for each in segments(daemon.folder))


def read(daemon: Daemon, step: int, shard: str) -> tuple[str, bytes]:
    with (
        daemon.client() as client,
        client.read(step=step, generation=0, shard=shard) as loan,
    ):
        return loan.source, bytes(loan.memory)


def test_two_nodes_have_each_others_shards_and_memory_for_one_save(pair: Cluster) -> None:
    for step in (1, 2, 3):
        save_all(pair, step)
        wait_settled(pair, step, {"a": {"b0"}, "b": {"a0"}})
    for name in "ab":
        wait_until(lambda n=name: arena_bytes(pair[n]) == 2 * SIZE, pair[name].client(None).status)
        assert status(pair[name])["held_bytes"] == SIZE
        assert [each.step for each in pair[name].client().steps()] == [3]
        assert read(pair[name], 3, f"{name}0") == (
            f"peer:{'b' if name == 'a' else 'a'}",
            content(name, 3),
        )
    # What was read goes, once nobody reads it.
    wait_settled(pair, 3, {"a": {"b0"}, "b": {"a0"}})


def test_the_old_step_stays_until_all_have_written_the_new_one(pair: Cluster) -> None:
    save_all(pair, 1)
    wait_settled(pair, 1, {"a": {"b0"}, "b": {"a0"}})
    save(pair["a"].client(), make_id(2, "a0"), content("a", 2), num_shards=2)
    client = pair["b"].client()
    draft = client.begin(step=2, generation=0, shard="b0", num_shards=2, num_bytes=SIZE)
    draft.memory[:100] = bytes(100)

    wait_until(lambda: count_held(pair["b"], make_id(2)) == 1)
    client.close()

    wait_until(lambda: holds(pair["a"]) == {1: {"b0"}}, pair["a"].client(None).status)
    assert holds(pair["b"]) == {1: {"a0"}, 2: {"a0"}}
    assert [each.step for each in pair["b"].client().steps()] == [1]
    assert read(pair["a"], 1, "a0")[1] == content("a", 1)


def test_who_write_the_same_shard_need_one_keeper_of_it(pair: Cluster) -> None:
    """Whoever sends it first lets go of it: it is one shard, and one peer is to keep it."""
    for step in (1, 2):
        for each in save_at_once(pair, step, shared="0"):
            each()
        for daemon in pair.nodes.values():
            wait_until(lambda d=daemon, at=step: [s.step for s in d.client().steps()] == [at])
            assert read(daemon, step, "0")[1] == content("0", step)
        wait_until(lambda: all(set(holds(each)) <= {step} for each in pair.nodes.values()))  # noqa: B023


def test_a_node_whose_peer_never_comes_keeps_what_it_wrote(tmp_path: Path) -> None:
    with make_cluster(tmp_path, options=INSTEAD) as cluster:
        client = cluster["a"].start().client()
        for step in (1, 2):
            save(client, make_id(step, "a0"), content("a", step))

        wait_until(lambda: [each.step for each in client.steps()] == [2])
        wait_until(lambda: holds(cluster["a"]) == {2: {"a0"}})


@pytest.mark.slow
def test_three_nodes_are_a_ring_and_the_store_gets_each_shard_once(tmp_path: Path) -> None:
    words = (*INSTEAD, "--store", f"folder:{tmp_path / 'store'}")
    with make_cluster(tmp_path, "abc", options=words) as cluster:
        cluster.start()
        save_all(cluster, 1)
        wait_until(lambda: len(stored(tmp_path / "store", "steps")) == 3)
        save_all(cluster, 2)
        wait_until(lambda: all(set(holds(each)) == {2} for each in cluster.nodes.values()))
        wait_until(lambda: [len(holds(each)[2]) for each in cluster.nodes.values()] == [1, 1, 1])
        for name, daemon in cluster.nodes.items():
            assert holds(daemon)[2] != {f"{name}0"}
        wait_until(lambda: len(stored(tmp_path / "store", "steps")) == 6)
        assert len(stored(tmp_path / "store")) == 6


@pytest.mark.slow
def test_with_two_keepers_the_step_outlives_a_node(tmp_path: Path) -> None:
    words = (*INSTEAD, "--replicas", "2")
    with make_cluster(tmp_path, "abc", options=words) as cluster:
        cluster.start()
        save_all(cluster, 1)
        wait_settled(cluster, 1, {"a": {"b0", "c0"}, "b": {"a0", "c0"}, "c": {"a0", "b0"}})

        cluster["a"].kill()
        wait_until(lambda: "a" not in status(cluster["b"])["nodes"])

        assert [each.step for each in cluster["b"].client().steps()] == [1]
        for shard in "abc":
            assert read(cluster["b"], 1, f"{shard}0")[1] == content(shard, 1)


@pytest.mark.slow
def test_a_daemon_that_was_killed_finds_what_it_keeps(pair: Cluster) -> None:
    save_all(pair, 1)
    wait_settled(pair, 1, {"a": {"b0"}, "b": {"a0"}})
    pair["b"].kill()
    wait_until(lambda: "b" not in status(pair["a"])["nodes"])
    assert holds(pair["a"]) == {1: {"b0"}}

    pair["b"].start()

    wait_until(lambda: [each.step for each in pair["a"].client().steps()] == [1])
    assert read(pair["a"], 1, "a0") == ("peer:b", content("a", 1))
    save_all(pair, 2)
    wait_settled(pair, 2, {"a": {"b0"}, "b": {"a0"}})


def test_two_states_alone_are_not_and_nothing_is_lost(tmp_path: Path) -> None:
    with make_cluster(tmp_path, options=INSTEAD, budget_mib=2 * SIZE // MIB) as cluster:
        cluster.start()
        save_all(cluster, 1)
        wait_settled(cluster, 1, {"a": {"b0"}, "b": {"a0"}})
        for each in save_at_once(cluster, 2):
            each()

        with pytest.raises(VaultFullError, match=r"nothing may go: step 1 of .* of run"):
            save(cluster["a"].client(), make_id(3, "a0"), content("a", 3), num_shards=2)

        assert holds(cluster["a"]) == {1: {"b0"}, 2: {"a0"}}
        assert read(cluster["b"], 1, "a0") == ("ram", content("a", 1))


@pytest.mark.slow
@pytest.mark.parametrize("place", ["worker-in-save", "daemon-in-save", "daemon-in-exchange"])
def test_who_is_killed_in_mid_save_leaves_the_newest_complete_step(
    tmp_path: Path, place: str
) -> None:
    with make_scene(tmp_path, options=INSTEAD[:2], wired=[("a", "b")]) as scene:
        scene.save(3)
        before = scene.wait_complete()

        if place == "daemon-in-exchange":
            wire = scene.cluster.wires["a", "b"]
            wire.stop_at = wire.bytes_up + 3 * MIB // 2
            scene.save()
            assert wire.is_stopped.wait(LIMIT_S)
            scene.kill_daemon("a")
            wire.go_on()
        else:
            scene.save(halting=["a"])
        if place == "daemon-in-save":
            scene.kill_daemon("a")
        scene.kill_ranks()
        if place != "worker-in-save":
            scene.start_daemon("a")
        scene.begin_generation()

        scene.check(before)
        assert scene.go_on() > before
