"""Which steps are complete, which are stale, and where a shard is read from."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilience.tiered.catalog import (
    Copy,
    StepAt,
    StepState,
    choose_source,
    count_domains,
    find_only_copies,
    find_stale,
    judge_steps,
)
from tests.resilience.tiered.inventories import (
    NAMESPACE,
    Living,
    at,
    clusters,
    copy,
    everywhere,
    inventories,
    is_complete,
    shard_id,
)

LIVING = {"a": "x", "b": "x", "c": "y", "d": "z"}


def complete(
    copies: Sequence[Copy],
    living: Living = LIVING,
    domains_min: int = 2,
    *,
    namespace: str = NAMESPACE,
    seen: Sequence[StepAt] = (),
) -> list[StepAt]:
    found = judge_steps(copies, living, namespace=namespace, domains_min=domains_min, seen=seen)
    return [each.at for each in found.complete]


def state(copies: Sequence[Copy], step: StepAt, living: Living = LIVING) -> StepState:
    return judge_steps(copies, living, namespace=NAMESPACE, domains_min=2).states[step]


SAFE, ONE_DOMAIN = "complete: all 2 shards are safe", "shard 1 in 1 of 2 failure domains"
IN_S3 = copy("the-s3", 10, shard="0", of=2, tier="s3")


@pytest.mark.parametrize(
    ("copies", "reason"),
    [
        pytest.param(everywhere("ac", 10, of=2), SAFE, id="two-domains"),
        pytest.param(
            everywhere("ab", 10, of=2),
            "shard 0 in 1, shard 1 in 1 of 2 failure domains",
            id="two-nodes-of-one-domain",
        ),
        pytest.param(everywhere("acd", 10, of=2)[::2], "1 of 2 shards", id="a-shard-is-nowhere"),
        pytest.param(
            [*everywhere("ac", 10, of=2)[:3], copy("b", 10, shard="1", of=2)],
            ONE_DOMAIN,
            id="one-shard-in-one-domain",
        ),
        pytest.param(everywhere(["the-s3"], 10, of=2, tier="s3"), SAFE, id="s3"),
        pytest.param(everywhere(["f"], 10, of=2, tier="folder"), SAFE, id="folder"),
        pytest.param(
            [IN_S3, copy("a", 10, shard="1", of=2)], ONE_DOMAIN, id="half-in-s3-half-in-one-domain"
        ),
        pytest.param(
            [IN_S3] + [copy(place, 10, shard="1", of=2) for place in "ad"],
            SAFE,
            id="half-in-s3-half-in-two-domains",
        ),
        pytest.param(
            [*everywhere("ac", 10, of=2), *everywhere("ac", 10, of=3)[::3]],
            SAFE,
            id="another-number-of-shards-does-not-count",
        ),
        pytest.param(
            [*everywhere("ac", 10, of=2), *everywhere("abcd", 10, of=4)[1::2]],
            SAFE,
            id="nor-does-one-with-more-copies-and-not-all-shards",
        ),
        pytest.param(
            [copy(place, 10, shard=shard, of=2) for place in "ac" for shard in ("0", "1", "2")],
            "3 of 2 shards",
            id="more-shards-than-there-may-be",
        ),
        pytest.param(
            [copy("a", 10, digest="1"), copy("c", 10, digest="2")],
            "shard 0 in 1 of 2 failure domains",
            id="two-contents-are-not-two-copies",
        ),
    ],
)
def test_when_a_step_is_complete(copies: Sequence[Copy], reason: str) -> None:
    for order in (copies, list(reversed(copies))):
        assert complete(order) == ([at(10)] if "complete" in reason else [])
        assert state(order, at(10)).reason == reason


def test_an_unfinished_newer_history_already_makes_the_older_one_stale() -> None:
    copies = [each for step in (10, 20, 30) for each in everywhere("ac", step, 1)]

    assert complete([*copies, copy("a", 20, 2)]) == [at(10, 1)]
    assert state([*copies, copy("a", 20, 2)], at(30)).reason.startswith("stale, as a newer")


def test_a_history_that_was_seen_counts_though_nothing_is_left_of_it() -> None:
    copies = everywhere("ac", 20, 1)
    seen = [at(20, 2)]

    assert complete(copies) == [at(20, 1)]
    assert complete(copies, seen=seen) == []


@given(st.sets(st.builds(StepAt, step=st.integers(0, 6), generation=st.integers(-1, 4))))
def test_stale_is_what_a_newer_generation_has_gone_over(steps: set[StepAt]) -> None:
    expected = {
        one
        for one in steps
        for other in steps
        if other.generation > one.generation and other.step <= one.step
    }

    assert find_stale(steps) == expected


@pytest.mark.parametrize(("living", "keepers", "num"), [
    pytest.param({"a": "m0", "b": "m1"}, 0, 2, id="a-machine-each"),
    pytest.param({"a": "m0", "b": "m0"}, 0, 1, id="one-machine"),
    pytest.param({"a": "m0", "b": "m1"}, 1, 1, id="peers-hold-instead"),
    pytest.param({"a": "m0"}, 1, 1, id="no-peer-to-hold"),
])  # fmt: skip
def test_domains_that_there_are(living: dict[str, str], keepers: int, num: int) -> None:
    assert count_domains(living, keepers=keepers) == num


def test_where_nobody_lives_memory_completes_nothing() -> None:
    assert complete(everywhere("ab", 10), {}) == []
    assert state(everywhere(["s"], 10, tier="s3"), at(10), {}).whole_tiers == {"s3"}


def test_another_namespace_counts_for_nothing() -> None:
    assert complete(everywhere("ac", 10), namespace="other") == []


@pytest.mark.parametrize("num", range(1, 5))
def test_all_small_worlds(num: int) -> None:
    """Two shards, four nodes in three domains, every way to spread `num` copies."""
    spots = [*itertools.product("01", "abcd"), ("0", "the-s3"), ("1", "the-s3")]
    for chosen in itertools.combinations(spots, num):
        copies = [
            copy(place, 10, shard=shard, of=2, tier="s3" if place == "the-s3" else "ram")
            for shard, place in chosen
        ]

        assert (complete(copies) == [at(10)]) == is_complete(copies, LIVING, at(10), 2)


@given(st.data(), clusters(), st.integers(1, 4))
def test_complete_is_what_the_words_say(data: st.DataObject, living: Living, domains: int) -> None:
    copies = data.draw(inventories(living))
    shuffled = data.draw(st.permutations(copies))

    catalog = judge_steps(shuffled, living, namespace=NAMESPACE, domains_min=domains)

    assert catalog == judge_steps(copies, living, namespace=NAMESPACE, domains_min=domains)
    known = {
        at(c.meta_id.step, c.meta_id.generation)
        for c in copies
        if c.tier != "ram" or c.place in living
    }
    assert [each.at for each in catalog.steps] == sorted(known, reverse=True)
    for each in catalog.steps:
        assert each.is_complete == is_complete(copies, living, each.at, domains)
        in_ram = is_complete(copies, living, each.at, domains, ram_only=True)
        assert ("ram" in each.whole_tiers) == in_ram
        assert each.is_stale == (each.at in find_stale(known))
        assert each.is_whole or not each.is_complete
    offered = [each.at for each in catalog.steps if each.is_complete and not each.is_stale]
    assert complete(copies, living, domains) == offered


def test_own_memory_counts_before_the_others_know_this_node() -> None:
    sources = choose_source(everywhere("ac", 10), shard_id(10), {"c": "y"}, own="a")

    assert [each.place for each in sources] == ["a", "c"]


def test_a_copy_with_other_content_is_no_source() -> None:
    """Of two contents all nodes take the same, so that replicas stay equal."""
    copies = [copy("a", 10, digest="1"), copy("b", 10, digest="2"), copy("c", 10, digest="2")]

    choices = [choose_source(copies, shard_id(10), LIVING, own=own) for own in LIVING]

    assert {each.digest for choice in choices for each in choice} == {"2"}


def test_content_that_a_lower_tier_has_outweighs_the_most_nodes() -> None:
    copies = [copy("s", 10, digest="2", tier="s3"), *everywhere("abcd", 10)]

    sources = choose_source(copies, shard_id(10), LIVING, own="a")

    assert [each.place for each in sources] == ["s"]


def test_shards_of_another_number_of_shards_are_no_source() -> None:
    copies = [*everywhere("ac", 10, of=2), copy("a", 10, 1, "0", of=4, digest="of-4")]

    sources = choose_source(copies, shard_id(10), LIVING, own="a")

    assert {each.num_shards for each in sources} == {2}


def test_not_all_nodes_ask_the_same_peer() -> None:
    living = {f"n{number}": f"d{number}" for number in range(16)}
    copies = everywhere(["n0", "n1", "n2", "n3"], 10)
    asked = Counter(
        choose_source(copies, shard_id(10), living, own=own)[0].place for own in list(living)[4:]
    )

    assert len(asked) == 4
    assert max(asked.values()) <= 6


@given(st.data(), clusters())
def test_sources_are_all_that_is_there_near_ones_first(data: st.DataObject, living: Living) -> None:
    copies = data.draw(inventories(living))
    wanted = data.draw(st.sampled_from(copies)).meta_id if copies else shard_id(0)
    own = data.draw(st.sampled_from(sorted(living)))

    def rank(each: Copy) -> int:
        if each.tier != "ram":
            return 3 if each.tier == "s3" else 4
        return 0 if each.place == own else 1 if living[each.place] == living[own] else 2

    sources = choose_source(copies, wanted, living, own=own)

    there = {c for c in copies if c.meta_id == wanted and (c.tier != "ram" or c.place in living)}
    assert set(sources) == there
    assert len(sources) == len(there)
    assert [rank(each) for each in sources] == sorted(map(rank, sources))
    assert choose_source(reversed(copies), wanted, living, own=own) == sources


def test_what_only_one_node_holds_of_the_newest_whole_step_is_named() -> None:
    older, newest = everywhere("abcd", 1, of=2), [copy("a", 2, of=2), copy("b", 2, shard="1", of=2)]

    def only(place: str, *more: Copy) -> tuple[StepAt, str] | None:
        found = judge_steps([*older, *newest, *more], LIVING, namespace=NAMESPACE, domains_min=2)
        return find_only_copies(found, place)

    assert only("a") == (at(2), "shard 0")
    assert only("c") is None
    assert only("a", copy("c", 2, of=2)) is None
    assert only("a", copy("store", 2, of=2, tier="folder")) is None
    # One that is not whole is nobody's checkpoint.
    assert only("a", copy("a", 3, of=2)) == (at(2), "shard 0")
