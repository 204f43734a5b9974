"""Parallel layouts: each rank gets the batches of its position, and its peers share one cache.

Each rank is a process, and each node a folder of its own. A rank knows its position and asks
nobody: no collective, and no torch at all.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

import pytest

from tests.resilience.data.job import (
    Job,
    expected_digests,
    find_producers,
    logged,
    node_folder,
)

NUM_BATCHES = 30
# All of them are still there when the slowest rank arrives.
SETTINGS = {"lookback_length": NUM_BATCHES}


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The data-parallel position of each rank; nodes hold equally many ranks, in their order."""

    dp_ranks: tuple[int, ...]
    num_nodes: int = 1

    @property
    def dp(self) -> int:
        return max(self.dp_ranks) + 1


def start(folder: Path, jobs: list[Job], layout: Layout) -> Job:
    for node in range(layout.num_nodes):
        node_folder(folder, node).mkdir(exist_ok=True)
    job = Job(
        folder,
        num_workers=len(layout.dp_ranks),
        layout=asdict(layout),
        settings=SETTINGS,
    )
    jobs.append(job)
    job.start()
    return job


def expected_of_position(folder: Path, layout: Layout) -> list[list[str]]:
    """Return the digests of the batches of each position."""
    return [
        expected_digests(folder, NUM_BATCHES, rank=rank, size=layout.dp)
        for rank in range(layout.dp)
    ]


LAYOUTS = [
    pytest.param(
        Layout(dp_ranks=(0, 0, 1, 1)),
        [{0, 1}],
        id="tp-smaller-than-a-node",
    ),
    pytest.param(
        Layout(dp_ranks=(0, 0, 1, 1, 0, 0, 1, 1)),
        [{0, 1}],
        id="stages-share-a-node",
        marks=pytest.mark.slow,
    ),
    pytest.param(
        Layout(dp_ranks=(0, 1, 0, 1, 0, 1, 0, 1), num_nodes=2),
        [{0, 1}, {0, 1}],
        id="each-position-on-two-nodes",
        marks=pytest.mark.slow,
    ),
    pytest.param(
        Layout(dp_ranks=(0, 0, 1, 1, 2, 2, 3, 3), num_nodes=2),
        [{0, 1}, {2, 3}],
        id="other-positions-on-each-node",
        marks=pytest.mark.slow,
    ),
]


@pytest.mark.parametrize(("layout", "positions"), LAYOUTS)
def test_each_rank_gets_its_batches_and_peers_share_them(
    tmp_path: Path,
    jobs: list[Job],
    layout: Layout,
    positions: list[set[int]],
) -> None:
    """`positions` are those of each node."""
    expected = expected_of_position(tmp_path, layout)
    job = start(tmp_path, jobs, layout)

    for number in range(NUM_BATCHES):
        answers = job.ask("read", number)
        assert answers == [expected[rank][number] for rank in layout.dp_ranks]

    assert len({each[0] for each in expected}) == layout.dp
    assert job.ask("torch") == ["False"] * len(layout.dp_ranks)
    for node, held in enumerate(positions):
        folder = node_folder(tmp_path, node)
        caches = sorted(path.name for path in (folder / "cache" / "job").glob("train-*"))
        names = [f"train-{rank}of{layout.dp}" for rank in sorted(held)]
        assert [each.rpartition("-")[0] for each in caches] == names
        assert len(find_producers(folder)) == len(held)
        for rank in range(layout.dp):
            made = logged(folder, "make", rank=rank)
            assert sorted(set(made)) == made
            assert bool(made) == (rank in held)
            assert len(logged(folder, "open", rank=rank)) == (rank in held)
