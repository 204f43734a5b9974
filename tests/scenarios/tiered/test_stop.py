"""Agents that are asked to end at different moments, or only some of them: one stop of the run."""

from __future__ import annotations

import random
import signal
import time
from pathlib import Path

import pytest

from resilience.tiered.loader import newest_whole
from tests.resilience.tiered.daemons import Daemon
from tests.scenarios.recovery.runs import finish, start_run
from tests.scenarios.tiered.runs import is_saved, make_tiered_job, open_only, start_nodes
from tests.waiting import wait_until

ASKED = 128 + signal.SIGTERM
NAMES = ("n0", "n1", "n2", "n3")
WITHIN_S = 2.0


def newest_step(node: Daemon) -> int | None:
    """Return the newest whole step that a node's daemon offers."""
    newest = newest_whole(open_only(node))
    return newest.step if newest else None


def spread(seed: int) -> dict[str, float]:
    """Return when each node is asked to end: in any order, within two seconds."""
    chance = random.Random(seed)
    return {name: chance.uniform(0, WITHIN_S) for name in NAMES}


@pytest.mark.parametrize(
    "recovers",
    [pytest.param(True, id="recovers", marks=pytest.mark.slow), pytest.param(False, id="restarts")],
)
@pytest.mark.parametrize(
    "times",
    [
        pytest.param(dict.fromkeys(NAMES, 0.0), id="at-once", marks=pytest.mark.slow),
        pytest.param({"n3": 0.0}, id="the-last-alone"),
        pytest.param({"n0": 0.0}, id="the-first-alone", marks=pytest.mark.slow),
        pytest.param({"n1": 0.0, "n2": 1.0}, id="some", marks=pytest.mark.slow),
        *(pytest.param(spread(seed), id=f"seed-{seed}", marks=pytest.mark.slow) for seed in (1, 2)),
    ],
)
def test_all_workers_end_after_one_step_that_every_node_keeps(
    tmp_path: Path, times: dict[str, float], recovers: bool
) -> None:
    # No step is told of but the first, and the one that the run ends with.
    job = make_tiered_job(
        "hybrid",
        max_steps=100_000,
        num_nodes=4,
        num_devices=1,
        recovers=recovers,
        values={"log_every_n_steps": 100_000},
    )
    with (
        start_nodes(tmp_path / "nodes", NAMES) as nodes,
        start_run(
            tmp_path / "run",
            job,
            nodes=NAMES,
            by_node={name: nodes.variables(name) for name in NAMES},
        ) as run,
    ):
        run.wait_for(is_saved(10))
        began_s = time.monotonic()
        for name, at_s in sorted(times.items(), key=lambda each: each[1]):
            time.sleep(max(0.0, began_s + at_s - time.monotonic()))
            run.agents[name].send_signal(signal.SIGTERM)
        outcome = finish(run)
        assert outcome.statuses == [ASKED] * 4, run.log()
        # Spares have no rank.
        ends = [each for each in outcome.named("worker_stopped") if each.rank is not None]
        stopped = {each.rank: each.step for each in ends}
        assert sorted(stopped) == [0, 1, 2, 3], run.log()
        (last,) = set(stopped.values())
        assert last is not None
        for name in NAMES:
            # Daemons hear a moment later what the others hold.
            wait_until(lambda name=name: newest_step(nodes[name]) == last + 1)

    assert [each.step for each in outcome.named("step")] == [0, last]
    assert not outcome.named("worker_failed")
    assert not outcome.named("worker_replaced")
    assert not outcome.left_behind
