"""Programs that open `env://`: in workers by the agent's store, elsewhere by torch's own."""

from __future__ import annotations

import json
from pathlib import Path

from tests.resilience.agent.runs import Run

PROGRAM = Path(__file__).parent / "env_program.py"
NODES = ("n0", "n1")


def test_program_meets_in_the_agents_store_and_its_children_by_torchs(run: Run) -> None:
    for node in NODES:
        run.start(
            node,
            *("--no-recovery", "--nnodes", "2", "--nproc-per-node", "1"),
            program=(str(PROGRAM),),
            warm="imports",
        )

    assert [run.wait(node) for node in NODES] == [0, 0], run.show()
    for rank in range(2):
        found = json.loads((run.folder / "out" / f"found-{rank}").read_text())
        assert found == {
            "plain": [2.0, "AgentStore"],
            "again": [2.0, "AgentStore"],
            "with its rank": [2.0, "AgentStore"],
            "child": ["2.0", "TCPStore"],
            "of its own": [1.0, "TCPStore"],
        }
    run.assert_nothing_left()
