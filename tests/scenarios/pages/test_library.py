"""The program of docs/library.md, as it stands: its commands, its bits, and what the page says."""

from __future__ import annotations

import difflib
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch

from resilience.inprocess.lasting import NOTE_BYTES_MAX
from resilience.protection.unregistered import NUM_STEPS
from tests.launcher.command import launch
from tests.launcher.real_runs import named
from tests.resilience.agent.conftest import run
from tests.resilience.agent.runs import Run

__all__ = ["run"]

PAGE = (Path(__file__).parents[3] / "docs" / "library.md").read_text("utf-8")
PROGRAM = re.search(r"```python\n(.*?)```", PAGE, re.DOTALL)
RANKS = ("--nproc-per-node", "2")


def write_program(folder: Path, *, pause_s: float = 0) -> Path:
    assert PROGRAM is not None
    path = folder / "train.py"
    pause = f"import time\n    time.sleep({pause_s})\n    with run.step():"
    path.write_text(PROGRAM[1].replace("with run.step():", pause))
    return path


def weights(folder: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = torch.load(folder / "model.pt", weights_only=True)
    return found


def test_killed_worker_leaves_the_weights_of_a_run_without_an_agent(
    run: Run, tmp_path: Path
) -> None:
    alone = tmp_path / "alone"
    alone.mkdir()
    torchrun = ["torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command = [sys.executable, "-m", *torchrun, str(write_program(alone))]
    subprocess.run(command, cwd=alone, check=True, timeout=200, capture_output=True)
    program = write_program(tmp_path, pause_s=0.05)

    # Sockets of a loader's workers lie in it, whose paths may not be long.
    with tempfile.TemporaryDirectory(dir="/tmp") as short:
        run.start(
            "n0", *RANKS, program=(str(program),), warm="imports", variables={"TMPDIR": short}
        )
        run.wait_for(lambda event: event.event == "step")
        os.kill(run.children("n0")[2], signal.SIGKILL)

        assert run.wait() == 0, run.show()
    assert "worker_replaced" in {each.event for each in run.events()}
    ended, expected = weights(tmp_path), weights(alone)
    assert ended.keys() == expected.keys()
    assert all(torch.equal(ended[name], expected[name]) for name in expected)
    run.assert_nothing_left()


def test_recipe_of_the_page_goes_on_within_a_step(tmp_path: Path) -> None:
    """Its commands as they stand, on two nodes of this machine, and faults at all its places."""
    write_program(tmp_path)
    init, start, drill = re.findall(r"^launcher (.*)$", PAGE, re.MULTILINE)
    assert set(start.split()) < set(shlex.split(drill))
    faults = (
        "{kind: exception, place: data, step: 2, rank: 3}, "
        "{kind: exception, place: forward, step: 9, rank: 0}, "
        "{kind: slow, place: gate, step: 99, rank: 0, seconds: 1}"
    )
    drill = drill.replace("injected=[", f"injected=[{faults}, ")
    assert launch(*init.split(), folder=tmp_path).status == 0
    (name,) = (each.relative_to(tmp_path / "recipes") for each in tmp_path.glob("recipes/*/*.yaml"))
    words = shlex.split(drill.replace("NAME", str(name.with_suffix(""))))

    ended = launch(*words, "trainer.num_nodes=2", "trainer.num_devices=2", folder=tmp_path)

    assert ended.status == 0, ended.out + ended.err
    folder = tmp_path / "runs/train"
    fired = [
        (each.step, each.rank, each.fields["place"]) for each in named(folder, "fault_injected")
    ]
    assert fired == [(2, 3, "data"), (5, 1, "gate"), (9, 0, "forward")]
    assert [each.step for each in named(folder, "step")] == list(range(1, 17))
    assert "  steps       16\n" in ended.out
    assert "faults      3 (3 injected), " in ended.out
    assert "no step lost, 1 of the recipe did not fire, as no loop of resi" in ended.out
    assert (tmp_path / "model.pt").exists()


def test_plain_program_gains_as_many_lines_as_the_page_says() -> None:
    assert PROGRAM is not None
    (shown,) = re.findall(r"```diff\n(.*?)```", PAGE, re.DOTALL)
    plain = PROGRAM[1]
    for hunk in shown.split("@@\n"):
        lines = hunk.splitlines(keepends=True)
        before, after = ("".join(each[1:] for each in lines if each[0] != sign) for sign in "+-")
        assert plain.count(after) == 1
        plain = plain.replace(after, before)
    compile(plain, "plain.py", "exec")
    assert not re.search(r"resilience|\brun\b", plain)

    lines_of = [[each.strip() for each in text.split("\n") if each] for text in (plain, PROGRAM[1])]
    num_added = sum(each.startswith("+ ") for each in difflib.ndiff(*lines_of))
    assert num_added == len(re.findall(r"^\+", shown, re.MULTILINE)) == 5
    assert "five lines are new" in PAGE


@pytest.mark.parametrize(
    "words", [f"more than {NOTE_BYTES_MAX >> 20} MiB at once", f"in the first {NUM_STEPS} steps"]
)
def test_page_says_what_holds(words: str) -> None:
    assert words in PAGE
