"""What AWS's library has saved, from a daemon's memory and from S3, without the library."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from resilience.tiered.aws_bucket import BucketSource
from resilience.tiered.aws_door import CheckpointSource, DoorSource, find_last
from resilience.tiered.aws_reader import AwsReader
from resilience.tiered.errors import FormatError, LostError, RefusedError
from resilience.tiered.stores.s3 import S3Objects, S3Settings
from tests.resilience.tiered.aws_made import NUM_RANKS, REST, dump, make_checkpoint, make_rows
from tests.resilience.tiered.daemons import segments
from tests.resilience.tiered.http_client import Doors, OpenDoor
from tests.resilience.tiered.s3_server import S3Server

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
FILE = Path("/tmp/run-by-a-shard")


def put(door: OpenDoor, step: int, blobs: list[bytes], *, num_ranks: int = NUM_RANKS + 1) -> None:
    with door.client() as client:
        client.create("job", num_ranks)
        for rank, blob in enumerate(blobs):
            assert client.put("job", rank, step, blob).status == 200


def source(door: OpenDoor, **options: Any) -> DoorSource:
    host, port = door.door.address
    return DoorSource(f"http://{host}:{port}", "job", **options)


def load(*sources: CheckpointSource, **options: Any) -> tuple[int | None, dict[str, Any]]:
    state = {"rows": torch.zeros(2 * NUM_RANKS, 3), "rest": {}}
    reader = AwsReader(sources, **options)
    dcp.load(state, storage_reader=reader, no_dist=True)
    return reader.step, state


def fail(*sources: CheckpointSource, **options: Any) -> str:
    """Return why a load fails."""
    with pytest.raises(dcp.api.CheckpointException) as caught:
        load(*sources, **options)
    ((error, _),) = caught.value.failures.values()
    return str(error)


def is_of_seed(state: dict[str, Any], seed: int) -> bool:
    return torch.equal(state["rows"], make_rows(seed)) and state["rest"] == REST


def test_newest_step_and_a_given_one(door: OpenDoor) -> None:
    for step in (3, 9):
        put(door, step, make_checkpoint(step))

    newest, state = load(source(door))
    assert (newest, is_of_seed(state, 9)) == (9, True)
    assert is_of_seed(load(source(door), step=3)[1], 3)
    assert "the metadata of step 4 cannot be had" in fail(source(door), step=4)


@pytest.mark.parametrize("num_ranks", [1, 3, 9])
def test_the_world_that_saved_is_found_whatever_the_namespace_was_told(
    door: OpenDoor, num_ranks: int
) -> None:
    put(door, 1, make_checkpoint(1), num_ranks=num_ranks)
    with door.client() as client:
        client.create("job", num_ranks)

    assert is_of_seed(load(source(door), step=1)[1], 1)


@pytest.mark.parametrize("number", [*range(10), 1000, 1024])
def test_last_rank_is_found_in_few_questions(number: int) -> None:
    asked: list[int] = []

    def has(rank: int) -> bool:
        asked.append(rank)
        return rank < number

    assert find_last(has, 1 << 20) == (number - 1 if number else None)
    assert len(asked) <= 2 * number.bit_length() + 1


def test_nothing_there_and_nobody_there(door: OpenDoor) -> None:
    host, _ = door.door.address
    assert "there is no step to load" in fail(source(door))
    assert "Connection refused" in fail(DoorSource(f"http://{host}:1", "job"))
    with pytest.raises(ValueError, match="url is 'ftp://x'"):
        DoorSource("ftp://x", "job")


def test_wrong_token_is_said(doors: Doors) -> None:
    with doors.open(token="secret") as opened:
        with pytest.raises(RefusedError, match="the token is missing or wrong"):
            source(opened).steps()
        assert source(opened, token="secret").steps() == []


def test_a_flipped_bit_is_found(door: OpenDoor, doors: Doors) -> None:
    put(door, 1, make_checkpoint())
    rows = make_rows(1)[2:4].numpy().tobytes()
    (hit,) = [each for each in segments(doors.folder) if rows in each.read_bytes()]
    with hit.open("r+b") as file:
        file.seek(hit.read_bytes().index(rows))
        file.write(b"!")

    error = fail(source(door))

    assert "rank 1 of step 1 is not what its checksum says" in error


class Bomb:
    def __reduce__(self) -> Any:
        return os.system, (f"touch {FILE}",)


@pytest.mark.parametrize("where", ["metadata", "item"])
def test_a_bomb_is_refused_and_not_run(door: OpenDoor, where: str) -> None:
    FILE.unlink(missing_ok=True)
    *blobs, metadata = make_checkpoint(rest=Bomb() if where == "item" else REST)
    if where == "metadata":
        # It begins as an honest one does.
        metadata = dump([torch.distributed.checkpoint.Metadata({}), Bomb()])
    put(door, 1, [*blobs, metadata])

    error = fail(source(door))

    wanted = "it asks for posix.system" if where == "metadata" else "no plain data"
    assert wanted in error
    assert not FILE.exists()


def test_each_failure_has_its_error(door: OpenDoor) -> None:
    put(door, 1, [b"", dump(Bomb())])

    with pytest.raises(LostError, match=r"the metadata of step 1 cannot be had: .*: not there"):
        AwsReader([source(door)], step=1).read_metadata()
    with pytest.raises(LostError, match=r"there is no step to load: .*: none"):
        AwsReader([DoorSource("http://{}:{}".format(*door.door.address), "none")]).read_metadata()


def test_what_nobody_asks_for_is_an_error_but_for_those_who_say_so(door: OpenDoor) -> None:
    put(door, 1, make_checkpoint(1))

    for asked, left in (("rows", "rest"), ("rest", "rows")):
        state = {"rows": torch.zeros(2 * NUM_RANKS, 3), "rest": {}}
        part = {asked: state[asked]}
        with pytest.raises(dcp.api.CheckpointException) as caught:
            dcp.load(part, storage_reader=AwsReader([source(door)]), no_dist=True)
        ((error, _),) = caught.value.failures.values()
        assert isinstance(error, FormatError)
        assert f"the step has {left}" in str(error)
        reader = AwsReader([source(door)], allow_partial=True)
        dcp.load(part, storage_reader=reader, no_dist=True)


def test_too_long_a_metadata_is_not_read(door: OpenDoor) -> None:
    put(door, 1, make_checkpoint())

    error = fail(source(door), metadata_bytes_max=1000)

    assert "the metadata of step 1 is longer than 1000 bytes" in error


def test_more_than_plain_data_only_for_those_who_say_so(door: OpenDoor) -> None:
    put(door, 1, make_checkpoint(rest=argparse.Namespace(a=1)))

    assert "no plain data" in fail(source(door))
    assert load(source(door), allow_pickle=True)[1]["rest"] == argparse.Namespace(a=1)


def store(
    server: S3Server, prefix: str, step: int, blobs: list[bytes], *, is_ray: bool
) -> S3Settings:
    server.make_bucket("bucket")
    settings = S3Settings(bucket="bucket", prefix=prefix, endpoint=server.endpoint)
    objects = S3Objects(settings)
    names = [f"rank_{rank}/step_{step}/checkpoint.pt" for rank in range(NUM_RANKS)]
    for name, blob in zip([*names, f"rank_0/step_{step}/metadata.metadata"], blobs, strict=True):
        rank_folder, step_folder, file = name.split("/")
        folders = (step_folder, rank_folder) if is_ray else (rank_folder, step_folder)
        objects.write("/".join(("job", *folders, file)), len(blob), [memoryview(blob)])
    return settings


@pytest.mark.parametrize("is_ray", [False, True])
def test_from_s3_in_both_layouts(server: S3Server, is_ray: bool) -> None:
    for step in (9, 10):
        settings = store(server, f"base/{is_ray}", step, make_checkpoint(step), is_ray=is_ray)

    newest, state = load(BucketSource(settings, "job"))

    assert (newest, is_of_seed(state, 10)) == (10, True)
    assert is_of_seed(load(BucketSource(settings, "job"), step=9)[1], 9)
    error = fail(BucketSource(settings, "other"))
    assert f"there is no step to load: s3://bucket/base/{is_ray}/other: none" in error


def test_a_shard_that_memory_lost_comes_from_s3(server: S3Server, door: OpenDoor) -> None:
    blobs = make_checkpoint(5)
    settings = store(server, "mixed", 5, blobs, is_ray=False)
    put(door, 5, blobs)
    with door.client() as client:
        client.ask("DELETE", "/v1/cp/checkpoints/job/1/5")

    assert is_of_seed(load(source(door), BucketSource(settings, "job"), step=5)[1], 5)
    assert "what rank 1 saved of step 5" in fail(source(door), step=5)
