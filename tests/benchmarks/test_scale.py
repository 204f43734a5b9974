"""What a fault of a large run sends, which does not depend on the machine."""

from __future__ import annotations

from xml.etree import ElementTree

from benchmarks.scale import Run
from benchmarks.scale_groups import GlooCost, draw
from resilience.comm.messages import Beat, Propose


def sent(num_nodes: int) -> tuple[int, int, int]:
    """Return bytes of the founding and of a fault, and those of one Open."""
    run = Run(num_nodes, 8)
    run.begin()
    founding = sum(run.wire.num_bytes.values())
    run.wire.num_bytes.clear()
    run.fail()
    return founding, sum(run.wire.num_bytes.values()), run.wire.open_bytes


def test_what_one_node_is_sent_grows_no_faster_than_the_run() -> None:
    small, large = sent(64), sent(256)

    # All nodes are told of all nodes, a few times: the square of their number.
    assert large[0] < 24 * small[0]
    assert large[1] < 24 * small[1]
    assert large[2] < 4.5 * small[2]


def test_an_opening_of_8192_ranks_takes_little() -> None:
    run = Run(1024, 8)
    run.begin()
    run.fail()

    assert run.wire.open_bytes < 64 << 10


def test_all_are_told_of_each_other_together_and_before_they_are_members() -> None:
    run = Run(64, 1, num_at_once=1)
    run.begin()

    sent = run.wire.sent
    proposed = next(at for at, each in enumerate(sent) if isinstance(each, Propose))
    told = [{name for name, _ in each.nodes} for each in sent[:proposed] if isinstance(each, Beat)]
    assert told[-1] == {*run.names}
    # Each came a millisecond after the one before.
    assert len(told) < len(run.names) // 2


def test_leaders_groups_of_8192_ranks_cost_little_more_than_those_of_64() -> None:
    cost = GlooCost(base_s=0.002, peer_s=0.0001, byte_s=1e-9, address_bytes=(150.0, 8.0))

    assert cost.open_leaders_s(8192, 8) < 3 * cost.open_leaders_s(64, 8)
    assert cost.open_s(8192) > 100 * cost.open_s(64)


def test_plot_has_a_line_for_each_curve() -> None:
    curves = {name: [(64, 0.01 * at), (8192, 3.0 * at)] for at, name in enumerate("abcd", start=1)}

    drawn = ElementTree.fromstring(draw(curves))

    assert len(drawn.findall("{*}polyline")) == 4
