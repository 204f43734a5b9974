"""What workers have started."""

from __future__ import annotations

import os

import pytest

from resilience.agent.processes.tree import Process, read_processes, sum_processor_s

TREE = {
    1: Process(parent=0, session=1, processor_s=1.0),
    10: Process(parent=1, session=10, processor_s=2.0),
    11: Process(parent=10, session=10, processor_s=4.0),
    12: Process(parent=11, session=12, processor_s=8.0),
    13: Process(parent=12, session=12, processor_s=16.0),
    14: Process(parent=1, session=10, processor_s=32.0),
    15: Process(parent=14, session=15, processor_s=64.0),
    20: Process(parent=1, session=20, processor_s=128.0),
}


@pytest.mark.parametrize(("roots", "processor_s"), [
    pytest.param({10}, 126.0, id="children-and-what-is-left-of-the-session"),
    ({20}, 128.0),
    ({10, 20}, 254.0),
    ({99}, 0.0),
])  # fmt: skip
def test_processors_of_all_that_workers_have_started(roots: set[int], processor_s: float) -> None:
    assert sum_processor_s(TREE, roots) == processor_s


def test_this_process_is_in_the_kernels_table() -> None:
    found = read_processes()[os.getpid()]

    assert (found.parent, found.session) == (os.getppid(), os.getsid(0))
    assert found.processor_s > 0
