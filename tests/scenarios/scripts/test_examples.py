"""The programs of examples/, by their recipes: to the end, and through a worker that is killed."""

from __future__ import annotations

import itertools
import os
import signal
from contextlib import suppress
from pathlib import Path

import pytest

from launcher.paths import shipped_folder
from tests.launcher.command import launch
from tests.launcher.local_world import end_all, launcher_of
from tests.launcher.real_runs import named
from tests.processes import wait_for_end
from tests.waiting import wait_until

ROOT = shipped_folder()
PYTHON = ROOT / ".venv-frameworks/bin/python"
EXAMPLES = ("torch_ddp", "torch_fsdp2", "nanogpt", "hf_trainer", "accelerate", "lightning")


def start(name: str, run: Path, *words: str) -> None:
    ended = launch(f"recipe=script/{name}", "action=run", f"run.dir={run}", *words, folder=ROOT)
    assert ended.status == 0, ended.err
    assert words[-1] == "run.detach=true" or f"script/{name} version 1: finished" in ended.out


def steps_of(run: Path) -> list[int]:
    return [each.step or 0 for each in named(run, "step")]


def processes_of(run: Path, *variables: str) -> list[int]:
    """Return the processes of a run that were executed with these variables."""
    wanted = {each.encode() for each in (f"LAUNCHER_RUN_DIR={run}", *variables)}
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):
            if wanted <= set(path.read_bytes().split(b"\0")):
                found.append(int(path.parent.name))
    return found


@pytest.mark.parametrize("name", ["torch_ddp", "nanogpt"])
def test_example_trains_to_its_end(name: str, tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="a worker needs torch")
    start(name, tmp_path / "run", "trainer.max_steps=30")

    losses = [each.fields["loss"] for each in named(tmp_path / "run", "step")]
    assert steps_of(tmp_path / "run") == list(range(1, 31))
    assert losses[-1] < losses[0]


@pytest.mark.slow
@pytest.mark.parametrize("name", EXAMPLES)
def test_example_goes_on_from_its_own_checkpoint(name: str, tmp_path: Path) -> None:
    if not PYTHON.exists():
        pytest.skip("no frameworks; scripts/install-frameworks.sh installs them")
    run = tmp_path / "run"
    start(name, run, "trainer.max_steps=600", f"trainer.python={PYTHON}", "run.detach=true")
    try:
        wait_until(lambda: max(steps_of(run), default=0) >= 45)
        os.kill(processes_of(run, "RANK=1")[0], signal.SIGKILL)
        wait_for_end(launcher_of(run))
    finally:
        end_all(tmp_path)

    steps, text = steps_of(run), launch("status", str(run), folder=ROOT).out
    again = [step for before, step in itertools.pairwise(steps) if step <= before]
    assert len(again) == 1, text
    assert again[0] > 20, text
    assert steps[-1] == 600, text
    assert "succeeded" in text


@pytest.mark.slow
def test_ray_runs_an_entry_on_all_nodes_and_leaves_nothing(tmp_path: Path) -> None:
    if not PYTHON.exists():
        pytest.skip("no frameworks; scripts/install-frameworks.sh installs them")
    run = tmp_path / "run"
    path = f"+env.PATH={PYTHON.parent}:/usr/bin:/bin"
    start("ray_cluster", run, f"trainer.python={PYTHON}", path)

    assert steps_of(run) == [1, 2, 3, 4, 5]
    logs = "".join(each.read_text() for each in run.glob("logs/node-0/*.log"))
    assert "2 nodes of 2 took part" in logs
    assert processes_of(run) == []
