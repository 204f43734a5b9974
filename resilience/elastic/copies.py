"""Which nodes hold whole copies of the state together, where a copy takes several. Pure.

Each node holds one part of a copy, that of its place among the nodes of one. `columns` has the
nodes that hold each part, the best first. A node that has a part keeps it where that goes: to
have another one its processes begin anew.
"""

from __future__ import annotations

from collections.abc import Sequence

Columns = Sequence[Sequence[str]]


def fill_copies(columns: Columns, newcomers: Sequence[str], num_copies: int) -> tuple[str, ...]:
    """Return the nodes of so many copies in the order of their places, empty where there are few.

    Newcomers take what is missing, then nodes that are too many for their own part.
    """
    surplus = [node for column in columns for node in column[num_copies:]]
    rest = [*newcomers, *surplus]
    filled = []
    for column in columns:
        kept = list(column[:num_copies])
        num_missing = num_copies - len(kept)
        filled.append([*kept, *rest[:num_missing]])
        rest = rest[num_missing:]
    if any(len(each) < num_copies for each in filled):
        return ()
    return tuple(node for copy in zip(*filled, strict=True) for node in copy)


def add_holders(members: Sequence[str], columns: Columns, others: Sequence[str]) -> tuple[str, ...]:
    """Return nodes among which `members` get each part from one that holds it and is to go.

    `members` are whole copies. Others make the copies of the holders whole; empty where there are
    too few.
    """
    num_parts = len(columns)
    wanted = [
        list(dict.fromkeys([*column[:1], *members[part::num_parts]]))
        for part, column in enumerate(columns)
    ]
    taken = {node for column in wanted for node in column}
    num_copies = max(map(len, wanted))
    return fill_copies(wanted, [node for node in others if node not in taken], num_copies)
