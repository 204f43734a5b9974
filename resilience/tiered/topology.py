"""Where nodes stand: from labels, or from what Slurm says. Pure."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from resilience.tiered.placement import Node

UNKNOWN_DOMAIN = "unknown"
NAMES_MAX = 65_536
"""A list of nodes that stands for more is a mistake."""

_SHOWN_MAX = 60
_FIELD = re.compile(r"([A-Za-z]+)=(\S*)")
_SPAN = re.compile(r"([0-9]{1,18})(?:-([0-9]{1,18}))?")
_NOTHING = ("", "(null)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Switch:
    """A switch, or a block of nodes, as Slurm knows it."""

    name: str
    level: int
    """0 for one that nodes are plugged into."""
    nodes: tuple[str, ...]
    """All nodes below."""
    switches: tuple[str, ...]
    """The switches right below."""


def place_nodes(
    labels: Mapping[str, Mapping[str, str]],
    *,
    domain_label: str = "rack",
    near_labels: Sequence[str] = ("switch", "rack"),
    addresses: Mapping[str, str] | None = None,
) -> tuple[Node, ...]:
    """Place nodes by their labels, sorted by name.

    Near is who has the same first of the near labels. Where no node has the label of
    failure domains each node is one of its own; where only some have it the others
    share one, as nobody knows.
    """
    is_known = any(own.get(domain_label) for own in labels.values())
    nodes = []
    for name, own in sorted(labels.items()):
        near = next((f"{each}={own[each]}" for each in near_labels if own.get(each)), "")
        domain = own.get(domain_label) or UNKNOWN_DOMAIN
        nodes.append(
            Node(
                name=name,
                domain=domain if is_known else name,
                switch=near,
                address=(addresses or {}).get(name, ""),
            )
        )
    return tuple(nodes)


def parse_slurm_topology(text: str) -> tuple[Switch, ...]:
    """Read what `scontrol show topology` prints; raises ValueError for a line of another kind."""
    switches = []
    for line in filter(None, (line.strip() for line in text.splitlines())):
        fields = {name.lower(): value for name, value in _FIELD.findall(line)}
        name = fields.get("switchname") or fields.get("blockname")
        level = fields.get("level", "0")
        if not name or not re.fullmatch("[0-9]{1,4}", level):
            raise ValueError(
                f"{_show(line)} is no line of Slurm's topology; want SwitchName=... Level=... "
                "with Nodes= or Switches=, or BlockName=... with Nodes="
            )
        switches.append(
            Switch(
                name=name,
                level=int(level),
                nodes=expand_names(fields.get("nodes", "")),
                switches=expand_names(fields.get("switches", "")),
            )
        )
    return tuple(switches)


def slurm_labels(switches: Sequence[Switch]) -> dict[str, dict[str, str]]:
    """Return the labels of each node: its `switch`, which is its `rack` too, and its `zone`.

    The zone is the switch above, or the same where there is none: what all nodes share is
    no failure domain to choose. Raises ValueError for a node of two switches.
    """
    above = {child: each.name for each in switches for child in each.switches}
    labels: dict[str, dict[str, str]] = {}
    for switch in switches:
        if switch.switches or switch.level > 0:
            continue
        for node in switch.nodes:
            if node in labels:
                raise ValueError(
                    f"node {node} is below {labels[node]['switch']} and {switch.name}; want one"
                )
            zone = above.get(switch.name, switch.name)
            labels[node] = {"switch": switch.name, "rack": switch.name, "zone": zone}
    return labels


def expand_names(text: str) -> tuple[str, ...]:
    """Return the names that Slurm's short form stands for: n[0-3,7],m1 or r[1-2]n[01-16].

    Raises ValueError where brackets do not fit, or for more than NAMES_MAX names.
    """
    if text in _NOTHING:
        return ()
    names: list[str] = []
    for item in _split(text):
        pieces = re.split(r"\[([^\[\]]*)\]", item)
        if any(mark in piece for piece in pieces[::2] for mark in "[]") or not item:
            raise ValueError(f"{_show(text)} is no list of nodes; want names like n[0-3,7],m1")
        parts = [
            list(itertools.islice(_expand_spans(piece, text), NAMES_MAX + 1)) if at % 2 else [piece]
            for at, piece in enumerate(pieces)
        ]
        size = 1
        for part in parts:
            size *= len(part)
        if len(names) + size > NAMES_MAX:
            raise ValueError(f"{_show(text)} stands for more than {NAMES_MAX} nodes")
        names += ["".join(each) for each in itertools.product(*parts)]
    return tuple(dict.fromkeys(names))


def _split(text: str) -> list[str]:
    """Split at the commas outside brackets."""
    return re.split(r",(?![^\[]*\])", text)


def _expand_spans(spans: str, text: str) -> Iterator[str]:
    for span in spans.split(","):
        match = _SPAN.fullmatch(span)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if not match or last < first:
            raise ValueError(f"{_show(span)} in {_show(text)} is no range; want like 7 or 0-3")
        if last - first >= NAMES_MAX:
            raise ValueError(f"{_show(text)} stands for more than {NAMES_MAX} nodes")
        for number in range(first, last + 1):
            yield f"{number:0{len(match[1])}d}"


def _show(value: str) -> str:
    shown = ascii(value)
    return shown if len(shown) <= _SHOWN_MAX else f"{shown[:_SHOWN_MAX]}... ({len(value)})"
