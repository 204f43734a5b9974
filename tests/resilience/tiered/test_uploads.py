"""When a step goes to which tier, and that each content goes there once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilience.tiered.catalog import Copy
from resilience.tiered.uploads import (
    Cadence,
    Sending,
    Settings,
    TierSettings,
    Upload,
    View,
    decide_save,
    find_wanted,
    judge,
    plan_uploads,
)
from tests.resilience.tiered.inventories import (
    at,
    clusters,
    copy,
    every,
    everywhere,
    inventories,
    shard_id,
    view,
)

LIVING = {"a": "x", "b": "x", "c": "y", "d": "z"}


def s3(settings: TierSettings, **changes: Any) -> Settings:
    return Settings(lower={"s3": settings}, **changes)


def wanted(node: View) -> list[int]:
    return [step.step for step in find_wanted(node, judge(node), "s3")]


def steps(*numbers: int, places: str = "ac") -> list[Copy]:
    return [each for number in numbers for each in everywhere(places, number)]


def below(*numbers: int) -> list[Copy]:
    return [each for step in numbers for each in everywhere(["the-s3"], step, tier="s3")]


@pytest.mark.parametrize(
    ("cadence", "last_s", "is_due"),
    [
        (Cadence(every_n_steps=5), None, True),
        (Cadence(every_n_steps=5), 99.0, True),
        (Cadence(every_n_steps=3), 0.0, False),
        (Cadence(every_s=30.0), None, True),
        (Cadence(every_s=30.0), 70.0, True),
        (Cadence(every_s=30.0), 71.0, False),
    ],
)
def test_when_step_10_is_saved(cadence: Cadence, last_s: float | None, is_due: bool) -> None:
    assert decide_save(cadence, step=10, now_s=100.0, last_s=last_s) == is_due


def test_every_n_steps_the_newest_first() -> None:
    assert wanted(view(steps(10, 15, 20, 40), LIVING, settings=s3(every(20)))) == [40, 20]


def test_a_tier_that_is_not_asked_for_gets_nothing() -> None:
    node = view(steps(20), LIVING, settings=s3(every(20)))

    assert find_wanted(node, judge(node), "folder") == []
    assert {each.tier for each in plan_uploads(node)} == {"s3"}


@pytest.mark.parametrize(
    ("copies", "sent"),
    [
        pytest.param([copy("a", 20, of=2), copy("c", 20, of=2)], [], id="a-shard-is-missing"),
        pytest.param(
            [copy("a", 20, of=2), copy("c", 20, shard="1", of=2)], [20], id="before-it-is-safe"
        ),
        pytest.param(
            [copy("a", 20, of=2), copy("the-folder", 20, shard="1", of=2, tier="folder")],
            [],
            id="the-rest-is-in-another-tier-only",
        ),
        pytest.param([*steps(20, 40), copy("a", 30, 2, of=2)], [20], id="the-newer-is-stale"),
    ],
)
def test_a_step_is_sent_that_is_whole_in_memory_and_not_stale(
    copies: list[Copy], sent: list[int]
) -> None:
    assert wanted(view(copies, LIVING, settings=s3(every(20)))) == sent


def test_what_has_begun_is_ended_first() -> None:
    copies = everywhere("ac", 20, of=2) + everywhere("ac", 60, of=2)
    half = copy("the-s3", 20, of=2, tier="s3")
    sending = Sending(tier="s3", at=at(20), digest="d", node="c")

    assert wanted(view(copies, LIVING, settings=s3(every(20)))) == [60, 20]
    assert wanted(view([*copies, half], LIVING, settings=s3(every(20)))) == [20, 60]
    node = view(copies, LIVING, settings=s3(every(20)), sendings=(sending,))
    assert wanted(node) == [20, 60]
    alone = view(copies, {"a": "x", "b": "x"}, settings=s3(every(20)), sendings=(sending,))
    assert wanted(alone) == [60, 20]


def test_of_what_has_begun_the_oldest_is_ended_first() -> None:
    copies = [each for step in (20, 40, 60) for each in everywhere("ac", step, of=2)]
    halves = [copy("the-s3", step, of=2, tier="s3") for step in (20, 40)]

    assert wanted(view([*copies, *halves], LIVING, settings=s3(every(20)))) == [20, 40, 60]


def test_what_has_begun_is_ended_though_it_is_not_due() -> None:
    copies = [*everywhere("ac", 15, of=2), copy("the-s3", 15, of=2, tier="s3")]

    assert wanted(view(copies, LIVING, settings=s3(every(20)))) == [15]


def test_only_so_many_wait() -> None:
    copies = [*everywhere("ac", 20, of=2), *steps(40, 60)]
    half = copy("the-s3", 20, of=2, tier="s3")

    assert wanted(view(copies, LIVING, settings=s3(every(20, waiting_max=1)))) == [60]
    assert wanted(view([*copies, half], LIVING, settings=s3(every(20, waiting_max=1)))) == [20]


def test_what_would_not_be_kept_is_not_sent() -> None:
    """Else it would be sent and dropped without an end."""
    copies = [*steps(20, 40, 60), *below(40)]

    assert wanted(view(copies, LIVING, settings=s3(every(20)))) == [60, 20]
    assert wanted(view(copies, LIVING, settings=s3(every(20, keep=2)))) == [60, 20]
    assert wanted(view(copies, LIVING, settings=s3(every(20, keep=1)))) == [60]


def seconds(copies: Collection[Copy], begun_s: float | None, **whole_since_s: float) -> list[int]:
    times = {at(int(name[1:])): time_s for name, time_s in whole_since_s.items()}
    settings = s3(TierSettings(cadence=Cadence(every_s=60.0)))
    begun = {} if begun_s is None else {"s3": begun_s}
    return wanted(view(copies, LIVING, settings=settings, whole_since_s=times, begun_s=begun))


def test_every_so_many_seconds_the_first_step_after_them() -> None:
    """It stays the same while later ones come, so that it is ended."""
    copies = steps(10, 20, 30)

    assert seconds(copies, None, s10=0, s20=50, s30=70) == [10]
    assert seconds(copies, 0.0, s10=0, s20=50, s30=59) == []
    assert seconds(copies, 0.0, s10=0, s20=50, s30=60) == [30]
    assert seconds(copies, 0.0, s10=0, s20=61, s30=70) == [20]
    assert seconds([*copies, *steps(40)], 0.0, s10=0, s20=61, s30=70, s40=500) == [20]
    assert seconds([*copies, *below(20)], None, s10=0, s20=50, s30=70) == [30]
    assert seconds([*copies, *below(30)], None, s10=0, s20=50, s30=70) == []


def test_a_step_is_sent_when_all_nodes_know_who_holds_what() -> None:
    settings = s3(every(20), settle_s=5.0)
    early = view(steps(20), LIVING, settings=settings, whole_since_s={at(20): 996.0})
    late = view(steps(20), LIVING, settings=settings, whole_since_s={at(20): 995.0})
    unknown = view(steps(20), LIVING, settings=settings, whole_since_s={})

    assert wanted(early) == wanted(unknown) == wanted(late) == [20]
    assert plan_uploads(early) == plan_uploads(unknown) == []
    assert [each.at for each in plan_uploads(late)] == [at(20)]


def test_equal_shards_are_sent_once_under_both_names() -> None:
    copies = [copy("a", 20, shard=shard, of=2, digest="same") for shard in "01"]
    (upload,) = plan_uploads(view(copies, LIVING, settings=s3(every(20))))

    assert upload.shard_ids == (shard_id(20, shard="0"), shard_id(20, shard="1"))


def test_a_description_is_written_by_who_has_it_and_after_the_bytes() -> None:
    copies = [copy("a", 20, of=2, digest="same"), copy("c", 20, shard="1", of=2, digest="same")]
    (first,) = plan_uploads(view(copies, LIVING, settings=s3(every(20))))
    (done,) = first.shard_ids
    there = copy("the-s3", 20, shard=done.shard, of=2, digest="same", tier="s3")

    (second,) = plan_uploads(view([*copies, there], LIVING, settings=s3(every(20))))

    assert {first.node, second.node} == {"a", "c"}
    assert second.shard_ids == (shard_id(20, shard="1" if done.shard == "0" else "0"),)


def test_a_step_whose_bytes_an_earlier_step_has_sent_gets_its_description() -> None:
    old = copy("the-s3", 10, digest="same", tier="s3")
    new = copy("a", 20, digest="same")
    (upload,) = plan_uploads(view([old, new], LIVING, settings=s3(every(20))))

    assert (upload.node, upload.shard_ids) == ("a", (shard_id(20),))


def test_who_has_begun_goes_on_and_is_followed_when_it_is_gone() -> None:
    copies = steps(20, places="abcd")
    for node in LIVING:
        sending = Sending(tier="s3", at=at(20), digest="20/1/0/1", node=node)
        rest = {name: domain for name, domain in LIVING.items() if name != node}
        own = next(iter(rest))
        settings = s3(every(20))

        (going,) = plan_uploads(view(copies, LIVING, settings=settings, sendings=(sending,)))
        (taken,) = plan_uploads(view(copies, rest, own, settings=settings, sendings=(sending,)))

        assert going.node == node
        assert taken.node in rest


def test_who_only_says_it_sends_and_holds_nothing_does_not_count() -> None:
    sending = Sending(tier="s3", at=at(20), digest="20/1/0/1", node="d")
    node = view(steps(20), LIVING, settings=s3(every(20)), sendings=(sending,))
    (upload,) = plan_uploads(node)

    assert upload.node in "ac"


def test_a_node_that_leaves_moves_only_what_it_sent() -> None:
    copies = everywhere("abcd", 20, of=40)

    def senders(living: dict[str, str]) -> dict[str, str]:
        plan = plan_uploads(view(copies, living, settings=s3(every(20))))
        return {each.digest: each.node for each in plan}

    before = senders(LIVING)
    after = senders({name: domain for name, domain in LIVING.items() if name != "d"})

    assert min(Counter(before.values()).values()) >= 4
    assert all(after[digest] == node for digest, node in before.items() if node != "d")
    assert set(after) == set(before)


@given(st.data(), clusters())
def test_each_content_is_sent_by_one_node_that_has_it(
    data: st.DataObject, living: dict[str, str]
) -> None:
    copies = data.draw(inventories(living))
    settings = Settings(lower={"s3": every(10), "folder": every(20, keep=1)})
    plans = {own: plan_uploads(view(copies, living, own, settings=settings)) for own in living}
    shuffled = data.draw(st.permutations(copies))
    plan = plan_uploads(view(shuffled, living, "n0", settings=settings))

    assert all(each == plans["n0"] for each in plans.values())
    assert {each.node for each in plan} <= set(living)
    assert [(u.tier, u.digest, u.node) for u in plan] == [
        (u.tier, u.digest, u.node) for u in plans["n0"]
    ]
    stored = {(c.tier, c.digest) for c in copies}
    sent = Counter((u.tier, u.digest) for u in plan if (u.tier, u.digest) not in stored)
    assert set(sent.values()) <= {1}
    for upload in plan:
        held = {c.meta_id for c in copies if (c.place, c.digest) == (upload.node, upload.digest)}
        assert upload.shard_ids
        assert set(upload.shard_ids) <= held
        there = {c.meta_id for c in copies if c.tier == upload.tier}
        assert not there & set(upload.shard_ids)


@given(st.data(), clusters())
def test_rounds_of_sending_bring_everything_there_once(
    data: st.DataObject, living: dict[str, str]
) -> None:
    """Nodes may go between rounds; what the rest still has gets there, each content once."""
    copies = list(data.draw(inventories(living)))
    settings = s3(every(10))
    sent: Counter[str] = Counter(c.digest for c in copies if c.tier == "s3")
    sent = Counter(dict.fromkeys(sent, 1))
    for _ in range(20):
        node = view(copies, living, min(living), settings=settings)
        if not (plan := plan_uploads(node)):
            break
        stored = {c.digest for c in copies if c.tier == "s3"}
        done = [each for each in plan if each.node in living]
        for upload in data.draw(st.lists(st.sampled_from(done), min_size=1, unique=True)):
            sent[upload.digest] += upload.digest not in stored
            copies += [arrived(copies, upload, index) for index in range(len(upload.shard_ids))]
        if len(living) > 1 and data.draw(st.booleans()):
            living = {name: each for name, each in living.items() if name != max(living)}
    else:
        pytest.fail("still sending after 20 rounds")

    assert set(sent.values()) <= {1}
    node = view(copies, living, min(living), settings=settings)
    for state in judge(node).steps:
        in_memory = all(any(c.tier == "ram" for c in held) for held in state.copies.values())
        if state.is_whole and in_memory and not state.is_stale:
            assert "s3" in state.whole_tiers


def arrived(copies: Collection[Copy], upload: Upload, index: int) -> Copy:
    wanted_id = upload.shard_ids[index]
    source = next(c for c in copies if c.meta_id == wanted_id and c.digest == upload.digest)
    return copy(
        "the-s3",
        wanted_id.step,
        wanted_id.generation,
        wanted_id.shard,
        of=source.num_shards,
        tier="s3",
        digest=upload.digest,
        num_bytes=source.num_bytes,
    )
