"""Where nodes stand, from labels and from Slurm's words."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilience.tiered.placement import Node
from resilience.tiered.topology import (
    Switch,
    expand_names,
    parse_slurm_topology,
    place_nodes,
    slurm_labels,
)

TREE = """\
SwitchName=s0 Level=0 LinkSpeed=1 Nodes=n[0-3],n7
SwitchName=s1 Level=0 LinkSpeed=1 Nodes=n[4-6]
SwitchName=s2 Level=0 LinkSpeed=1 Nodes=n8

SwitchName=top0 Level=1 LinkSpeed=1 Nodes=n[0-7] Switches=s[0-1]
SwitchName=top1 Level=1 LinkSpeed=1 Nodes=n8 Switches=s2
SwitchName=root Level=2 LinkSpeed=1 Nodes=n[0-8] Switches=top[0-1]
"""


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("", []),
        ("(null)", []),
        ("a", ["a"]),
        ("n[0-3],n7", ["n0", "n1", "n2", "n3", "n7"]),
        ("n[08-11]", ["n08", "n09", "n10", "n11"]),
        ("n[1,3-4,007]", ["n1", "n3", "n4", "n007"]),
        ("r[1-2]n[0-1]-ib", ["r1n0-ib", "r1n1-ib", "r2n0-ib", "r2n1-ib"]),
        ("a,b[1-2],c.d", ["a", "b1", "b2", "c.d"]),
        ("n1,n[1-2]", ["n1", "n2"]),
    ],
)
def test_names_that_a_short_form_stands_for(text: str, names: list[str]) -> None:
    assert list(expand_names(text)) == names


@pytest.mark.parametrize(
    "text",
    [
        *("n[", "n]", "n[1", "n[]", "n[a]", "n[1-]", "n[3-1]", "n[1--2]", "n[1,,2]", "a,,b"),
        *(",", "a,", "n[[1]]", "n[1]]", "n[\u0661]", "n[ 1]"),
    ],
)
def test_short_forms_that_are_none(text: str) -> None:
    with pytest.raises(ValueError, match=r"is no list of nodes; want|is no range; want"):
        expand_names(text)


@pytest.mark.parametrize(
    "text", ["n[0-65536]", "n[0-999999999999999999]", "n[0-999]x[0-999]", "n[0-65535],m"]
)
def test_short_forms_for_too_many(text: str) -> None:
    with pytest.raises(ValueError, match="stands for more than 65536 nodes"):
        expand_names(text)


@given(st.lists(st.integers(0, 300), min_size=1, max_size=20, unique=True), st.integers(1, 4))
def test_ranges_are_expanded_to_what_they_were_made_from(numbers: list[int], width: int) -> None:
    texts = [f"{number:0{width}d}" for number in numbers]

    assert list(expand_names(f"n[{','.join(texts)}]")) == [f"n{text}" for text in texts]


@given(st.integers(0, 500), st.integers(0, 100), st.integers(1, 4))
def test_a_range_has_all_its_numbers(first: int, more: int, width: int) -> None:
    names = expand_names(f"n[{first:0{width}d}-{first + more}]")

    assert [int(name[1:]) for name in names] == list(range(first, first + more + 1))
    assert all(len(name) > width for name in names)


def test_switches_of_a_tree() -> None:
    switches = parse_slurm_topology(TREE)

    assert [each.name for each in switches] == ["s0", "s1", "s2", "top0", "top1", "root"]
    assert switches[0] == Switch(
        name="s0", level=0, nodes=("n0", "n1", "n2", "n3", "n7"), switches=()
    )
    assert switches[3].switches == ("s0", "s1")
    assert switches[5].level == 2


def test_labels_of_a_tree() -> None:
    labels = slurm_labels(parse_slurm_topology(TREE))

    assert labels["n7"] == {"switch": "s0", "rack": "s0", "zone": "top0"}
    assert labels["n4"] == {"switch": "s1", "rack": "s1", "zone": "top0"}
    assert labels["n8"] == {"switch": "s2", "rack": "s2", "zone": "top1"}
    assert sorted(labels) == [f"n{number}" for number in range(9)]


def test_labels_of_blocks() -> None:
    text = "BlockName=b1 BlockIndex=0 Nodes=n[1-2] BlockSize=2\nBlockName=b2 Nodes=n3\n"

    labels = slurm_labels(parse_slurm_topology(text))

    assert labels == {
        "n1": {"switch": "b1", "rack": "b1", "zone": "b1"},
        "n2": {"switch": "b1", "rack": "b1", "zone": "b1"},
        "n3": {"switch": "b2", "rack": "b2", "zone": "b2"},
    }


def test_a_switch_without_nodes() -> None:
    assert (
        slurm_labels(parse_slurm_topology("SwitchName=s0 Level=0 LinkSpeed=1 Nodes=(null)")) == {}
    )


@pytest.mark.parametrize(
    "text", ["No topology information available", "Nodes=n1", "SwitchName=s0 Level=x Nodes=n1"]
)
def test_other_lines_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"{text!r} is no line of Slurm's topology")):
        parse_slurm_topology(f"{TREE}{text}\n")


def test_a_node_of_two_switches_is_refused() -> None:
    switches = parse_slurm_topology("SwitchName=a Level=0 Nodes=n1\nSwitchName=b Level=0 Nodes=n1")

    with pytest.raises(ValueError, match="node n1 is below a and b; want one"):
        slurm_labels(switches)


def test_nodes_are_placed_by_their_labels() -> None:
    nodes = place_nodes(
        {
            "b": {"switch": "s1", "rack": "r1", "zone": "z1"},
            "a": {"rack": "r1", "zone": "z2"},
        },
        domain_label="zone",
        addresses={"a": "10.0.0.1:7"},
    )

    assert nodes == (
        Node(name="a", domain="z2", switch="rack=r1", address="10.0.0.1:7"),
        Node(name="b", domain="z1", switch="switch=s1"),
    )


def test_without_labels_each_node_is_a_failure_domain() -> None:
    assert place_nodes({"a": {}, "b": {}}) == (
        Node(name="a", domain="a"),
        Node(name="b", domain="b"),
    )


def test_nodes_without_the_label_share_a_failure_domain() -> None:
    domains = {
        node.name: node.domain for node in place_nodes({"a": {}, "b": {}, "c": {"rack": "r"}})
    }

    assert domains == {"a": "unknown", "b": "unknown", "c": "r"}
