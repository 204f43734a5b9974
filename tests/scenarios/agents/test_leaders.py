"""Gate and repair over leaders of nodes, as on GPUs, beside a default group that sends nothing."""

from __future__ import annotations

from pathlib import Path

from tests.ports import free_ports
from tests.resilience.agent.runs import Run, fault, plan

FAULTS = (
    fault("kill", "gate", 2, 1),
    fault("kill", "before_update", 0, 2),
    fault("kill", "before_update", 2, 3),
    fault("kill", "reduce", 3, 3),
    fault("raise", "update", 1, 4),
)
"""Ranks 0 and 2 lead. One dies before its gate, both behind it before they write."""
NODES = ("n0", "n1")
JOB = ("--nnodes", "2", "--nproc-per-node", "2", "--restarts-max", "30")


def end_run(run: Run, *faults: dict[str, object]) -> dict[int, str]:
    for node in NODES:
        run.start(node, *JOB, variables=plan(*faults, DEVICE="fake"))
    assert [run.wait(node) for node in NODES] == [0, 0], run.show()
    return run.digests()


def test_lost_leaders_and_torn_ranks_change_no_bit(run: Run, tmp_path: Path) -> None:
    (tmp_path / "undisturbed").mkdir()
    undisturbed = Run(folder=tmp_path / "undisturbed", port=free_ports(1)[0])
    digests = end_run(undisturbed)

    assert end_run(run, *FAULTS) == digests
    assert run.happened() == list(range(len(FAULTS)))
    assert "repaired" in {role for _, _, role, _ in run.resumed()}
    assert len(digests) == 4
    assert len({*digests.values()}) == 1
    run.assert_nothing_left()
