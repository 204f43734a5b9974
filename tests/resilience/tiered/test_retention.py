"""What goes from memory and from the lower tiers, and what never does."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilience.tiered.catalog import Copy, StepAt, StepState, step_of
from resilience.tiered.retention import plan_drops, plan_room, plan_tier_drops
from resilience.tiered.uploads import Sending, Settings, View, find_wanted, judge
from tests.resilience.tiered.inventories import (
    at,
    clusters,
    copy,
    every,
    everywhere,
    inventories,
    shard_id,
    view,
    without,
)

LIVING = {"a": "x", "b": "x", "c": "y", "d": "z"}
RAM = Settings(keep=2)
RAM_S3 = Settings(keep=1, lower={"s3": every(20)})


def dropped(view: View) -> list[StepAt]:
    return [StepAt(step=each.step, generation=each.generation) for each in plan_drops(view).drops]


def why(view: View, step: int) -> str:
    """Return what is said of a step that stays for want of room."""
    listed = plan_room([view], needed_bytes=1000, free_bytes=0).reason
    return listed.partition(f"{at(step)} of run: ")[2].partition(";")[0]


def steps(*numbers: int, places: str = "ac") -> list[Copy]:
    return [each for number in numbers for each in everywhere(places, number)]


def test_another_namespace_is_left_alone() -> None:
    other = view(steps(10, 20, 30), LIVING, settings=RAM)
    moved = View(namespace="other", **{n: getattr(other, n) for n in OTHER_FIELDS})

    assert plan_drops(moved).drops == ()


OTHER_FIELDS = ("own", "settings", "copies", "living", "now_s")


@pytest.mark.parametrize("now_s", [599.0, 600.0])
def test_an_unfinished_newest_step_stays_until_there_is_no_room(now_s: float) -> None:
    """The nodes that have the rest may be cut off from a daemon that has just begun."""
    node = view([*steps(10), copy("a", 20, of=2)], LIVING, settings=RAM, now_s=now_s)

    assert plan_drops(node).drops == ()
    room = plan_room([node], needed_bytes=10, free_bytes=0)
    assert room.drops == ((shard_id(20),) if now_s >= 600 else ())
    assert (f"{at(20)} of run: unfinished, for 599 of 600 s" in room.reason) == (now_s < 600)


def test_an_unfinished_step_that_nobody_has_timed_was_seen_just_now() -> None:
    copies = [*steps(10), copy("a", 20, of=2)]

    assert dropped(view(copies, LIVING, settings=RAM, since_s={})) == []


def test_a_newest_step_with_all_shards_stays_though_it_never_became_safe() -> None:
    node = view([*steps(10), copy("a", 20)], LIVING, settings=RAM)

    assert plan_drops(node).drops == ()
    assert why(node, 20) == "the newest of which all shards are there"


def test_stale_steps_go_at_once() -> None:
    copies = [*steps(10, 30), copy("a", 40), copy("a", 20, 2, of=2)]
    plan = plan_drops(view(copies, LIVING, settings=RAM, now_s=1.0))

    assert plan.drops == (shard_id(30), shard_id(40))


def test_the_last_complete_step_stays_though_it_is_stale() -> None:
    copies = [*steps(20, 30), copy("a", 10, 2, of=2)]
    node = view(copies, LIVING, settings=RAM)

    assert why(node, 30) == "the newest complete step"
    assert plan_drops(node).drops == (shard_id(20),)


def test_what_is_complete_in_memory_stays_where_only_s3_completes_the_newest() -> None:
    copies = [*steps(10), copy("a", 20, of=2)]
    copies += everywhere(["the-s3"], 20, of=2, tier="s3")
    node = view(copies, LIVING, settings=Settings(keep=1))

    assert plan_drops(node).drops == ()
    assert why(node, 10) == "the newest complete in memory"
    assert why(node, 20) == "the newest complete step"


def test_what_s3_has_to_get_stays_until_it_has_it() -> None:
    copies = steps(10, 20, 30, 50)
    waits = view(copies, LIVING, settings=RAM_S3)
    has = [*copies, *everywhere(["the-s3"], 20, tier="s3")]

    assert why(waits, 20) == "s3 has to get it"
    assert plan_drops(waits).drops == (shard_id(10), shard_id(30))
    assert dropped(view(has, LIVING, settings=RAM_S3)) == [at(10), at(20), at(30)]


def test_what_this_node_is_sending_stays() -> None:
    sending = Sending(tier="s3", at=at(10), digest="d", node="a")
    node = view(steps(10, 20), LIVING, settings=Settings(), sendings=(sending,))

    assert plan_drops(node).drops == ()
    assert why(node, 10) == "on its way to s3"
    other = Sending(tier="s3", at=at(10), digest="d", node="c")
    assert dropped(view(steps(10, 20), LIVING, settings=Settings(), sendings=(other,))) == [at(10)]


def test_a_node_has_to_be_among_the_living() -> None:
    with pytest.raises(ValueError, match="node e is not among the living"):
        view([], LIVING, "e", settings=RAM)


def newest(found: list[StepState], tier: str = "") -> StepAt | None:
    return next((each.at for each in found if not tier or tier in each.whole_tiers), None)


def check_nothing_is_lost(before: View, copies: tuple[Copy, ...]) -> None:
    """The newest complete steps are as they were, and S3 can still get what it has to."""
    first = judge(before)
    after = judge(view(copies, before.living, before.own, settings=before.settings))
    old = [each for each in first.steps if each.is_complete and not each.is_stale]
    old = old or [each for each in first.steps if each.is_complete]
    for tier in ("", "ram"):
        kept = newest(old, tier)
        assert kept is None or after.states[kept].is_complete
        assert kept is None or not tier or tier in after.states[kept].whole_tiers
    for lower in before.settings.lower:
        for step in find_wanted(before, first, lower):
            held = {c for c in before.copies if step_of(c) == step and c.place in before.living}
            assert held <= set(copies)


SETTINGS = st.builds(
    Settings,
    keep=st.integers(1, 3),
    domains_min=st.integers(1, 3),
    incomplete_s=st.sampled_from([10.0, 5000.0]),
    lower=st.sampled_from([{}, {"s3": every(20)}, {"s3": every(20, keep=1), "folder": every(30)}]),
)


@given(st.data(), clusters(), SETTINGS)
def test_all_nodes_drop_and_nothing_is_lost(
    data: st.DataObject, living: dict[str, str], settings: Settings
) -> None:
    copies = left = data.draw(inventories(living))
    views = [view(copies, living, own, settings=settings) for own in living]
    for each in views:
        plan = plan_drops(each)
        gone = set(dropped(each))
        held = {c.meta_id for c in copies if c.place == each.own and step_of(c) in gone}
        assert set(plan.drops) == held, "a step goes as a whole"
        left = without(left, each.own, plan.drops)

    check_nothing_is_lost(views[0], left)


@given(st.data(), clusters(), SETTINGS, st.integers(0, 30), st.integers(1, 120))
def test_all_nodes_make_room_and_nothing_is_lost(
    data: st.DataObject, living: dict[str, str], settings: Settings, free: int, needed: int
) -> None:
    copies = left = data.draw(inventories(living))
    for own in living:
        before = view(copies, living, own, settings=settings)
        plan = plan_room([before], needed_bytes=needed, free_bytes=free)
        if plan.is_enough:
            assert free + freed(copies, own, plan.drops) >= needed
            for step in {each.step for each in plan.drops}:
                fewer = [each for each in plan.drops if each.step != step]
                assert free + freed(copies, own, fewer) < needed
        else:
            assert plan.drops == ()
            assert free + freed(copies, own, plan_drops(before).drops) < needed
        left = without(left, own, plan.drops)

        check_nothing_is_lost(before, left)


def freed(copies: tuple[Copy, ...], own: str, gone: Any) -> int:
    """Bytes of the contents that this node has before and not after."""
    before = {c.digest: c.num_bytes for c in copies if c.place == own}
    after = {c.digest for c in without(copies, own, gone) if c.place == own}
    return sum(size for digest, size in before.items() if digest not in after)


def test_room_that_is_there_costs_nothing() -> None:
    plan = plan_room([view(steps(10, 20), LIVING, settings=RAM)], needed_bytes=5, free_bytes=5)

    assert (plan.is_enough, plan.drops, plan.reason) == (True, (), "")


def test_for_want_of_room_the_keep_count_gives_way_oldest_first() -> None:
    node = view(steps(10, 20, 30, 40), LIVING, settings=Settings(keep=4))

    one = plan_room([node], needed_bytes=15, free_bytes=5)
    two = plan_room([node], needed_bytes=25, free_bytes=5)

    assert one.drops == (shard_id(10),)
    assert two.drops == (shard_id(10), shard_id(20))


def test_for_want_of_room_an_unfinished_step_gives_way_to_a_newer_whole_one() -> None:
    """Else nodes that save faster than they copy fill up, and none takes another's copies."""
    copies = [*steps(10), copy("a", 20), copy("a", 30), copy("a", 40, of=2)]
    node = view(copies, LIVING, settings=RAM, now_s=5.0)

    plan = plan_room([node], needed_bytes=10, free_bytes=0)

    assert plan.drops == (shard_id(20),)
    assert not plan_room([node], needed_bytes=20, free_bytes=0).is_enough


def test_nothing_may_go() -> None:
    copies = [*steps(20, 30), copy("a", 40, of=2)]
    plan = plan_room(
        [view(copies, LIVING, settings=RAM_S3, now_s=5.0)], needed_bytes=15, free_bytes=9
    )

    assert (plan.is_enough, plan.drops) == (False, ())
    assert plan.reason == (
        "15 bytes needed, 9 free, nothing may go: "
        "step 20 of generation 1 of run: s3 has to get it; "
        "step 30 of generation 1 of run: the newest complete step; "
        "step 40 of generation 1 of run: unfinished, for 5 of 600 s"
    )


def test_where_it_would_not_be_enough_nothing_goes() -> None:
    node = view(steps(10, 20), LIVING, settings=RAM)
    plan = plan_room([node], needed_bytes=100, free_bytes=5)

    assert (plan.is_enough, plan.drops) == (False, ())
    assert plan.reason.startswith("100 bytes needed, 5 free, only 10 bytes may go: step 20")


def test_what_an_older_generation_left_unfinished_goes_before_complete_steps() -> None:
    copies = [*steps(10, 20), copy("a", 30, of=2), copy("a", 40, 2, of=2)]
    node = view(copies, LIVING, settings=RAM, now_s=1.0)

    assert plan_room([node], needed_bytes=10, free_bytes=0).drops == (shard_id(30),)
    assert plan_room([node], needed_bytes=20, free_bytes=0).drops == (shard_id(10), shard_id(30))
    assert not plan_room([node], needed_bytes=21, free_bytes=0).is_enough


@pytest.mark.parametrize("is_over", [True, False])
def test_a_job_that_is_over_makes_room_last_of_all_and_as_a_whole(is_over: bool) -> None:
    node = view([*steps(10, 20), copy("a", 30, of=2)], LIVING, settings=RAM, is_over=is_over)

    assert plan_drops(node).drops == ()
    assert plan_room([node], needed_bytes=20, free_bytes=0).drops == (shard_id(10), shard_id(30))
    plan = plan_room([node], needed_bytes=21, free_bytes=0)
    assert plan.is_enough == is_over
    assert {each.step for each in plan.drops} == ({10, 20, 30} if is_over else set())


def test_what_s3_has_to_get_of_a_job_that_is_over_makes_no_room() -> None:
    node = view(steps(20), LIVING, settings=RAM_S3, is_over=True)

    assert not plan_room([node], needed_bytes=10, free_bytes=0).is_enough
    done = view([*steps(20), *tier_steps(20)], LIVING, settings=RAM_S3, is_over=True)
    assert plan_room([done], needed_bytes=10, free_bytes=0).drops == (shard_id(20),)


def tier_steps(*numbers: int, generation: int = 1) -> list[Copy]:
    return [
        each for step in numbers for each in everywhere(["the-s3"], step, generation, tier="s3")
    ]


def tier_drops(*copies: Copy, keep: int | None = None, **changes: Any) -> list[int]:
    """Return the steps that go from S3."""
    node = view(copies, LIVING, settings=Settings(lower={"s3": every(10, keep=keep)}), **changes)
    return [each.step for each in plan_tier_drops(node, "s3").steps]


def test_steps_beyond_the_keep_count_go_from_a_tier() -> None:
    settings = Settings(lower={"s3": every(10, keep=2)})
    plan = plan_tier_drops(view(tier_steps(10, 20, 30, 40), LIVING, settings=settings), "s3")

    assert plan.steps == (at(10), at(20))
    assert plan.spare == {"30/1/0/1", "40/1/0/1"}
    assert plan.node == "a"


def test_a_tier_without_keep_count_keeps_all() -> None:
    assert tier_drops(*tier_steps(10, 20, 30)) == []
    assert plan_tier_drops(view(tier_steps(10, 20), LIVING, settings=Settings()), "s3").steps == ()


def test_bytes_that_memory_may_be_about_to_name_stay_in_a_tier() -> None:
    settings = Settings(lower={"s3": every(10, keep=1)})
    copies = [*tier_steps(10, 20), copy("gone", 30, digest="10/1/0/1")]
    sending = Sending(tier="s3", at=at(20), digest="on-its-way", node="a")
    plan = plan_tier_drops(view(copies, LIVING, settings=settings, sendings=(sending,)), "s3")

    assert plan.steps == (at(10),)
    assert plan.spare == {"10/1/0/1", "20/1/0/1", "on-its-way"}


def test_unfinished_steps_of_a_tier_go_when_a_newer_one_is_there() -> None:
    half = copy("the-s3", 10, of=2, tier="s3")
    sending = Sending(tier="s3", at=at(10), digest="d", node="a")

    assert tier_drops(half, *tier_steps(20)) == [10]
    assert tier_drops(half) == []
    assert tier_drops(half, *tier_steps(5)) == []
    assert tier_drops(half, *tier_steps(20), sendings=(sending,)) == []
    assert tier_drops(half, *tier_steps(20), *everywhere("a", 10, of=2)) == []


def test_what_was_found_damaged_goes_from_a_tier_as_what_is_intact_does() -> None:
    def drops(damaged: list[Copy], *copies: Copy) -> list[int]:
        return tier_drops(*copies, keep=2, damaged=tuple(damaged))

    bad = tier_steps(30)
    assert drops(bad) == []
    assert drops(bad, *tier_steps(10, 20)) == [], "it may be sent again"
    assert drops(bad, *tier_steps(20, 40)) == [30]
    assert drops(bad, *tier_steps(10, 20), *tier_steps(21, generation=2)) == [10, 30]
    one, other = everywhere(["the-s3"], 20, of=2, tier="s3")
    assert drops([other], one, *tier_steps(40)) == [20]


def test_a_stale_history_goes_from_a_tier_once_the_newer_one_is_there() -> None:
    old = tier_steps(10, 20, 30)

    assert tier_drops(*old, copy("a", 5, 2, of=2)) == []
    assert tier_drops(*old, *tier_steps(5, generation=2)) == [10, 20, 30]
    assert tier_drops(*old, copy("a", 20, 2, of=2)) == [20, 30]


@given(st.data(), clusters(), SETTINGS)
def test_a_tier_never_loses_its_newest_step_nor_bytes_that_are_named(
    data: st.DataObject, living: dict[str, str], settings: Settings
) -> None:
    copies = data.draw(inventories(living))
    node = view(copies, living, "n0", settings=settings)

    plan = plan_tier_drops(node, "s3")

    left = [c for c in copies if c.tier != "s3" or step_of(c) not in plan.steps]
    assert all(c.digest in plan.spare for c in left if c.tier in ("s3", "ram"))
    first, after = judge(node), judge(view(left, living, "n0", settings=settings))
    for kept in (
        newest([each for each in first.steps if not each.is_stale], "s3"),
        newest(list(first.steps), "s3") if not first.complete else None,
    ):
        assert kept is None or "s3" in after.states[kept].whole_tiers
    again = plan_tier_drops(view(left, living, "n0", settings=settings), "s3")
    assert again.steps == ()


@pytest.mark.parametrize("num_complete", range(5))
def test_all_small_histories_keep_exactly_what_they_should(num_complete: int) -> None:
    """Five steps, each complete or half, every choice: the newest two and a newest half stay."""
    numbers = (10, 20, 30, 40, 50)
    for complete in itertools.combinations(numbers, num_complete):
        copies = [copy("a", step, of=2) for step in numbers if step not in complete]
        copies += [each for step in complete for each in everywhere("ac", step, of=2)]

        gone = {each.step for each in dropped(view(copies, LIVING, settings=RAM, now_s=1.0))}

        last = max(complete, default=0)
        halves = {step for step in numbers if step not in complete and step > last}
        assert set(numbers) - gone == set(complete[-2:]) | halves
