"""What four ranks have saved is the same on any other number of ranks."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.resilience.rank_processes import run_ranks
from tests.resilience.tiered.daemons import Daemon, segments
from tests.resilience.tiered.kept import wait_until, waiting
from tests.scenarios.tiered.worlds import load_and_gather, train_and_save

NUM_SAVED = 4


class Saved:
    """A step of four ranks in a daemon, whose store is a folder."""

    def __init__(self, folder: Path, daemon: Daemon) -> None:
        self.folder, self.daemon = folder, daemon
        wholes = run_ranks(train_and_save, NUM_SAVED, str(folder), str(daemon.socket_path))
        self.whole = wholes[0]
        assert all(each == self.whole for each in wholes)

    def load(self, size: int, name: str, *, kind: str = "full") -> list[dict]:
        """Load on so many ranks, and hold all tensors against what was saved."""
        folder = self.folder / name
        folder.mkdir()
        arguments = (str(folder), str(self.daemon.socket_path), kind)
        results = run_ranks(load_and_gather, size, *arguments)
        for whole, told in results:
            assert whole.keys() == self.whole.keys()
            assert [key for key in whole if whole[key] != self.whole[key]] == []
            assert told["extra"] == {"position": 12}
            assert told["lr"] == 0.1
        return [told for _, told in results]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Saved]:
    folder = tmp_path_factory.mktemp("worlds")
    options = ["--store", f"folder:{folder / 'store'}", "--store-every-n-steps", "1"]
    with Daemon(folder=folder / "arena", budget_mib=32, options=options) as daemon:
        yield Saved(folder, daemon.start())


@pytest.mark.parametrize(
    ("size", "kind"),
    [
        (2, "full"),
        pytest.param(4, "full", marks=pytest.mark.slow),
        pytest.param(8, "full", marks=pytest.mark.slow),
        pytest.param(3, "full", marks=pytest.mark.slow),
        pytest.param(1, "full", marks=pytest.mark.slow),
        pytest.param(1, "replicated", marks=pytest.mark.slow),
    ],
)
def test_any_number_of_ranks_loads_the_same_tensors(saved: Saved, size: int, kind: str) -> None:
    told = saved.load(size, f"{size}-{kind}", kind=kind)

    assert {each["source"] for each in told} == {"ram"}
    assert {each["num_bad"] for each in told} == {0}


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 8])
def test_store_is_as_good_as_memory(saved: Saved, size: int) -> None:
    saved.load(NUM_SAVED, f"before-{size}")
    daemon = saved.daemon
    wait_until(lambda: not waiting(daemon.client()))
    daemon.kill()
    shutil.rmtree(daemon.folder)
    daemon.start()

    told = saved.load(size, f"store-{size}")

    # Shards that one rank has brought lie in memory for the next.
    sources = {source for each in told for source in each["source"].split("+")}
    assert f"folder:{saved.folder / 'store'}" in sources
    assert sources <= {"ram", f"folder:{saved.folder / 'store'}"}
    assert len(segments(daemon.folder)) <= NUM_SAVED
