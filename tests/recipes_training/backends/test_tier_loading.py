"""Which step workers begin with where loads fail, for a moment or for good."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import HashStore

from recipes_training.backends import tier_loading
from recipes_training.backends.tier_loading import TierLoader
from recipes_training.checkpoints import LINEAGE, SameLineage
from recipes_training.errors import CheckpointError
from recipes_training.group import WorkerGroup
from resilience.errors import BrokenError
from resilience.tiered.client import StepOnOffer, TieredClient
from resilience.tiered.errors import TierError
from resilience.tiered.lending import Loan
from resilience.tiered.loader import Loaded
from resilience.tiered.saver import Saver
from tests.recipes_training.groups import make_group
from tests.resilience.state.nodes import PlainView
from tests.resilience.tiered.daemons import Daemon, segments

NUM_WORKERS = 2
FOR_EVER = 1 << 30


class Moody(TieredClient):
    """A client whose daemon, or what that reads from, fails so many times."""

    unheard = 0
    slow: dict[int, int]

    def steps(self, **options: Any) -> list[StepOnOffer]:
        if self.unheard > 0:
            self.unheard -= 1
            raise TierError("peers have not been heard")
        return super().steps(**options)

    def read(self, **wanted: Any) -> Loan:
        if self.slow.get(wanted["step"], 0) > 0:
            self.slow[wanted["step"]] -= 1
            raise TierError("the peer is slow")
        return super().read(**wanted)


def view(value: float = 0.0, lineage: str = "ours") -> PlainView:
    rest = {"view": {}, "recovery": {LINEAGE: {"model.num_layers": lineage}}}
    return PlainView([torch.full((64,), value)], rest)


@dataclass
class Workers:
    """Two workers of one node, and what they have told."""

    daemon: Daemon
    clients: list[Moody] = field(default_factory=list)
    failed: list[tuple[int, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        for _ in range(NUM_WORKERS):
            client = Moody(self.daemon.socket_path, namespace="run", job="job")
            client.slow = {}
            self.clients.append(client)

    def save(self, *steps: int, lineage: str = "ours") -> None:
        for step in steps:
            saver = Saver(self.clients[0], num_shards=1, has_begun=True)
            saver.save(view(float(step), lineage), step=step, generation=3)

    def loader(self, own: PlainView, group: WorkerGroup | None = None) -> TierLoader:
        """Return the loader of a state, for the first worker alone where no group is given."""
        group = group or make_group(world_size=1)
        lineage = SameLineage(own, {"model.num_layers": "ours"})
        client = self.clients[group.rank]
        return TierLoader(client, lineage, group, lambda *told: self.failed.append(told))

    def load(
        self, newer_than: int | None = None, only: int | None = None
    ) -> list[Loaded | CheckpointError | None]:
        """Load on both at once; returns what each came to."""
        store = HashStore()

        def run(rank: int) -> Loaded | CheckpointError | None:
            group = make_group(rank, store=store, world_size=NUM_WORKERS)
            try:
                return self.loader(view(), group).load_newest(newer_than=newer_than, only=only)
            except CheckpointError as error:
                return error

        with ThreadPoolExecutor(NUM_WORKERS) as pool:
            return list(pool.map(run, range(NUM_WORKERS)))

    def load_step(self, newer_than: int | None = None) -> int | None:
        """Return the step that both have loaded, None where both have none."""
        found = self.load(newer_than)
        assert not [each for each in found if isinstance(each, CheckpointError)]
        (step,) = {each.step if isinstance(each, Loaded) else None for each in found}
        return step

    def load_error(self, newer_than: int | None = None) -> str:
        """Return the error of both."""
        found = self.load(newer_than)
        assert all(isinstance(each, CheckpointError) for each in found), found
        (text,) = {str(each) for each in found}
        return text


@pytest.fixture
def workers(tmp_path: Path) -> Iterator[Workers]:
    with Daemon(folder=tmp_path / "arena", options=["--keep", "9"]).start() as daemon:
        made = Workers(daemon)
        yield made
        for each in made.clients:
            each.close()


@pytest.mark.parametrize("only", [1, 2, 4])
def test_a_step_that_is_asked_for_is_found_behind_any_number_of_newer_ones(
    workers: Workers, monkeypatch: pytest.MonkeyPatch, only: int
) -> None:
    monkeypatch.setattr(tier_loading, "OFFERS_MAX", 2)
    workers.save(1, 2, 3, 4)

    assert [each and each.step for each in workers.load(only=only)] == [only] * NUM_WORKERS


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tier_loading, "DAEMON_TIMEOUT_S", 0.3)


@pytest.mark.parametrize("newer_than", [None, 2, 6])
def test_newest_step_is_tried_again_before_an_older_one(
    workers: Workers, newer_than: int | None
) -> None:
    """To go on from the older one would make it void."""
    workers.save(4, 8)
    workers.clients[1].slow[8] = 2

    assert workers.load_step(newer_than) == 8
    assert workers.failed == []


def test_step_that_fails_for_long_gives_way_to_an_older_one(workers: Workers, hasty: None) -> None:
    workers.save(4, 8)
    workers.clients[1].slow[8] = FOR_EVER

    assert workers.load_step() == 4
    assert {step for step, _ in workers.failed} == {8}
    assert len(workers.failed) <= NUM_WORKERS


@pytest.mark.parametrize("newer_than", [None, 2])
def test_run_does_not_begin_without_what_is_on_offer(
    workers: Workers, hasty: None, newer_than: int | None
) -> None:
    workers.save(4, 8)
    workers.clients[1].slow = {4: FOR_EVER, 8: FOR_EVER}

    text = workers.load_error(newer_than)

    assert "no checkpoint on offer can be loaded: step 8: no copy of shard 0 of step 8" in text
    assert "; step 4: no copy" in text
    assert "the peer is slow" in text
    assert "mend that and start the run again, or set resilience.tiered.namespace" in text


def test_step_of_another_recipe_is_refused_at_once(workers: Workers) -> None:
    workers.save(4, lineage="theirs")

    assert (
        'step 4: it fits another job: model.num_layers: "theirs" -> "ours"' in workers.load_error()
    )


def test_state_of_another_recipe_is_refused_before_a_tensor_is_overwritten(
    workers: Workers,
) -> None:
    workers.save(4, lineage="theirs")
    mine = view(value=1.0)

    with pytest.raises(CheckpointError, match="it fits another job"):
        workers.loader(mine).load_newest(newer_than=None)

    assert [each.tensor.unique().item() for each in mine.tensors()] == [1.0]


def test_step_whose_only_copy_is_bad_is_no_loss_beside_another_state(workers: Workers) -> None:
    workers.save(8)
    (segment,) = segments(workers.daemon.folder)
    with segment.open("r+b") as file:
        file.write(b"changed")

    assert workers.load_step(newer_than=2) is None
    assert any("copies were not intact" in reason for _, reason in workers.failed)


def test_nothing_on_offer_is_a_beginning(workers: Workers) -> None:
    assert workers.load_step() is None
    workers.save(4)
    assert workers.load_step(newer_than=4) is None


@pytest.mark.parametrize("newer_than", [None, 6])
def test_daemon_that_does_not_know_yet_is_asked_again(
    workers: Workers, newer_than: int | None
) -> None:
    workers.save(8)
    workers.clients[0].unheard = 3

    assert workers.load_step(newer_than) == 8


def test_other_nodes_daemon_tells_where_that_of_rank_0_cannot(
    workers: Workers, hasty: None
) -> None:
    """The run has an older state, and what it has in memory is not given up for that."""
    workers.save(8)
    workers.clients[0].unheard = FOR_EVER

    assert workers.load_step(newer_than=6) == 8


@pytest.mark.parametrize("newer_than", [None, 6])
def test_run_does_not_begin_where_nobody_knows_what_there_is(
    workers: Workers, hasty: None, newer_than: int | None
) -> None:
    workers.save(8)
    for each in workers.clients:
        each.unheard = FOR_EVER

    text = workers.load_error(newer_than)

    assert "cannot tell which checkpoints there are: peers have not been heard; mend that" in text
    assert "set resilience.tiered.namespace to another name to begin anew" in text


def test_end_of_the_generation_ends_a_load(workers: Workers) -> None:
    workers.save(8)
    workers.clients[0].slow[8] = FOR_EVER

    def end() -> None:
        raise BrokenError("a worker is gone")

    with pytest.raises(BrokenError):
        workers.loader(view(), replace(make_group(world_size=1), check=end)).load_newest(
            newer_than=None
        )
