"""What is sent to whom, and what comes first."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import pytest

from resilience.tiered.catalog import Copy
from resilience.tiered.errors import RefusedError
from resilience.tiered.memoryd import peer_directory
from resilience.tiered.memoryd.peer_directory import Directory
from resilience.tiered.memoryd.peer_plan import (
    Held,
    PeerView,
    choose_next,
    choose_targets,
    plan_pushes,
    step_key,
)
from resilience.tiered.placement import Node
from resilience.tiered.shard import ShardId
from tests.resilience.tiered.conftest import Clock
from tests.resilience.tiered.daemons import make_id

ONE = make_id(1)


def node(name: str) -> Node:
    return Node(name=name, domain=name)


def view(
    name: str,
    held: Mapping[ShardId, str] | None = None,
    *,
    dropped: Collection[ShardId] = (),
    is_living: bool = True,
    is_awaited: bool = True,
) -> PeerView:
    return PeerView(
        node=node(name),
        is_living=is_living,
        is_awaited=is_awaited,
        digests=held or {},
        dropped=dropped,
    )


def plan(*peers: PeerView, origin: str = "a", own: str = "a", replicas: int = 1) -> bool:
    """Say whether the shard that this node holds is sent to the first of the peers."""
    held = [Held(id=ONE, digest="d", origin=origin)]
    target = peers[0].node.name
    return bool(plan_pushes(own, held, peers, target=target, replicas=replicas))


def copy(shard_id: ShardId, place: str = "b") -> Copy:
    return Copy(meta_id=shard_id, num_shards=1, digest="d", num_bytes=8, place=place, tier="ram")


def test_what_a_node_wrote_is_sent_until_there_are_enough() -> None:
    assert plan(view("b"))
    assert not plan(view("b", {ONE: "d"}))
    assert not plan(view("b"), view("c", {ONE: "d"}))
    assert plan(view("b"), view("c", {ONE: "d"}), replicas=2)
    assert not plan(view("b"), replicas=0)


def test_what_is_something_else_there_counts_for_nothing_and_stays() -> None:
    assert not plan(view("b", {ONE: "other"}))
    assert plan(view("b"), view("c", {ONE: "other"}))


def test_nothing_is_sent_to_who_is_not_there_or_has_dropped_it() -> None:
    assert not plan(view("b", is_living=False))
    assert not plan(view("b", is_living=False, is_awaited=False))
    assert not plan(view("b", dropped={ONE}))


def test_who_is_gone_holds_nothing() -> None:
    assert plan(view("b"), view("c", {ONE: "d"}, is_living=False, is_awaited=False))


def test_a_copy_is_its_writers_to_send() -> None:
    assert not plan(view("b"), view("w", {ONE: "d"}), origin="w", replicas=2)
    assert not plan(view("b"), view("w", is_living=False), origin="w")
    assert not plan(view("b"), view("w", dropped={ONE}), origin="w")


def test_the_copy_of_a_lost_writer_is_the_first_holders_to_send() -> None:
    gone = view("w", is_living=False, is_awaited=False)
    assert plan(view("c"), gone, own="b", origin="w")
    assert plan(view("d"), view("c", {ONE: "d"}), gone, own="b", origin="w", replicas=2)
    assert not plan(view("d"), view("a", {ONE: "d"}), gone, own="b", origin="w", replicas=2)
    assert plan(view("w"), own="b", origin="w"), "it has lost its memory"


def test_placement_chooses_among_who_is_there() -> None:
    others = [node(name) for name in "bcd"]
    chosen = choose_targets(node("a"), others, replicas=1)
    assert len(chosen) == 1
    rest = [each for each in others if each.name not in chosen]
    assert not chosen & choose_targets(node("a"), rest, replicas=1)
    assert choose_targets(node("a"), rest, replicas=2) == {each.name for each in rest}


def test_a_step_that_is_begun_is_finished_before_a_newer_one() -> None:
    ids = [make_id(step, shard) for step in (1, 2) for shard in "01"]
    held = [Held(id=each, digest="d", origin="a") for each in ids]

    assert choose_next(held, step_key(ids[0]), {}) == held[0]
    assert choose_next(held, None, {}) == held[2]
    assert choose_next(held[:1], step_key(ids[3]), {}) == held[0]
    assert choose_next([], None, {}) is None


def test_no_namespace_waits_for_another() -> None:
    held = [
        Held(id=make_id(step, name=name), digest="d", origin="a")
        for name, step in [("slow", 3), ("quick", 900)]
    ]

    assert choose_next(held, None, {"quick": 1}) == held[0]
    assert choose_next(held, None, {"quick": 1, "slow": 2}) == held[1]


@pytest.fixture
def changes() -> list[int]:
    return []


@pytest.fixture
def directory(clock: Clock, changes: list[int]) -> Directory:
    peers = [Node(name="b", domain="", address="b:1"), node("c")]
    return Directory(peers, gone_s=10, on_change=lambda: changes.append(1), clock=clock)


def enter(directory: Directory, *ids: ShardId, boot: str = "1") -> object:
    session = object()
    directory.enter(Node(name="b", domain="rack", switch="s"), boot, session)
    directory.take("b", session, [copy(each) for each in ids], is_first=True, is_last=True)
    return session


def test_a_silent_nodes_copies_count_no_more(
    directory: Directory, clock: Clock, changes: list[int]
) -> None:
    enter(directory, ONE)
    assert directory.living() == {"b": "rack"}
    assert directory.copies({}) == [copy(ONE)]
    num_changes = len(changes)

    clock.now_s += 9.9
    directory.look()
    assert len(changes) == num_changes
    clock.now_s += 0.2
    directory.look()
    assert len(changes) == num_changes + 1
    assert (directory.living(), directory.copies({})) == ({}, [])
    directory.hear("b")
    assert directory.copies({}) == [copy(ONE)]


def test_who_waits_for_this_node_is_not_silent(directory: Directory, clock: Clock) -> None:
    enter(directory)
    with directory.busy("b"):
        clock.now_s += 60
        assert directory.living() == {"b": "rack"}
    assert directory.living() == {"b": "rack"}


def test_who_never_came_is_awaited_for_a_while(directory: Directory, clock: Clock) -> None:
    assert {each.name for each in directory.nodes()} == {"b", "c"}
    clock.now_s += 10
    assert directory.nodes() == []
    assert directory.living() == {}


def test_an_inventory_counts_when_it_is_whole(directory: Directory) -> None:
    session = object()
    directory.enter(Node(name="b", domain="rack"), "1", session)
    directory.take("b", session, [copy(ONE)], is_first=True, is_last=False)
    assert directory.living() == {}
    directory.take("b", session, [copy(make_id(2))], is_first=False, is_last=True)
    assert directory.copies({}) == [copy(ONE), copy(make_id(2))]


def test_what_is_dropped_is_told_from_what_is_lost(directory: Directory) -> None:
    session = enter(directory, ONE, make_id(2))
    directory.change("b", session, [], [ONE])
    assert directory.views({})[0].dropped == {ONE}
    enter(directory)
    assert directory.views({})[0].dropped == {ONE, make_id(2)}
    directory.forget_dropped([ONE])
    assert directory.views({})[0].dropped == {ONE}
    enter(directory, boot="2")
    assert directory.views({})[0].dropped == set()


def test_only_the_newest_connection_counts(directory: Directory) -> None:
    old = enter(directory, ONE)
    enter(directory, ONE)
    with pytest.raises(RefusedError, match="newer connection"):
        directory.change("b", old, [], [ONE])
    directory.leave("b", old, is_end=True)
    assert directory.copies({}) == [copy(ONE)]


def test_who_says_goodbye_is_gone_at_once_and_awaited(directory: Directory, clock: Clock) -> None:
    session = enter(directory, ONE)
    directory.leave("b", session, is_end=True)
    assert directory.copies({}) == []
    assert "b" in {each.name for each in directory.nodes()}
    clock.now_s += 10
    assert directory.nodes() == []
    enter(directory, ONE)
    assert directory.copies({}) == [copy(ONE)]


def test_another_jobs_copies_are_not_seen(directory: Directory) -> None:
    enter(directory, ONE)
    directory.note_jobs("b", {"run": "other"})
    assert directory.copies({}) == [copy(ONE)]
    assert directory.copies({"run": "other"}) == [copy(ONE)]
    assert directory.copies({"run": "job"}) == []


def test_an_inventory_has_an_end(directory: Directory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_directory, "COPIES_MAX", 9)
    session = enter(directory)
    many = [copy(make_id(step)) for step in range(10)]
    with pytest.raises(ValueError, match="more than"):
        directory.take("b", session, many, is_first=True, is_last=True)


def test_what_a_node_said_after_it_got_a_copy_counts_more_than_having_sent_it(
    directory: Directory,
) -> None:
    session = enter(directory)
    version = directory.version_of("b")
    directory.change("b", session, [copy(ONE)], [])
    directory.change("b", session, [], [ONE])
    directory.note_copy("b", copy(ONE), version)

    assert directory.copies({}) == []
    assert directory.views({})[0].dropped == {ONE}


def test_what_a_node_has_dropped_before_it_told_of_it_is_not_sent_again(
    directory: Directory,
) -> None:
    directory.change("b", enter(directory), [], [ONE])
    assert directory.views({})[0].dropped == {ONE}

    directory.lose("b", [ONE])
    assert directory.views({})[0].dropped == frozenset()
