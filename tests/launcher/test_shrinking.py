"""What ends a run on this machine that may go on with fewer nodes."""

from __future__ import annotations

from typing import Any

import pytest

from launcher.clusters.local_run import Happened, decide_outcome
from tests.launcher.local_job import local_job

ELASTIC = ("resilience/checkpointless=default", "resilience/elastic=default",
           "resources.shm_gib=1")  # fmt: skip


@pytest.mark.parametrize(
    ("ended", "words", "status"),
    [
        pytest.param({"node-1": 137}, {}, None, id="one-is-left"),
        pytest.param({"node-1": 143}, {}, None, id="one-was-asked-to-leave"),
        pytest.param({"node-0": 137}, {"lost": ["node-1"]}, 137, id="none-is-left"),
        pytest.param({"node-1": 1}, {"leaving": ["node-1"], "num_started": 1}, None, id="leaving"),
        pytest.param({"node-2": 1}, {"further": ["node-2"], "num_started": 3}, None, id="further"),
        pytest.param({"node-1": 1}, {}, 1, id="failed"),
    ],
)
def test_what_ends_a_run_that_may_shrink(
    ended: dict[str, int], words: dict[str, Any], status: int | None
) -> None:
    outcome = decide_outcome(Happened(ended=ended), local_job(*ELASTIC), **words)

    assert (outcome and outcome.exit_status) == status
