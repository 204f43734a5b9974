"""Peers hold each other's shards instead of their own: what is decided, in any order of events."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from resilience.tiered.catalog import Copy, judge_steps
from resilience.tiered.memoryd.peer_plan import Held, PeerView, choose_targets, plan_pushes
from resilience.tiered.placement import Node, choose_peers, exchange_groups
from resilience.tiered.retention import Save, find_save, plan_drops, plan_room
from resilience.tiered.uploads import Settings, plan_uploads
from tests.resilience.tiered.inventories import NAMESPACE, at, copy, every, shard_id, view
from tests.resilience.tiered.memoryd.nodes_in_play import Play

ONE = Settings(domains_min=1, keepers=1)
TWO = Settings(domains_min=2, keepers=2)
LIVING = {"a": "a", "b": "b", "c": "c"}


def nodes(*domains: str) -> list[Node]:
    return [Node(name=f"n{number:02}", domain=each) for number, each in enumerate(domains)]


def keepers(all_nodes: list[Node], replicas: int) -> dict[str, list[Node]]:
    return {
        each.name: choose_peers(all_nodes, each.name, replicas, holds_instead=True)
        for each in all_nodes
    }


def next_in_group(all_nodes: list[Node]) -> dict[str, str]:
    return {
        name: group[(place + 1) % len(group)]
        for group in exchange_groups(all_nodes)
        for place, name in enumerate(group)
    }


def passing(place: str, step: int, shard: str = "0", *, of: int = 1) -> Copy:
    return replace(copy(place, step, shard=shard, of=of), is_passing=True)


def passed(*copies: Copy, own: str = "a", settings: Settings = ONE) -> bool:
    """Say whether a node lets go of what was written to it, and of nothing else."""
    plan = plan_drops(view(copies, LIVING, own, settings=settings, now_s=1.0))
    assert not plan.drops
    return bool(plan.passed)


def test_two_nodes_are_a_pair_four_are_two_and_three_a_ring() -> None:
    for number in (2, 3, 4):
        all_nodes = nodes(*map(str, range(number)))
        first = {name: chosen[0].name for name, chosen in keepers(all_nodes, 1).items()}
        assert first == next_in_group(all_nodes)
        assert (number % 2 == 0) == all(first[other] == name for name, other in first.items())


@given(st.integers(1, 9), st.integers(0, 4), st.integers(1, 9))
def test_everybody_keeps_as_much_as_it_gives_and_nothing_of_its_own(
    num_nodes: int, replicas: int, num_domains: int
) -> None:
    all_nodes = nodes(*(str(number % num_domains) for number in range(num_nodes)))
    chosen = keepers(all_nodes, replicas)

    wanted = min(replicas, num_nodes - 1)
    for name, kept in chosen.items():
        assert name not in {each.name for each in kept}
        assert len({each.name for each in kept}) == len(kept) == wanted
        assert sum(name in {e.name for e in other} for other in chosen.values()) == wanted


def test_two_keepers_are_in_two_failure_domains() -> None:
    for domains in ("xxyy", "xyz", "xxyyzz", "xxxyyy"):
        for kept in keepers(nodes(*domains), 2).values():
            assert len({each.domain for each in kept}) == 2


def test_a_node_that_is_alone_keeps_its_own() -> None:
    assert keepers(nodes("x"), 1) == {"n00": []}
    alone = judge_steps(
        [passing("a", 1)], {"a": "a"}, namespace=NAMESPACE, domains_min=1, keepers=1
    )
    assert alone.states[at(1)].is_complete


def test_what_its_writer_is_to_let_go_of_is_not_safe() -> None:
    def is_complete(*copies: Copy, settings: Settings = ONE) -> bool:
        catalog = judge_steps(
            copies,
            LIVING,
            namespace=NAMESPACE,
            domains_min=settings.domains_min,
            keepers=settings.keepers,
        )
        return catalog.states[at(1)].is_complete

    assert not is_complete(passing("a", 1))
    assert is_complete(passing("a", 1), copy("b", 1))
    assert is_complete(copy("b", 1))
    assert not is_complete(passing("a", 1), copy("b", 1), settings=TWO)
    assert is_complete(copy("c", 1), copy("b", 1), settings=TWO)


def test_who_is_alone_in_its_failure_domain_needs_one_less() -> None:
    living = {"a": "x", "b": "x", "c": "y"}
    catalog = judge_steps(
        [copy("a", 1), copy("b", 1)], living, namespace=NAMESPACE, domains_min=2, keepers=2
    )

    assert catalog.states[at(1)].is_complete


def test_the_own_copy_goes_when_all_have_it_who_are_to_keep_it() -> None:
    assert not passed(passing("a", 1))
    assert passed(passing("a", 1), copy("b", 1))
    assert not passed(passing("a", 1), copy("b", 1), settings=TWO)
    assert passed(passing("a", 1), copy("b", 1), copy("c", 1), settings=TWO)
    assert not passed(passing("a", 1), passing("b", 1)), "that one goes, too"
    assert not passed(passing("a", 1), copy("gone", 1))
    assert not passed(passing("a", 1), replace(copy("b", 1), digest="other"))


def test_it_goes_shard_by_shard_though_the_step_is_not_complete() -> None:
    copies = [passing("a", 1, "0", of=3), passing("a", 1, "1", of=3), copy("b", 1, shard="1", of=3)]
    plan = plan_drops(view(copies, LIVING, settings=ONE, now_s=1.0))

    assert (plan.drops, plan.passed) == ((), (shard_id(1, shard="1"),))


def test_the_old_step_stays_until_the_new_one_is_with_those_who_keep_it() -> None:
    old = [copy("b", 1, shard="a", of=2), copy("a", 1, shard="b", of=2)]
    written = [passing("a", 2, "a", of=2), passing("b", 2, "b", of=2)]
    half = [*old, *written, copy("b", 2, shard="a", of=2)]
    living = {"a": "a", "b": "b"}

    assert plan_drops(view([*old, *written], living, settings=ONE)).drops == ()
    assert plan_drops(view(half, living, settings=ONE)).drops == ()
    full = plan_drops(view([*half, copy("a", 2, shard="b", of=2)], living, settings=ONE))
    assert (full.drops, full.passed) == ((shard_id(1, shard="b"),), (shard_id(2, shard="a"),))


def test_what_was_complete_stays_while_a_node_is_gone() -> None:
    kept = copy("a", 1, shard="b", of=2)
    for settings in (ONE, Settings()):
        node = view([kept], {"a": "a"}, settings=settings, last_complete=at(1), now_s=9999.0)
        assert plan_drops(node).drops == ()
        assert not plan_room([node], needed_bytes=1, free_bytes=0).is_enough
    stale = view([kept, copy("a", 1, 2, of=2)], {"a": "a"}, settings=ONE, last_complete=at(1))
    assert plan_drops(stale).drops == (kept.meta_id,)


def test_for_want_of_room_what_others_keep_goes_first() -> None:
    copies = [copy("a", 1), copy("b", 1), copy("a", 2), copy("b", 2), passing("c", 2)]
    node = view(copies, LIVING, "c", settings=replace(ONE, keep=2))

    assert plan_room([node], needed_bytes=10, free_bytes=0).drops == (shard_id(2),)


def test_only_those_who_keep_it_send_it_to_the_store() -> None:
    settings = replace(ONE, lower={"s3": every(1)})
    early = plan_uploads(view([passing("a", 1)], LIVING, settings=settings))
    later = plan_uploads(view([passing("a", 1), copy("b", 1)], LIVING, settings=settings))

    assert early == []
    assert [each.node for each in later] == ["b"]
    waits = view([passing("a", 1), copy("b", 1), copy("b", 2)], LIVING, settings=settings)
    assert plan_drops(replace(waits, own="b")).drops == ()


def test_the_last_save_is_as_big_as_it_ever_was() -> None:
    save = find_save(
        view([passing("a", 2, "0"), passing("a", 2, "1")], LIVING, settings=ONE), Save()
    )

    assert save == Save(at=at(2), num_bytes=20)
    assert find_save(view([passing("a", 2, "1")], LIVING, settings=ONE), save) == save
    assert find_save(view([copy("a", 2)], LIVING, settings=ONE), save) == save
    newer = view([passing("a", 3), passing("b", 3, "1")], LIVING, settings=ONE)
    assert find_save(newer, save) == Save(at=at(3), num_bytes=10)


def test_a_keeper_sends_on_what_another_one_lost_but_never_back() -> None:
    def is_sent(target: str, *, replicas: int = 2, has_origin: bool = False) -> bool:
        peers = [
            PeerView(
                node=Node(name=each, domain=each),
                is_living=True,
                is_awaited=True,
                digests={},
                dropped=(),
                passing=[shard_id(1)] if has_origin and each == "a" else (),
            )
            for each in "ac"
        ]
        held = [Held(id=shard_id(1), digest="d", origin="a")]
        return bool(
            plan_pushes("b", held, peers, target=target, replicas=replicas, holds_instead=True)
        )

    assert is_sent("c")
    assert not is_sent("a")
    assert not is_sent("c", replicas=1), "this node is the one that keeps it"
    assert not is_sent("c", has_origin=True), "its writer sends it"


def test_placement_says_who_keeps_it() -> None:
    own, *others = nodes("x", "y", "z")
    chosen = choose_targets(own, others, replicas=1, holds_instead=True)
    assert chosen == {next_in_group([own, *others])[own.name]}


@given(st.integers(2, 4), st.integers(1, 3), st.integers(1, 2), st.integers(1, 2))
def test_the_smallest_budget_is_enough_where_all_have_written_before_any_sends(
    num_nodes: int, replicas: int, num_shards: int, keep: int
) -> None:
    """And at rest nobody has anything of its own."""
    replicas = min(replicas, num_nodes - 1)
    budget = (1 + keep) * num_shards + 1
    if replicas > 1:
        budget = (1 + replicas * (keep + 1)) * num_shards
    play = Play(
        num_nodes, replicas=replicas, num_shards=num_shards, budget_shards=budget, keep=keep
    )
    for step in range(1, 4):
        assert play.save()
        play.settle()
        assert play.complete_step() == step
        for member in play.members.values():
            assert not any(each.is_passing for each in member.copies.values())
            assert len(member.copies) == replicas * num_shards * min(step, keep)


def test_without_room_for_old_and_new_the_writer_keeps_the_new_and_nobody_drops_the_old() -> None:
    play = Play(2, replicas=1, num_shards=2, budget_shards=4)
    for _ in range(2):
        assert play.save()
        play.settle()

    assert play.complete_step() == 1
    for name, member in play.members.items():
        own = [each for each in member.copies if each.shard.startswith(name)]
        assert sorted(each.step for each in member.copies) == [1, 1, 2, 2]
        assert [each.step for each in own] == [2, 2]
    assert not play.save()
    assert play.complete_step() == 1


def test_one_keeper_does_not_outlive_a_node_and_two_do() -> None:
    for replicas, left in ((1, 0), (2, 1)):
        play = Play(3, replicas=replicas, num_shards=1, budget_shards=9)
        play.save()
        play.settle()
        play.lose("n1")
        play.settle()
        assert play.complete_step() == left
        play.save()
        play.settle()
        assert play.complete_step() == 2


EVENTS = st.lists(
    st.tuples(
        st.sampled_from(
            ["save", *["tell", "push", "keep"] * 4, "isolate", "join", "lose", "time", "settle"]
        ),
        st.integers(0, 4),
        st.integers(0, 4),
    ),
    max_size=80,
)


@given(EVENTS, st.integers(2, 5), st.integers(1, 2), st.integers(1, 2), st.integers(0, 3))
def test_the_last_complete_step_is_never_dropped(
    events: list[tuple[str, int, int]], num_nodes: int, replicas: int, num_shards: int, more: int
) -> None:
    """Whatever is known, or not yet, to whom; a node's memory lost is the one exception."""
    replicas = min(replicas, num_nodes - 1)
    budget = 2 * num_shards + 1 + more
    play = Play(num_nodes, replicas=replicas, num_shards=num_shards, budget_shards=budget)
    best = 0
    for event, first, second in events:
        one, other = f"n{first % num_nodes}", f"n{second % num_nodes}"
        if event == "save":
            play.save()
        elif event == "isolate":
            play.isolated.add(one)
        elif event == "join":
            play.join(one)
        elif event == "lose":
            play.lose(one)
            best = play.complete_step()
        elif event == "time":
            play.wait(400.0)
        elif event == "settle":
            play.settle()
        elif event == "keep":
            play.keep(one)
        elif one != other:
            play.tell(one, other) if event == "tell" else play.push(one, other)
        best = max(best, play.complete_step())
        assert play.whole_step() >= best
