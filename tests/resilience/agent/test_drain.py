"""A node that somebody asks to leave its run, from elsewhere."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.resilience.agent.runs import ROOT, Run, fault, plan


def drain(node: str, run_dir: Path, *options: str) -> tuple[int, str]:
    """Ask as a person does; returns exit status and what was said."""
    done = subprocess.run(
        [sys.executable, "-m", "resilience.agent", "drain", node, f"--run-dir={run_dir}", *options],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


def test_node_of_a_run_of_one_size_stays_and_the_run_goes_on(run: Run, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("another")
    variables = plan(fault("tell", "gate", 0, 3), NOTE=run.note, ORDERLY=1, STEPS=1_000_000)
    agent = run.start("n0", "--nproc-per-node", "2", variables=variables)
    run.wait_for_note()
    folder = run.folder / "run"

    unknown = drain("n7", folder)
    assert unknown[0] == 2
    assert unknown[1].endswith(f"NODE: no agent of 'n7' is known in {folder}; there are: n0\n")
    (word,) = (folder / "agents").glob("[0-9a-f]*")
    left = json.loads(word.read_text()) | {"node": "n7"}
    (folder / "agents" / "killed").write_text(json.dumps(left))
    status, said = drain("n7", folder)
    assert status == 1
    assert said.endswith(": node 'n0' is there\n")
    status, said = drain("n0", folder)
    assert (status, said.partition(": n0 was not asked to leave: ")[2].partition(": ")[2]) == (
        1,
        "the run has one size; stop it, or let resilience.elastic say others\n",
    )
    status, said = drain("n0", folder, f"--token-file={token}")
    assert status == 2
    assert said.endswith(
        "argument --token-file: it holds another token than the agents of the run; allowed: the "
        f"file that they were started with, as {folder / 'run.token'}\n"
    )

    assert agent.poll() is None
    agent.terminate()
    assert run.wait() == 143, run.show()
    run.assert_nothing_left()


def test_folder_of_no_run_is_named(tmp_path: Path) -> None:
    status, said = drain("n0", tmp_path)

    assert status == 2
    assert said.endswith(
        f"argument --run-dir: {tmp_path} has no word of an agent; allowed: the folder of a run "
        "that has not ended\n"
    )
