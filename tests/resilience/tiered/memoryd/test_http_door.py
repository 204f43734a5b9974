"""The door over raw sockets: every call of the protocol, and the budget."""

from __future__ import annotations

import random
import socket
from concurrent.futures import ThreadPoolExecutor

import pytest

from resilience.tiered.memoryd.http_connection import Limits
from tests.resilience.tiered.http_client import (
    MIB,
    Client,
    Doors,
    OpenDoor,
    head,
    shard_meta,
    shard_path,
)

BIG = random.Random(7).randbytes(9 * MIB + 12345)
"""More than a piece, and no whole number of anything."""


@pytest.fixture
def job(http: Client) -> Client:
    """Return a client whose job has a namespace of two ranks."""
    http.create("job", 2)
    return http


def _save(client: Client, space: str, step: int, num_ranks: int = 2, text: str = "") -> None:
    for rank in range(num_ranks):
        assert client.put(space, rank, step, f"{text}{step}/{rank}".encode()).status == 200


# Namespaces


def test_namespace_is_made_told_changed_and_removed(http: Client) -> None:
    assert http.ask("GET", "/v1/cp/namespaces/job").status == 404
    assert http.create("job", 5).status == 201

    told = http.ask("GET", "/v1/cp/namespaces/job")
    assert told.status == 200
    assert told.content == {"num_ranks": 5, "steps_to_retain_per_rank": 3}
    assert http.create("job", 5).status == 200
    assert http.create("job", 9, 1).content["num_ranks"] == 9
    assert http.ask("DELETE", "/v1/cp/namespaces/job").status == 204
    assert http.ask("GET", "/v1/cp/namespaces/job").status == 404
    assert http.ask("DELETE", "/v1/cp/namespaces/job").status == 404


def test_removed_namespace_takes_its_shards_along(door: OpenDoor, job: Client) -> None:
    job.create("other", 2)
    _save(job, "job", 1)
    _save(job, "other", 1)
    job.ask("DELETE", "/v1/cp/namespaces/job")

    assert job.get("job", 0, 1).status == 404
    assert len(door.vault.metas()) == 2
    job.create("job", 2)
    assert job.latest("job") == []
    assert job.latest("other") == [1]


def test_reset_removes_everything(door: OpenDoor, http: Client) -> None:
    for space in ("a", "b"):
        http.create(space, 2)
        _save(http, space, 4)

    assert http.ask("POST", "/v1/cp/cluster/reset", b"").status == 204
    assert door.vault.metas() == []
    assert http.ask("GET", "/v1/cp/namespaces/a").status == 404


def test_namespaces_and_shards_outlive_the_daemon(doors: Doors) -> None:
    with doors.open() as first, first.client() as client:
        client.create("job", 2, 2)
        _save(client, "job", 10)
        client.put("job", 0, 20, BIG)
    with doors.open() as second, second.client() as client:
        assert client.ask("GET", "/v1/cp/namespaces/job").content["steps_to_retain_per_rank"] == 2
        assert client.latest("job") == [10]
        assert client.get("job", 0, 20).body == BIG
        client.put("job", 1, 20, b"the rest")
        assert client.latest("job") == [20, 10]


@pytest.mark.parametrize("content", [None, b"", b"{", b"[]", b'{"job": {}}', b'{"../x": 1}'])
def test_lost_list_of_namespaces_is_made_again_from_the_shards(
    doors: Doors, content: bytes | None
) -> None:
    with doors.open() as first, first.client() as client:
        client.create("job", 2)
        _save(client, "job", 10)
    path = doors.folder / "http-namespaces.json"
    path.unlink()
    if content is not None:
        path.write_bytes(content)
    with doors.open() as second, second.client() as client:
        assert client.latest("job") == [10]


def test_no_more_namespaces_than_agreed(doors: Doors) -> None:
    with doors.open(limits=Limits(num_spaces_max=2)) as opened, opened.client() as client:
        assert [client.create(name, 2).status for name in "abc"] == [201, 201, 507]


# Shards


@pytest.mark.parametrize("size", [0, 1, 4096, 8 * MIB, len(BIG)])
def test_shard_comes_back_as_it_was_sent(job: Client, size: int) -> None:
    body = BIG[:size]
    assert job.put("job", 0, 3, body).status == 200

    answer = job.get("job", 0, 3)
    assert (answer.status, answer.body) == (200, body)
    assert answer.headers["shard-meta"] == shard_meta(body)


def test_shard_meta_is_echoed_to_the_letter(job: Client) -> None:
    meta = shard_meta(b"body").replace(": ", ":\t  ").replace("}", ', "more": "\xe9"}')
    job.ask("POST", shard_path("job", 0, 3), b"body", Shard_Meta=meta)

    assert job.get("job", 0, 3).headers["shard-meta"] == meta


def test_bytes_that_come_one_by_one_make_the_same_shard(job: Client) -> None:
    body = b"slowly" * 7
    data = head("POST", shard_path("job", 0, 3), Content_Length=str(len(body)),
                Shard_Meta=shard_meta(body)) + body  # fmt: skip
    job.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for each in data:
        job.send(bytes([each]))

    assert job.answer().status == 200
    assert job.get("job", 0, 3).body == body


def test_requests_that_come_at_once_are_answered_in_turn(job: Client) -> None:
    first = head("POST", shard_path("job", 0, 3), Content_Length="3", Shard_Meta=shard_meta(b"abc"))
    job.send(first + b"abc" + head("GET", shard_path("job", 0, 3)))

    assert job.answer().status == 200
    assert job.answer().body == b"abc"


def test_body_that_is_asked_for(job: Client) -> None:
    job.send(head("POST", shard_path("job", 0, 3), Content_Length="3",
                     Shard_Meta=shard_meta(b"abc"), Expect="100-continue"))  # fmt: skip
    assert job.answer().status == 100
    job.send(b"abc")
    assert job.answer().status == 200


def test_damaged_body_is_refused_and_not_there(door: OpenDoor, job: Client) -> None:
    damaged = bytearray(BIG)
    damaged[5 * MIB] ^= 1
    meta = shard_meta(BIG)
    answer = job.ask("POST", shard_path("job", 0, 3), bytes(damaged), Shard_Meta=meta)

    assert answer.status == 400
    assert job.get("job", 0, 3).status == 404
    assert door.vault.metas() == []
    assert job.put("job", 0, 3, BIG).status == 200


def test_upload_that_ends_early_is_not_there(door: OpenDoor) -> None:
    with door.client() as client:
        client.create("job", 1)
        client.send(head("POST", shard_path("job", 0, 3), Content_Length="1000",
                         Shard_Meta=shard_meta(b"")) + b"half")  # fmt: skip
    with door.client() as client:
        # The same shard again waits until the earlier one is given up.
        assert client.put("job", 0, 3, b"whole").status == 200
        assert client.get("job", 0, 3).body == b"whole"


def test_shard_is_removed(job: Client) -> None:
    _save(job, "job", 3)

    assert job.ask("DELETE", shard_path("job", 0, 3)).status == 204
    assert job.get("job", 0, 3).status == 404
    assert job.latest("job") == []
    assert job.ask("DELETE", shard_path("job", 0, 3)).status == 404


def test_missing_namespace_has_no_shards(http: Client) -> None:
    assert http.put("none", 0, 3, b"x").status == 404
    assert http.is_ended()


def test_shard_is_read_whole_while_it_is_replaced(door: OpenDoor, http: Client) -> None:
    """What is on its way is not written again, though it is dropped and room is needed."""
    http.create("job", 1, 1)
    http.put("job", 0, 1, BIG)
    with door.client() as reader:
        reader.send(head("GET", shard_path("job", 0, 1)))
        assert reader.socket.recv(1, socket.MSG_PEEK) == b"H"
        for step in range(2, 5):
            assert http.put("job", 0, step, bytes([step]) * len(BIG)).status == 200

        assert reader.answer().body == BIG


# Steps


def test_newest_steps_come_first_and_no_more_than_asked_for(http: Client) -> None:
    http.create("job", 2, 5)
    for step in (10, 0, 9, 100):
        _save(http, "job", step)

    assert http.latest("job") == [100, 10, 9, 0]
    assert http.latest("job", limit=2) == [100, 10]
    assert http.ask("GET", "/v1/cp/checkpoints/job/latest").content == [100, 10, 9, 0]
    assert http.ask("GET", "/v1/cp/checkpoints/none/latest").status == 404


def test_older_steps_go_when_a_newer_one_is_complete(door: OpenDoor, http: Client) -> None:
    http.create("job", 2, 2)
    http.put("job", 0, 1, b"never complete")
    for step in (2, 3):
        _save(http, "job", step)
    http.put("job", 0, 4, b"x")
    assert http.latest("job") == [3, 2]

    http.put("job", 1, 4, b"x")

    assert http.latest("job") == [4, 3]
    assert {each.id.step for each in door.vault.metas()} == {3, 4}


def test_step_saved_again_stays_what_it_was_until_the_new_one_is_complete(http: Client) -> None:
    http.create("job", 3)
    _save(http, "job", 5, 3, text="old")
    for rank in range(2):
        http.put("job", rank, 5, b"new%d" % rank)
        assert http.latest("job") == [5]
        assert http.get("job", rank, 5).body == b"old5/%d" % rank
    http.put("job", 2, 5, b"old5/2")  # the metadata may well be the same

    assert [http.get("job", rank, 5).body for rank in range(3)] == [b"new0", b"new1", b"old5/2"]


def test_shard_sent_again_is_taken_once(door: OpenDoor, job: Client) -> None:
    for rank in (0, 0, 1, 1):
        assert job.put("job", rank, 5, b"same%d" % rank).status == 200

    assert job.latest("job") == [5]
    assert len(door.vault.metas()) == 2


def test_world_may_change_though_the_namespace_does_not(doors: Doors) -> None:
    metadata = b"\x80\x05\x95\0\0\0\0\0\0\0\0\x8c\x25torch.distributed.checkpoint.metadata"
    with doors.open() as opened, opened.client() as client:
        client.create("job", 5)
        for step, num_ranks in ((1, 4), (2, 2), (3, 8), (4, 8)):
            for rank in range(num_ranks):
                assert step not in client.latest("job") or step == 3
                client.put("job", rank, step, b"%d/%d" % (step, rank))
            client.put("job", num_ranks, step, metadata)
            assert client.latest("job")[0] == step
            assert client.get("job", num_ranks, step).body == metadata
    with doors.open() as opened, opened.client() as client:
        assert client.ask("GET", "/v1/cp/namespaces/job").content["num_ranks"] == 9


def test_all_ranks_at_once(door: OpenDoor, http: Client) -> None:
    http.create("job", 8, 2)

    def save(rank: int) -> None:
        with door.client() as own:
            for step in range(6):
                assert own.put("job", rank, step, bytes([rank, step]) * 50_000).status == 200

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(save, range(8)))
    assert http.latest("job")[0] == 5
    assert all(http.get("job", rank, 5).body == bytes([rank, 5]) * 50_000 for rank in range(8))


# The budget


def test_budget_makes_older_steps_go_but_never_the_last(doors: Doors) -> None:
    with doors.open(budget_bytes=8 * MIB) as opened, opened.client() as client:
        client.create("job", 1, 3)
        for step in range(1, 6):
            body = bytes([step]) * (3 * MIB)
            assert client.put("job", 0, step, body).status == 200
            assert client.latest("job")[0] == step
            assert opened.vault.total_bytes <= 8 * MIB

        answer = client.put("job", 0, 9, bytes(6 * MIB))
        assert (answer.status, answer.headers["connection"]) == (507, "close")
    with doors.open(budget_bytes=8 * MIB) as opened, opened.client() as client:
        assert client.latest("job") == [5]
        assert client.get("job", 0, 5).body == bytes([5]) * (3 * MIB)


def test_budget_holds_whatever_is_sent(doors: Doors) -> None:
    """Ranks that send too much, damaged or half shards, all at once."""
    budget_bytes = 4 * MIB
    statuses: set[int] = set()

    def send(rank: int) -> None:
        rng = random.Random(rank)
        for step in range(15):
            with opened.client() as client:
                body = rng.randbytes(rng.randrange(MIB))
                kind = rng.choice(["whole", "whole", "damaged", "half"])
                meta = shard_meta(b"other" if kind == "damaged" else body)
                sent = body[: len(body) // 2] if kind == "half" else body
                client.send(head("POST", shard_path("job", rank, step), Shard_Meta=meta,
                                 Content_Length=str(len(body))) + sent)  # fmt: skip
                if kind != "half":
                    statuses.add(client.answer().status)
            assert opened.vault.total_bytes <= budget_bytes

    with doors.open(budget_bytes=budget_bytes) as opened, opened.client() as client:
        client.create("job", 1, 3)
        client.put("job", 0, 0, b"first")
        with ThreadPoolExecutor(6) as pool:
            list(pool.map(send, range(6)))
        assert 200 in statuses
        assert statuses <= {200, 400, 503, 507}
        assert client.latest("job") != []
        assert opened.vault.total_bytes <= budget_bytes


def test_full_budget_that_may_have_room_soon_is_503(doors: Doors) -> None:
    with doors.open(budget_bytes=4 * MIB) as opened, opened.client() as client:
        client.create("job", 2)
        with opened.client() as other:
            other.send(head("POST", shard_path("job", 0, 1), Content_Length=str(3 * MIB),
                            Shard_Meta=shard_meta(b""), Expect="100-continue"))  # fmt: skip
            assert other.answer().status == 100
            refused = client.put("job", 1, 1, bytes(3 * MIB))
            assert (refused.status, refused.headers["retry-after"]) == (503, "1")


def test_others_are_asked_for_room_once(doors: Doors) -> None:
    asked = []

    def ask_room(num_bytes: int) -> bool:
        asked.append(num_bytes)
        return True

    with (
        doors.open(budget_bytes=4 * MIB, ask_room=ask_room) as opened,
        opened.client() as client,
    ):
        client.create("job", 1)
        client.put("job", 0, 1, bytes(3 * MIB))
        assert client.put("job", 0, 2, bytes(3 * MIB)).status == 503
        assert asked == [3 * MIB]


def test_body_above_the_budget_is_413_before_it_is_sent(doors: Doors) -> None:
    with doors.open(budget_bytes=4 * MIB) as opened, opened.client() as client:
        client.create("job", 1)
        client.send(head("POST", shard_path("job", 0, 1), Content_Length=str(1 << 62),
                         Shard_Meta=shard_meta(b"")))  # fmt: skip
        assert client.answer().status == 413
        assert opened.vault.total_bytes == 0


def test_refused_body_may_be_sent_to_its_end(door: OpenDoor) -> None:
    """A client that reads the answer only behind the body gets it, not a broken connection."""
    with door.client() as client:
        answer = client.put("none", 0, 1, bytes(48 * MIB))
        assert (answer.status, answer.headers["connection"]) == (404, "close")
