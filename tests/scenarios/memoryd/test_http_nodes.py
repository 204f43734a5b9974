"""The HTTP doors of two nodes: a client is given what the other node has, and both keep the same.

As AWS's client uses them: rank 0 makes the namespace and stores the metadata, on its node.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from resilience.tiered.arena import Arena
from resilience.tiered.memoryd.http_spaces import Spaces
from resilience.tiered.memoryd.peering import Peers
from resilience.tiered.vault import Vault
from tests.ports import free_ports
from tests.resilience.tiered.aws_ranks import PYTHON, SAVED, Workers, loaded
from tests.resilience.tiered.cluster import Cluster, make_cluster
from tests.resilience.tiered.daemons import MIB, make_content, make_id
from tests.resilience.tiered.http_client import Client, shard_path
from tests.resilience.tiered.kept import lose_memory, wait_until
from tests.resilience.tiered.vaults import put
from tests.tokens import write_token

WORLD = 4
HOMES = {0: "a", 1: "a", 2: "b", 3: "b"}
SIZE = (64 << 10) + 3


class Nodes:
    """Two nodes with HTTP doors."""

    def __init__(self, cluster: Cluster, opened: ExitStack) -> None:
        self.cluster = cluster
        self._opened = opened
        self._ports = dict(zip("ab", free_ports(2), strict=True))

    def start(self, *names: str) -> None:
        for each in names:
            self.cluster[each].start("--http", f"127.0.0.1:{self._ports[each]}")

    def client(self, name: str) -> Client:
        return self._opened.enter_context(Client(("127.0.0.1", self._ports[name])))

    def save(self, step: int, *, seed: int = 0) -> None:
        clients = {each: self.client(each) for each in "ab"}
        for rank, home in HOMES.items():
            assert clients[home].put("space", rank, step, content(rank, step, seed)).status == 200
        assert clients["a"].put("space", WORLD, step, content(WORLD, step, seed)).status == 200

    def wait_latest(self, expected: list[int]) -> None:
        for name in "ab":
            client = self.client(name)
            wait_until(lambda client=client: client.latest("space") == expected)

    def num_held(self, name: str) -> dict[int, int]:
        with self.cluster[name].client(None) as client:
            steps = client.status()["namespaces"].get("http:space", [])
        return {each["step"]: each["num_held"] for each in steps}

    def wait_held(self, expected: dict[int, int]) -> None:
        for name in "ab":
            wait_until(lambda name=name: self.num_held(name) == expected)


def content(rank: int, step: int, seed: int = 0) -> bytes:
    mark = b"torch.distributed.checkpoint.metadata" if rank == WORLD else b""
    return mark + make_content(SIZE, 10_000 * seed + 10 * step + rank)


def check_load(client: Client, step: int, *, seed: int = 0) -> None:
    for rank in range(WORLD + 1):
        answer = client.get("space", rank, step)
        assert (answer.status, answer.body) == (200, content(rank, step, seed))


@contextmanager
def make_nodes(folder: Path, *options: str) -> Iterator[Nodes]:
    with make_cluster(folder, options=options) as cluster, ExitStack() as opened:
        nodes = Nodes(cluster, opened)
        nodes.start("a", "b")
        yield nodes


@pytest.mark.parametrize("replicas", [pytest.param("0", marks=pytest.mark.slow), "1"])
def test_every_rank_is_given_what_the_other_node_has(tmp_path: Path, replicas: str) -> None:
    with make_nodes(tmp_path, "--replicas", replicas) as nodes:
        assert nodes.client("a").create("space", WORLD + 1).status == 201
        nodes.save(7)

        nodes.wait_latest([7])
        for name in "ab":
            check_load(nodes.client(name), 7)
        assert nodes.client("b").get("space", 0, 8).status == 404
        # The same numbers again: it is there already.
        assert nodes.client("b").create("space", WORLD + 1).status == 200


@pytest.mark.parametrize("lost", [pytest.param("a", marks=pytest.mark.slow), "b"])
def test_a_lost_node_is_given_all_by_the_other(tmp_path: Path, lost: str) -> None:
    (other,) = {"a", "b"} - {lost}
    with make_nodes(tmp_path) as nodes:
        assert nodes.client("a").create("space", WORLD + 1).status == 201
        nodes.save(7)
        nodes.wait_held({7: WORLD + 1})

        lose_memory(nodes.cluster[lost])
        check_load(nodes.client(other), 7)
        nodes.start(lost)
        assert nodes.client(lost).latest("space") == [7]
        check_load(nodes.client(lost), 7)
        nodes.save(8)
        nodes.wait_latest([8, 7])


@pytest.mark.slow
def test_steps_are_retained_over_all_nodes(tmp_path: Path) -> None:
    with make_nodes(tmp_path) as nodes:
        assert nodes.client("a").create("space", WORLD + 1, 2).status == 201
        for step in range(1, 6):
            nodes.save(step)

        nodes.wait_latest([5, 4])
        nodes.wait_held({5: WORLD + 1, 4: WORLD + 1})
        for name in "ab":
            nodes.cluster[name].end()
        nodes.start("b", "a")
        nodes.wait_latest([5, 4])
        nodes.save(6)
        nodes.wait_held({6: WORLD + 1, 5: WORLD + 1})


@pytest.mark.slow
def test_a_step_that_is_saved_again_is_not_mixed_with_what_it_was(tmp_path: Path) -> None:
    with make_nodes(tmp_path) as nodes:
        assert nodes.client("a").create("space", WORLD + 1).status == 201
        nodes.save(7)
        nodes.wait_held({7: WORLD + 1})
        nodes.save(7, seed=1)

        nodes.wait_held({7: WORLD + 1})
        for name in "ab":
            client = nodes.client(name)
            wait_until(lambda client=client: client.get("space", 0, 7).body == content(0, 7, 1))
            check_load(client, 7, seed=1)


def test_what_is_deleted_is_gone_on_all_nodes(tmp_path: Path) -> None:
    with make_nodes(tmp_path) as nodes:
        a, b = nodes.client("a"), nodes.client("b")
        assert a.create("space", WORLD + 1).status == 201
        nodes.save(7)
        nodes.wait_held({7: WORLD + 1})
        assert b.ask("DELETE", shard_path("space", 0, 7)).status == 204
        for client in (b, a):
            wait_until(lambda client=client: client.get("space", 0, 7).status == 404)
        assert a.ask("DELETE", "/v1/cp/namespaces/space").status == 204

        wait_until(lambda: b.ask("GET", "/v1/cp/namespaces/space").status == 404)
        nodes.wait_held({})
        nodes.cluster["b"].end()
        nodes.start("b")
        assert nodes.client("b").ask("GET", "/v1/cp/namespaces/space").status == 404
        assert nodes.client("b").create("space", WORLD + 1).status == 201
        wait_until(lambda: a.ask("GET", "/v1/cp/namespaces/space").status == 200)


class Silent(Peers):
    """The other node says nothing until it is there."""

    is_there = False

    def missing(self) -> Sequence[str]:
        return () if self.is_there else ("b",)


def test_no_room_is_made_of_steps_that_a_silent_node_may_complete(tmp_path: Path) -> None:
    """It has the other rank of each, perhaps; once it is there, one step at a time goes."""
    arena, peers = Arena(tmp_path, MIB), Silent()
    vault = Vault(arena)
    spaces = Spaces(vault, tmp_path, num_spaces_max=1, peers=peers, safe=lambda name: ())
    spaces.create("space", 2, 1)
    for step in (90, 100, 110):
        put(vault, make_id(step, name="http:space"), num_shards=2)

    assert not spaces.make_room(spaces.get("space"), 120)
    peers.is_there = True
    assert spaces.make_room(spaces.get("space"), 120)

    assert sorted(each.id.step for each in vault.metas()) == [100, 110]
    arena.close()


@pytest.mark.skipif(
    not PYTHON.exists(), reason=f"no {PYTHON}; scripts/install-aws-checkpointing.sh makes it"
)
@pytest.mark.slow
def test_ranks_load_at_the_other_nodes_door_what_dead_ones_saved(tmp_path: Path) -> None:
    write_token(tmp_path / "token")
    options = ("--token-file", str(tmp_path / "token"), "--http-open")
    first, second = ports = free_ports(2)
    there = [f"http://127.0.0.1:{each}" for each in (first, first, second, second)]
    with make_cluster(tmp_path, budget_mib=256, options=options) as cluster:
        for daemon, port in zip(cluster.nodes.values(), ports, strict=True):
            daemon.start("--http", f"127.0.0.1:{port}")
        with Workers(tmp_path) as workers:
            assert workers.save(urls=there, namespace="job", step=7, seed=1) == SAVED
            workers.kill()
            wait_listed(ports, [7])
            assert workers.load(urls=there[::-1], namespace="job", seed=1) == loaded(7)
            assert workers.save(urls=there[::-1], namespace="job", step=8, seed=2) == SAVED
            wait_listed(ports, [8, 7])
            assert workers.load(urls=there, namespace="job", seed=2) == loaded(8)


def wait_listed(ports: Sequence[int], steps: list[int]) -> None:
    """Wait until both doors list these steps: nodes hear of each other's a moment later."""
    for port in ports:
        with Client(("127.0.0.1", port)) as client:
            wait_until(lambda client=client: client.latest("job") == steps)
