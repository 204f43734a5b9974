"""Reports as an opening carries them: one of each kind, and which one each rank has."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from resilience.state.layout import Layout
from resilience.state.report import Phase, Report, fresh_report, pack_reports, unpack_reports
from tests.resilience.state.test_layout import layouts

CHANGES = st.fixed_dictionaries(
    {},
    optional={
        "phase": st.sampled_from(Phase),
        "step": st.integers(0, 3),
        "member_generation": st.integers(-1, 3),
        "is_healthy": st.booleans(),
        "digest": st.none() | st.text(max_size=2),
        "node": st.text(max_size=2),
        "replica": st.integers(0, 3),
        "shard": st.text(max_size=2),
        "rest": st.dictionaries(st.text(max_size=2), st.integers() | st.text(max_size=2)),
    },
)


@given(layouts(), st.data())
def test_what_was_packed_is_read_back(layout: Layout, data: st.DataObject) -> None:
    changes: list[dict[str, Any]] = data.draw(
        st.lists(CHANGES, min_size=layout.world_size, max_size=layout.world_size)
    )
    reports = tuple(
        replace(fresh_report(layout, rank, 4), **change) for rank, change in enumerate(changes)
    )

    packed = json.loads(json.dumps(pack_reports(reports, layout)))

    assert unpack_reports(packed, layout) == reports


def test_ranks_that_hold_the_same_are_of_one_kind() -> None:
    layout = Layout(nodes=("n0", "n1"), num_local_ranks=2, num_shards=2, is_sharded=True)
    held = [
        Report(**{**seat(layout, rank), "rank": rank, "generation": 4, "step": rank % 2})
        for rank in range(4)
    ]

    packed = pack_reports(held, layout)

    assert packed["of"] == [0, 1, 0, 1]
    assert [kind["step"] for kind in packed["kinds"]] == [0, 1]
    assert unpack_reports({}, layout) == ()


def seat(layout: Layout, rank: int) -> dict[str, Any]:
    found = layout.seat(rank)
    return {"node": found.node, "replica": found.replica, "shard": found.shard}
