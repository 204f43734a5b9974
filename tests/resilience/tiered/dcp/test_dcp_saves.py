"""What dcp.save and dcp.load promise where something went wrong before."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.default_planner import create_default_local_load_plan

from resilience.tiered.client import TieredClient
from resilience.tiered.dcp import TieredReader, TieredWriter
from resilience.tiered.dcp.step_reader import check_asked
from resilience.tiered.errors import FormatError, HeldError, StaleError
from tests.resilience.rank_processes import run_ranks
from tests.resilience.tiered.cluster import make_cluster
from tests.resilience.tiered.daemons import MIB, Daemon
from tests.resilience.tiered.dcp.test_dcp import connect, open_world
from tests.resilience.tiered.kept import wait_until, waiting

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def save_alone(client: TieredClient, value: float, step: int, **options: Any) -> None:
    writer = TieredWriter(client, step=step, **options)
    dcp.save({"a": torch.full((4,), value)}, storage_writer=writer, no_dist=True)


def load_alone(client: TieredClient, **options: Any) -> float:
    state = {"a": torch.zeros(4)}
    dcp.load(state, storage_reader=TieredReader(client, **options), no_dist=True)
    return float(state["a"][0])


def error_of(caught: pytest.ExceptionInfo[dcp.api.CheckpointException]) -> BaseException:
    """Return what went wrong on the rank that it happened to."""
    (error, *_) = [each[0] for each in caught.value.failures.values()]
    return error


class Failing(dcp.DefaultSavePlanner):
    """One rank's part cannot be had; the others have written theirs by then."""

    def resolve_data(self, write_item: Any) -> Any:
        dist.barrier()  # the others are about to write, or have
        raise OSError("the device is gone")


class Meeting(dcp.DefaultSavePlanner):
    def resolve_data(self, write_item: Any) -> Any:
        data = super().resolve_data(write_item)
        dist.barrier()
        return data


def parts(value: float) -> dict[str, Tensor]:
    """Return what the ranks hold, each its own."""
    return {f"part-{rank}": torch.full((4,), value + rank) for rank in range(2)}


def tear_and_save_again(
    rank: int, world_size: int, folder: str, paths: list[str], failing: int
) -> tuple[str, list[float]]:
    """Save a step twice, where one rank fails at the first; return how, and what is loaded then."""
    open_world(rank, world_size, folder)
    with connect(paths[rank]) as client:

        def save(value: float, planner: dcp.SavePlanner) -> None:
            own = {f"part-{rank}": parts(value)[f"part-{rank}"]}
            dcp.save(own, storage_writer=TieredWriter(client, step=5), planner=planner)

        try:
            save(10.0, Failing() if rank == failing else Meeting())
        except dcp.api.CheckpointException as error:
            (failed,) = error.failures
        save(20.0, dcp.DefaultSavePlanner())
        wait_until(lambda: any(each.is_whole for each in client.known_steps().steps))
        dist.barrier()
        found = parts(0.0)
        dcp.load(found, storage_reader=TieredReader(client, step=5))
        return f"{failed} failed", [float(each[0]) for each in found.values()]


@pytest.mark.parametrize("failing", [0, 1])
def test_torn_save_is_replaced_by_the_next_of_that_step(tmp_path: Path, failing: int) -> None:
    """Whichever node has what the torn one has left."""
    with make_cluster(tmp_path, options=["--keep", "9"]) as cluster:
        cluster.start()
        paths = [str(cluster[name].socket_path) for name in "ab"]

        found = run_ranks(tear_and_save_again, 2, str(tmp_path), paths, failing)

        assert found == [(f"{failing} failed", [20.0, 21.0])] * 2


def tear(rank: int, world_size: int, folder: str, path: str, mib: int) -> None:
    open_world(rank, world_size, folder)
    with connect(path) as client, suppress(dcp.api.CheckpointException):
        own = {f"part-{rank}": torch.zeros(mib << 18)}
        planner = Failing() if rank == 1 else Meeting()
        dcp.save(own, storage_writer=TieredWriter(client, step=5), planner=planner)


def test_torn_save_takes_no_room_from_the_next(daemon: Daemon, tmp_path: Path) -> None:
    """Memory for one state is enough, at once."""
    client = daemon.client()
    run_ranks(tear, 2, str(tmp_path), str(daemon.socket_path), 40)
    assert client.status()["held_bytes"] == 40 * MIB

    state = {"a": torch.ones(40 << 18)}
    dcp.save(state, storage_writer=TieredWriter(client, step=5), no_dist=True)

    assert TieredReader(client, step=5).read_metadata().state_dict_metadata.keys() == {"a"}


class Overtaken(dcp.DefaultSavePlanner):
    """Another save makes a later step whole, while this one is under way."""

    def __init__(self, client: TieredClient) -> None:
        super().__init__()
        self.client = client

    def resolve_data(self, write_item: Any) -> Any:
        save_alone(self.client, 20.0, 20)
        return super().resolve_data(write_item)


def test_save_that_returned_is_there(daemon: Daemon) -> None:
    client = daemon.client()
    writer = TieredWriter(client, step=10)
    state = {"a": torch.full((4,), 10.0)}

    with pytest.raises(dcp.api.CheckpointException) as caught:
        dcp.save(state, storage_writer=writer, planner=Overtaken(daemon.client()), no_dist=True)

    assert isinstance(error_of(caught), StaleError)
    assert "step 10 was overtaken while it was saved, and is not kept" in str(error_of(caught))
    assert load_alone(client) == 20.0


def test_whole_step_is_overwritten_and_an_older_one_saved_only_on_demand(daemon: Daemon) -> None:
    client = daemon.client()
    save_alone(client, 10.0, 10)

    with pytest.raises(dcp.api.CheckpointException) as held:
        save_alone(client, 11.0, 10)
    before = load_alone(client)
    save_alone(client, 12.0, 10, overwrite=True)
    with pytest.raises(dcp.api.CheckpointException) as stale:
        save_alone(client, 5.0, 5)

    assert isinstance(error_of(held), HeldError)
    assert isinstance(error_of(stale), StaleError)
    assert (before, load_alone(client), load_alone(client, step=10)) == (10.0, 12.0, 12.0)
    client.go_back(step=4)
    save_alone(client, 5.0, 5)
    assert load_alone(client) == 5.0


def load_newest(rank: int, world_size: int, folder: str, paths: list[str]) -> float:
    open_world(rank, world_size, folder)
    state = {"a": torch.zeros(4)}
    with connect(paths[rank]) as client:
        dcp.load(state, storage_reader=TieredReader(client))
    return float(state["a"][0])


def load_named(rank: int, world_size: int, folder: str, paths: list[str]) -> str:
    open_world(rank, world_size, folder)
    with connect(paths[rank]) as client, pytest.raises(dcp.api.CheckpointException) as caught:
        dcp.load({"a": torch.zeros(4)}, storage_reader=TieredReader(client, step=1))
    return str(error_of(caught))


@pytest.fixture
def strangers(tmp_path: Path) -> Iterator[list[Daemon]]:
    """Two nodes, neither of which has heard of what the other has."""
    options = ["--keep", "9"]
    with (
        Daemon(folder=tmp_path / "a", options=options) as a,
        Daemon(folder=tmp_path / "b", options=options) as b,
    ):
        yield [a.start(), b.start()]


@pytest.mark.parametrize("ahead", [0, 1])
def test_rank_0_decides_which_step_all_load(
    strangers: list[Daemon], tmp_path: Path, ahead: int
) -> None:
    for daemon in strangers:
        save_alone(daemon.client(), 1.0, 1)
        save_alone(daemon.client(), 2.0, 2)
    save_alone(strangers[ahead].client(), 3.0, 3)
    if ahead == 0:  # so that the other one has it, though it offers a later one
        save_alone(strangers[1].client(), 3.0, 3)
        save_alone(strangers[1].client(), 4.0, 4)
    paths = [str(each.socket_path) for each in strangers]

    found = run_ranks(load_newest, 2, str(tmp_path), paths)

    assert found == [3.0 if ahead == 0 else 2.0] * 2


def test_ranks_that_would_load_two_attempts_of_a_step_load_none(
    strangers: list[Daemon], tmp_path: Path
) -> None:
    save_alone(strangers[0].client(), 1.0, 1)
    save_alone(strangers[1].client(), 2.0, 1, generation=8)
    paths = [str(each.socket_path) for each in strangers]

    found = run_ranks(load_named, 2, str(tmp_path), paths)

    histories = "step 1 of generation 0 and step 1 of generation 8"
    assert found == [f"ranks would load different states, {histories}; load again"] * 2


def test_what_no_rank_asks_for_is_an_error(daemon: Daemon) -> None:
    """A tensor that one rank asks for is enough; what nobody asks for would be dropped."""
    client = daemon.client()
    saved = {"a": torch.ones(4), "b": torch.ones(4), "empty": torch.empty(0)}
    dcp.save(saved, storage_writer=TieredWriter(client, step=1), no_dist=True)
    state = {"a": torch.zeros(4)}

    with pytest.raises(dcp.api.CheckpointException) as caught:
        dcp.load(dict(state), storage_reader=TieredReader(client), no_dist=True)
    reader = TieredReader(client, allow_partial=True)
    dcp.load(state, storage_reader=reader, no_dist=True)

    told = "the step has b, which the state dict that it is loaded into does not have"
    assert str(error_of(caught)) == f"{told}; allow_partial=True of the reader leaves that out"
    assert state["a"].tolist() == [1.0] * 4
    metadata = reader.read_metadata()
    own, other = (create_default_local_load_plan({n: torch.zeros(4)}, metadata) for n in "ab")
    check_asked(metadata, [own, other])
    with pytest.raises(FormatError, match=told):
        check_asked(metadata, [own, own])


class Evil:
    """Runs a command where it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.path}",)


def test_pickle_is_loaded_on_demand_alone(daemon: Daemon, tmp_path: Path) -> None:
    client, proof = daemon.client(), tmp_path / "proof"
    state: dict[str, Any] = {"a": torch.ones(4), "evil": Evil(proof)}
    dcp.save(state, storage_writer=TieredWriter(client, step=1), no_dist=True)

    def load(**options: Any) -> None:
        reader = TieredReader(client, **options)
        dcp.load({"a": torch.zeros(4), "evil": None}, storage_reader=reader, no_dist=True)

    with pytest.raises(dcp.api.CheckpointException) as caught:
        load()

    assert isinstance(error_of(caught), FormatError)
    assert "evil of step 1 is a pickle that may run anything" in str(error_of(caught))
    assert "allow_pickle=True loads it all the same" in str(error_of(caught))
    assert not proof.exists()
    load(allow_pickle=True)
    assert proof.exists()


def test_plain_data_needs_no_leave(daemon: Daemon) -> None:
    client = daemon.client()
    plain = {"lr": 0.5, "names": ["a", "b"], "betas": (0.9, 0.95), "none": None}
    dcp.save(dict(plain), storage_writer=TieredWriter(client, step=1), no_dist=True)

    found: dict[str, Any] = {"lr": 0.0, "names": ["", ""], "betas": (0.0, 0.0), "none": 1}
    dcp.load(found, storage_reader=TieredReader(client), no_dist=True)

    assert found == plain


def test_checkpoint_id_names_the_step_and_the_metadata_says_who_saved(daemon: Daemon) -> None:
    client = daemon.client()
    writer, reader = TieredWriter(client), TieredReader(client)

    for value, name in ((1.0, "1"), (2.0, "run/2")):
        state = {"a": torch.full((4,), value)}
        dcp.save(state, checkpoint_id=name, storage_writer=writer, no_dist=True)
    state = {"a": torch.zeros(4)}
    dcp.load(state, checkpoint_id=Path("run/1"), storage_reader=reader, no_dist=True)
    first, *metas = (TieredReader(client, step=n).read_metadata().storage_meta for n in (1, 2, 2))

    assert state["a"][0] == 1.0
    assert (writer.checkpoint_id, reader.checkpoint_id) == ("run/2", "run/1")
    assert {each.checkpoint_id for each in metas} == {"run/2"}
    assert {each.save_id for each in metas} == {writer.storage_meta().save_id} != {first.save_id}
    assert len({each.load_id for each in metas} - {None}) == 2
    assert TieredWriter.validate_checkpoint_id("run/2")
    assert not TieredReader.validate_checkpoint_id("run/newest")


@pytest.mark.parametrize("name", ["other/2", "run/newest", "", "run/-1"])
def test_checkpoint_id_that_is_no_step_of_the_namespace_is_refused(
    daemon: Daemon, name: str
) -> None:
    words = (
        rf"checkpoint_id is '{name}', no step of the namespace 'run'; allowed: STEP and run/STEP"
    )

    for each in (TieredWriter(daemon.client()), TieredReader(daemon.client())):
        with pytest.raises(ValueError, match=words):
            each.reset(name)


def test_save_that_this_writer_cannot_do_is_refused(daemon: Daemon) -> None:
    client, state = daemon.client(), {"a": torch.ones(4)}

    def save_two(writer: TieredWriter, **options: Any) -> None:
        for step in ("8", "9"):
            dcp.save(dict(state), storage_writer=writer, no_dist=True, **options)
            writer.reset(step)

    def fail(writer: TieredWriter, **options: Any) -> str:
        with pytest.raises((ValueError, dcp.api.CheckpointException)) as caught:
            save_two(writer, **options)
        return str(caught.value)

    assert "no step is named" in fail(TieredWriter(client))
    assert "ranks agree" in fail(TieredWriter(client, step=1), use_collectives=False)
    planner = dcp.DefaultSavePlanner(enable_plan_caching=True)
    assert "enable_plan_caching" in fail(TieredWriter(client, step=1), planner=planner)


def test_named_step_that_another_node_has_stored_since_is_found(tmp_path: Path) -> None:
    options = ["--store", f"folder:{tmp_path / 'store'}", "--store-every-n-steps", "1"]
    with (
        Daemon(folder=tmp_path / "a", options=[*options, "--node", "a"]) as writing,
        Daemon(folder=tmp_path / "b", options=[*options, "--node", "b"]) as reading,
    ):
        client, other = writing.start().client(), reading.start().client()
        with pytest.raises(dcp.api.CheckpointException, match="step 1 is not there, or not whole"):
            load_alone(other, step=1)
        save_alone(client, 1.0, 1)
        wait_until(lambda: not waiting(client))

        assert load_alone(other, step=1) == 1.0
