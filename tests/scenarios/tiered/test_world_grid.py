"""What any number of ranks has saved is the same, bit for bit, on any other, from any tier."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests.cases import slow
from tests.resilience.rank_processes import run_ranks
from tests.resilience.tiered import s3_server
from tests.resilience.tiered.cluster import make_cluster
from tests.resilience.tiered.daemons import Daemon
from tests.resilience.tiered.kept import lose_memory, wait_until, waiting
from tests.scenarios.tiered.worlds import STEP, load_and_gather, train_and_save

KINDS = ("replicated", "full", "hybrid")
SIZES = (1, 2, 4, 8)
NEAR = ("--replicas", "0", "--domains-min", "1")


@contextmanager
def open_tier(folder: Path, tier: str) -> Iterator[tuple[Daemon, Daemon, str]]:
    """Give the daemon to save into, the one to load from, and where that gets it."""
    with ExitStack() as stack:
        if tier in ("ram", "peer"):
            cluster = stack.enter_context(make_cluster(folder, options=NEAR))
            cluster.start()
            loading = cluster["a" if tier == "ram" else "b"]
            yield cluster["a"], loading, "ram" if tier == "ram" else "peer:a"
            return
        store, source = f"folder:{folder / 'store'}", f"folder:{folder / 'store'}"
        words: list[str] = []
        if tier == "s3":
            if why := s3_server.missing():
                pytest.skip(why)
            server = stack.enter_context(s3_server.s3_server(folder))
            server.make_bucket("bucket")
            store, source = "s3://bucket/runs", "s3:bucket/runs"
            words = ["--store-endpoint", server.endpoint, "--store-part-size-mib", "5"]
        options = ["--store", store, "--store-every-n-steps", "1", *words]
        daemon = Daemon(folder=folder / "arena", budget_mib=32, options=options)
        yield stack.enter_context(daemon).start(), daemon, source


def load_on_all(folder: Path, kind: str, saved_on: int, tier: str, sizes: Sequence[int]) -> None:
    """Save on so many ranks, and hold what each number of ranks loads against it."""
    with open_tier(folder, tier) as (saving, loading, source):
        wholes = run_ranks(train_and_save, saved_on, str(folder), str(saving.socket_path), kind)
        assert all(each == wholes[0] for each in wholes)
        if loading is not saving:
            peer = loading.client()
            wait_until(lambda: [each.step for each in peer.steps()] == [STEP])
        for size in sizes:
            if tier in ("folder", "s3"):
                wait_until(lambda: not waiting(loading.client()))
                lose_memory(loading)
                loading.start()
            (folder / f"load-{size}").mkdir()
            found = run_ranks(
                load_and_gather, size, str(folder / f"load-{size}"), str(loading.socket_path), kind
            )

            assert [
                key for whole, _ in found for key in whole if whole[key] != wholes[0][key]
            ] == []
            assert all(whole.keys() == wholes[0].keys() for whole, _ in found)
            for _, told in found:
                assert (told["extra"], told["lr"], told["num_bad"]) == ({"position": 12}, 0.1, 0)
            sources = {each for _, told in found for each in told["source"].split("+")}
            # What one rank has brought lies in memory for the next ones, and the next worlds.
            assert sources <= {source, "ram"}
            assert source in sources or size != sizes[0]


@pytest.mark.parametrize(
    ("kind", "saved_on", "tier", "size"),
    [
        slow("replicated", 2, "s3", 1),
        slow("full", 4, "folder", 3),
        ("hybrid", 4, "peer", 2),
    ],
)
def test_another_number_of_ranks_loads_the_same_bits(
    tmp_path: Path, kind: str, saved_on: int, tier: str, size: int
) -> None:
    load_on_all(tmp_path, kind, saved_on, tier, [size])


@pytest.mark.slow
@pytest.mark.parametrize("tier", ["ram", "peer", "folder", "s3"])
@pytest.mark.parametrize("saved_on", SIZES)
@pytest.mark.parametrize("kind", KINDS)
def test_every_number_of_ranks_loads_the_same_bits_from_every_tier(
    tmp_path: Path, kind: str, saved_on: int, tier: str
) -> None:
    load_on_all(tmp_path, kind, saved_on, tier, SIZES)
