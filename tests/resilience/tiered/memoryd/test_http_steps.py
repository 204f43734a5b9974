"""Which steps of an HTTP namespace are complete, and which go."""

from __future__ import annotations

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilience.tiered.memoryd.http_steps import (
    METADATA,
    choose_generation,
    choose_shard,
    complete_steps,
    find_safe,
    is_metadata,
    plan_drops,
    plan_room,
    shards_of,
    sort_steps,
)
from resilience.tiered.shard import ShardId, ShardMeta

Key = tuple[int, int, int]
"""Step, generation, rank."""


def _meta(
    step: int,
    generation: int,
    rank: int,
    num_ranks: int = 2,
    text: str = "",
    *,
    is_metadata: bool = False,
) -> ShardMeta:
    return ShardMeta(
        id=ShardId(namespace="http:job", step=step, generation=generation, shard=str(rank)),
        num_shards=num_ranks,
        num_bytes=0,
        tensors=(),
        checksums=(),
        rest={"shard_meta": text or f"{step} {generation} {rank}", METADATA: is_metadata},
    )


def _key(shard_id: ShardId) -> Key:
    return shard_id.step, shard_id.generation, int(shard_id.shard)


@pytest.mark.parametrize(
    ("num_ranks", "ranks", "is_complete"),
    [
        pytest.param(2, [0, 1], True, id="all"),
        pytest.param(2, [1], False, id="one-missing"),
        pytest.param(2, [0, 2], False, id="gap"),
        pytest.param(2, [0, 1, 2], True, id="more-than-announced"),
        pytest.param(2, [0, 1, 3], True, id="gap-beyond-the-announced"),
        pytest.param(1, [0], True, id="single"),
    ],
)
def test_step_is_complete_with_all_its_ranks(
    num_ranks: int, ranks: list[int], is_complete: bool
) -> None:
    steps = sort_steps(_meta(5, 0, rank, num_ranks) for rank in ranks)
    assert complete_steps(steps) == ([5] if is_complete else [])


@pytest.mark.parametrize(
    ("ranks", "last", "is_complete"),
    [
        pytest.param([0, 1, 2], 2, True, id="fewer-than-announced"),
        pytest.param([0, 2], 2, False, id="fewer-and-one-missing"),
        pytest.param([0, 1, 2, 3, 4, 5, 6], 6, True, id="more-than-announced"),
        pytest.param([0, 1, 2, 3, 4, 6], 6, False, id="more-and-one-missing"),
    ],
)
def test_metadata_tells_how_many_ranks_there_are(
    ranks: list[int], last: int, is_complete: bool
) -> None:
    steps = sort_steps(_meta(5, 0, rank, 5, is_metadata=rank == last) for rank in ranks)
    assert complete_steps(steps) == ([5] if is_complete else [])


def test_rank_beyond_the_metadata_begins_a_new_version() -> None:
    steps = sort_steps(_meta(5, 0, rank, is_metadata=rank == 1) for rank in range(2))
    assert choose_generation(steps[5], 2, "new", 0) == 1


def test_metadata_is_known_by_its_first_bytes() -> None:
    assert is_metadata(pickle.dumps(ModuleOf("torch.distributed.checkpoint.metadata"), 5))
    assert not is_metadata(b"PK\x03\x04" + bytes(200) + b"torch.distributed.checkpoint.metadata")
    assert not is_metadata(b"")


class ModuleOf:
    """Its pickle begins as that of a class of the module."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __reduce__(self) -> tuple[object, ...]:
        return str, (self.name,)


def test_two_versions_do_not_make_one_step() -> None:
    assert complete_steps(sort_steps([_meta(5, 0, 0), _meta(5, 1, 1)])) == []


def test_what_is_no_rank_is_left_alone() -> None:
    assert sort_steps([_meta(5, 0, -1)]) == {}


@pytest.mark.parametrize(
    ("held", "rank", "text", "generation"),
    [
        pytest.param([(0, 0)], 1, "new", 0, id="first-time"),
        pytest.param([(0, 0)], 0, "5 0 0", None, id="sent-again"),
        pytest.param([(0, 0)], 0, "new", 1, id="saved-again-before-it-was-complete"),
        pytest.param([(0, 0), (0, 1)], 0, "new", 1, id="saved-again"),
        pytest.param([(0, 0), (0, 1)], 0, "5 0 0", 1, id="saved-again-with-the-same-content"),
        pytest.param([(0, 0), (0, 1)], 1, "5 0 1", None, id="last-rank-sent-again"),
        pytest.param([(0, 0), (0, 1), (1, 0)], 1, "5 0 1", 1, id="rest-of-the-new-version"),
        pytest.param([(0, 0), (0, 1)], 2, "new", 0, id="more-ranks-than-announced"),
    ],
)
def test_generation_of_a_shard(
    held: list[tuple[int, int]], rank: int, text: str, generation: int | None
) -> None:
    steps = sort_steps(_meta(5, number, each) for number, each in held)
    assert choose_generation(steps[5], rank, text, 0) == generation


def test_reader_gets_the_newest_complete_version() -> None:
    steps = sort_steps([_meta(5, 0, 0), _meta(5, 0, 1), _meta(5, 1, 0)])
    chosen = choose_shard(steps, 5, 0)
    assert chosen is not None
    assert chosen.id.generation == 0
    assert choose_shard(steps, 5, 2) is None
    assert choose_shard(steps, 6, 0) is None


def test_a_torn_step_that_is_saved_again_is_complete_whatever_rank_comes_first() -> None:
    """Ranks that the torn one lacks come into it; the others, and the metadata, after it."""
    held = [_meta(7, 0, 0), _meta(7, 0, 1)]
    for rank in (2, 3, 0, 1, 4):
        number = choose_generation(sort_steps(held)[7], rank, "again", 0)
        assert number is not None
        held.append(_meta(7, number, rank, 5, "again", is_metadata=rank == 4))

    steps = sort_steps(held)
    assert complete_steps(steps) == [7]
    chosen = [choose_shard(steps, 7, rank) for rank in range(5)]
    assert [each and each.rest["shard_meta"] for each in chosen] == ["again"] * 5
    assert set(map(_key, plan_drops(steps, 7, 1))) == {(7, 0, 0), (7, 0, 1)}
    assert [set(map(_key, each)) for each in plan_room(steps, 8)] == [{(7, 0, 0), (7, 0, 1)}]
    assert len(shards_of(steps, 7)) == len(held)


def test_a_version_takes_nothing_from_one_that_was_complete() -> None:
    held = [_meta(7, 0, rank, 3, is_metadata=rank == 2) for rank in range(3)]
    held += [_meta(7, 1, 0), _meta(7, 1, 2, 3, is_metadata=True)]
    chosen = choose_shard(sort_steps(held), 7, 0)
    assert chosen is not None
    assert chosen.id.generation == 0


def test_while_peers_are_missing_what_they_may_complete_stays() -> None:
    steps = sort_steps([_meta(step, 0, 0) for step in (9, 10, 11)])
    assert plan_room(steps, 12, has_all_peers=False) == []
    assert [list(map(_key, each)) for each in plan_room(steps, 12)] == [
        [(9, 0, 0)], [(10, 0, 0)], [(11, 0, 0)],
    ]  # fmt: skip

    older = sort_steps(_meta(step, 0, rank) for step, rank in ((8, 0), (9, 0), (9, 1), (10, 0)))
    assert [list(map(_key, each)) for each in plan_room(older, 12, has_all_peers=False)] == [
        [(8, 0, 0)]
    ]


def test_the_newest_step_that_is_on_enough_nodes_makes_no_room() -> None:
    steps = sort_steps(_meta(step, 0, rank) for step in (1, 2, 3) for rank in range(2))
    safe = {each for step in (1, 2) for each in shards_of(steps, step)}

    kept = find_safe(steps, safe)

    assert {each.step for each in kept} == {2}
    assert [{each.step for each in room} for room in plan_room(steps, 4, kept=kept)] == [{1}]
    assert find_safe(steps, set()) == set()


def test_room_is_made_by_the_least_useful_first() -> None:
    metas = [_meta(step, 0, rank) for step in (2, 3, 5) for rank in range(2)]
    metas += [_meta(1, 0, 0), _meta(4, 0, 0), _meta(6, 0, 0), _meta(5, 1, 0)]
    rooms = plan_room(sort_steps(metas), writing=4)

    assert [sorted(map(_key, each)) for each in rooms] == [
        [(1, 0, 0)],
        [(2, 0, 0), (2, 0, 1)],
        [(3, 0, 0), (3, 0, 1)],
        [(6, 0, 0)],
    ]


KEYS = st.tuples(st.integers(0, 6), st.integers(0, 2), st.integers(0, 2))


@given(st.sets(KEYS), st.integers(0, 6), st.integers(1, 3))
def test_newest_complete_step_is_never_dropped(
    keys: set[Key], finished: int, steps_retained: int
) -> None:
    steps = sort_steps(_meta(*key, num_ranks=3) for key in keys)
    complete = complete_steps(steps)
    dropped = {_key(each) for each in plan_drops(steps, finished, steps_retained)}
    for room in plan_room(steps, finished):
        dropped |= {_key(each) for each in room}
    left = sort_steps(_meta(*key, num_ranks=3) for key in keys - dropped)

    assert dropped <= keys
    assert complete_steps(left)[:1] == complete[:1]
    for rank in range(3) if complete else ():
        assert choose_shard(left, complete[0], rank) == choose_shard(steps, complete[0], rank)


@given(st.sets(KEYS), st.integers(0, 6), st.integers(1, 3))
def test_retained_steps_stay_and_no_more(
    keys: set[Key], finished: int, steps_retained: int
) -> None:
    steps = sort_steps(_meta(*key, num_ranks=3) for key in keys)
    dropped = {_key(each) for each in plan_drops(steps, finished, steps_retained)}
    left = sort_steps(_meta(*key, num_ranks=3) for key in keys - dropped)

    assert complete_steps(left) == complete_steps(steps)[:steps_retained]
    assert all(step >= finished or step in complete_steps(left) for step in left)
