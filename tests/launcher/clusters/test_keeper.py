"""The keeper of a node waits for nothing that cannot be ended."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.resilience.agent.unkillable import traced

KEEPER = """
import sys
from launcher.clusters import keeper
keeper.END_DEADLINE_S = 0.5
sys.exit(keeper.main(["1", "bash", "-c", sys.argv[1]]))
"""


def test_node_ends_with_its_status_though_one_of_its_processes_does_not(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    node = f"sleep 1000 & echo $!; read -r _ <{gate}; exit 5"
    keeper = subprocess.Popen(
        [sys.executable, "-c", KEEPER, node],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert keeper.stdout is not None
    pid = int(keeper.stdout.readline())

    with traced(pid):
        gate.write_text("go\n")
        assert keeper.wait(timeout=60) == 5

    _, said = keeper.communicate()
    assert said == f"keeper: not ended by SIGKILL, and left: processes [{pid}]\n"
