"""When a generation is over for its worker, and whether it counts on what the worker holds."""

from __future__ import annotations

from typing import Any

import pytest

from resilience.comm.agent_store import AgentStore
from resilience.comm.messages import Break, Open
from resilience.comm.page import Activity
from resilience.errors import BrokenError
from resilience.inprocess.generation import Generation
from resilience.state.layout import make_layout
from resilience.state.report import Phase, Report, fresh_report, pack_reports

NUMBER = 4
LAYOUT = make_layout(nodes=["n0"], num_local_ranks=1)
OVER = Break(generation=NUMBER, reason="rank 3 is gone")


def generation(report: Report | None = None, **more: Any) -> Generation:
    own = report or fresh_report(LAYOUT, 0, NUMBER - 1)
    reports = pack_reports([own], LAYOUT)
    opening = Open(generation=NUMBER, rank=0, local_rank=0, layout=LAYOUT, head="", reports=reports)
    return Generation(
        opening,
        node="n0",
        device_type="cpu",
        page=None,
        slot=0,
        open_store=lambda number: AgentStore(number, pytest.fail),
        **more,
    )


def test_break_ends_it_with_its_reason() -> None:
    opened = generation()

    opened.take_break(OVER)

    assert not opened.is_current()
    with pytest.raises(BrokenError, match="rank 3 is gone"):
        opened.mark(Activity.GATE, 7)


def test_break_of_another_generation_ends_nothing() -> None:
    opened = generation()

    opened.take_break(Break(generation=NUMBER - 1, reason="late"))

    assert opened.is_current()
    opened.check()


def test_generation_that_was_left_is_not_current() -> None:
    """A gate that is entered afterwards sends nothing."""
    opened = generation()

    opened.close()

    assert not opened.is_current()


def test_update_goes_on_in_a_broken_generation() -> None:
    """Its gate was passed, so it can end alone; to stop it there would tear the state."""
    opened = generation()
    opened.take_break(OVER)

    opened.mark(Activity.UPDATE, 7)


@pytest.mark.parametrize(("member", "keeps"), [(NUMBER - 1, True), (NUMBER - 2, False)])
def test_state_counts_where_its_holder_was_a_member_to_the_end(member: int, keeps: bool) -> None:
    own = Report(
        rank=0,
        node="n0",
        generation=NUMBER - 1,
        phase=Phase.COMPUTING,
        step=9,
        member_generation=member,
    )

    assert generation(own).keeps_state == keeps
