"""Two real daemons and a store: what a node gets back whose memory is gone."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from resilience.tiered.client import TieredClient
from tests.resilience.tiered.cluster import make_cluster, wait_held
from tests.resilience.tiered.daemons import LIMIT_S, MIB, make_content, make_id, save
from tests.resilience.tiered.kept import held, lose_memory, stored, wait_until, waiting

SIZE = 5 * MIB + 3


def read(client: TieredClient, shard: str) -> tuple[str, bytes]:
    with client.read(step=4, generation=0, shard=shard) as loan:
        return loan.source, bytes(loan.memory)


def test_a_lost_node_reads_from_its_peer_and_two_lost_nodes_from_the_store(tmp_path: Path) -> None:
    options = ("--peer-gone-s", "2", "--store", f"folder:{tmp_path / 'store'}")
    with make_cluster(tmp_path, options=options) as cluster:
        first, second = cluster.nodes.values()
        clients = [each.start().client() for each in (first, second)]
        for step in range(1, 5):
            for number, client in enumerate(clients):
                content = make_content(SIZE, 10 * number + step)
                save(client, make_id(step, str(number)), content, num_shards=2)
        contents = {"0": make_content(SIZE, 4), "1": make_content(SIZE, 14)}
        wait_until(lambda: [held(each) for each in clients] == [[4], [4]])
        wait_until(lambda: not any(waiting(each) for each in clients))
        assert len(stored(tmp_path / "store")) == len(stored(tmp_path / "store", "steps")) == 8

        lose_memory(first)
        client = first.start().client()
        wait_until(lambda: [each.step for each in client.steps()][:1] == [4])
        for shard, content in contents.items():
            source, loaded = read(client, shard)
            assert loaded == content
            # The peer may have been faster than the reader, the store never is.
            assert source in {"peer:b", "ram"}

        for each in (first, second):
            lose_memory(each)
        client = first.start().client()
        assert [each.step for each in client.steps()] == [4, 3, 2, 1]
        for shard, content in contents.items():
            assert read(client, shard) == (f"folder:{tmp_path / 'store'}", content)


def test_a_reader_waits_for_what_a_peer_holds(tmp_path: Path) -> None:
    """A daemon that has just begun knows of nobody: it must not offer less than there is."""
    with make_cluster(tmp_path, wired=[("b", "a")]) as cluster:
        cluster.start()
        save(cluster["a"].client(), make_id(), make_content(MIB))
        wait_held(cluster["b"], make_id())
        wire = cluster.wires["b", "a"]
        lose_memory(cluster["a"])
        wire.stop_at = 1
        client = cluster["a"].start().client()
        assert wire.is_stopped.wait(LIMIT_S)

        with ThreadPoolExecutor() as pool:
            steps = pool.submit(client.steps)
            wait_until(steps.running)
            wire.go_on()
            assert [each.step for each in steps.result(LIMIT_S)] == [1]


@pytest.mark.parametrize("replicas", [0, 1])
def test_what_only_a_node_that_ends_has_in_memory_is_named(tmp_path: Path, replicas: int) -> None:
    options = (f"--replicas={replicas}", f"--domains-min={replicas + 1}")
    with make_cluster(tmp_path, options=options) as cluster:
        cluster.start()
        client, other = (cluster[name].client() for name in ("a", "b"))
        save(client, make_id(4, "0"), make_content(MIB, 0), num_shards=2)
        save(other, make_id(4, "1"), make_content(MIB, 1), num_shards=2)
        wait_until(lambda: [each.step for each in client.steps()] == [4], client.status)

        assert cluster["a"].end() == 0

    word = "only this node has shard 0 of run's newest step 4 of generation 0"
    assert (word in cluster["a"].outputs[0]) == (replicas == 0)


@pytest.mark.parametrize(("options", "num"), [
    # A node that lives is not to count as gone on a machine that others use as well.
    pytest.param(("--peer-gone-s=10",), 2, id="a-machine-each", marks=pytest.mark.slow),
    pytest.param(("--peer-gone-s=1", "--domain=machine-0"), 1, id="two-pods-of-one-machine"),
])  # fmt: skip
def test_a_daemon_says_in_how_many_failure_domains_a_shard_can_be(
    tmp_path: Path, options: tuple[str, ...], num: int
) -> None:
    """When it is asked for steps, and with each shard that it takes."""
    with make_cluster(tmp_path, options=options) as cluster:
        cluster.start()
        client = cluster["a"].client()

        assert client.steps() == []
        assert client.num_domains == num
        save(client, make_id(1), make_content(MIB))
        assert client.num_domains == num
        cluster["b"].kill()
        wait_until(lambda: len(client.status()["nodes"]) == 1)
        save(client, make_id(2), make_content(MIB))

        assert client.num_domains == 1
