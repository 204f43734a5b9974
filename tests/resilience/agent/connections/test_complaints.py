"""An address is complained about once its reason has lasted."""

from __future__ import annotations

from resilience.agent.connections.complaints import OTHER_RUN, Complaints
from resilience.agent.connections.transport import NO_AGENT

ADDRESS = "n0:29500"


def test_agent_of_an_earlier_run_that_is_about_to_end_is_no_complaint() -> None:
    complaints = Complaints(lease_s=10)
    reasons = [(0, OTHER_RUN), (9, OTHER_RUN), (10, NO_AGENT), (19, OTHER_RUN), (28, OTHER_RUN)]

    assert {complaints.judge(ADDRESS, reason, now_s) for now_s, reason in reasons} == {""}
    assert complaints.judge(ADDRESS, OTHER_RUN, 29) == f"{ADDRESS}: {OTHER_RUN}"
    assert complaints.judge(ADDRESS, OTHER_RUN, 99) == "", "once"
