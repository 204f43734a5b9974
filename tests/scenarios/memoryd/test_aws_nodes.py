"""AWS's own writer and reader on four ranks of two nodes, whose daemons have a token."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.ports import free_ports
from tests.resilience.tiered.aws_ranks import PYTHON, SAVED, Workers, loaded
from tests.resilience.tiered.cluster import make_cluster, wait_until
from tests.resilience.tiered.http_client import Client
from tests.tokens import write_token

pytestmark = pytest.mark.skipif(
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
