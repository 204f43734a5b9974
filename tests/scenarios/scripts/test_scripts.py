"""A user's own script under the launcher: a real run of it, and every command on it."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from launcher.paths import shipped_folder
from tests.cases import slow
from tests.launcher.command import launch, put
from tests.launcher.local_world import end_all, launcher_of
from tests.launcher.real_runs import named
from tests.processes import wait_for_end
from tests.waiting import wait_until

EXAMPLE = (shipped_folder() / "examples/torch_ddp.py").read_text()
# By which a test knows whom to kill; nothing else is changed.
TOLD = """def main() -> None:
    Path(os.environ["LAUNCHER_RUN_DIR"], "pid-" + os.environ["RANK"]).write_text(str(os.getpid()))
"""
SIZE = ("trainer.num_nodes=2", "trainer.num_devices=2", "trainer.max_steps=300")
ARGUMENTS = "trainer.arguments={steps: 300, step-seconds: 0.02}"
STEPS = ("num_steps", "max_steps")


@pytest.fixture
def code(tmp_path: Path) -> Iterator[Path]:
    """A repository with a script in it, and a recipe that `init` has written of it."""
    folder = tmp_path / "lab"
    put(folder / "train.py", EXAMPLE.replace("def main() -> None:\n", TOLD))
    git = ("git", "-c", "user.name=x", "-c", "user.email=x@example.org")
    for words in (("init", "-q"), ("add", "."), ("commit", "-qm", "A script")):
        subprocess.run([*git, *words], cwd=folder, check=True)
    assert launch("init", "--script", "train.py", folder=folder).status == 0
    yield folder
    end_all(tmp_path)


# Without torch, so that it starts in a moment. As soon as there is a checkpoint, rank 3 kills
# itself or its agent, and so its node.
PLAIN = """
import os, pathlib, signal, sys, time
import resilience
run, rank = pathlib.Path(os.environ["LAUNCHER_RUN_DIR"]), int(os.environ["RANK"])
kept = run / "kept"
first = int(kept.read_text()) if kept.exists() else 0
for step in range(first, 60):
    time.sleep(0.01)
    if rank == 0:
        resilience.log(step + 1, loss=1 / (step + 1))
        if (step + 1) % 20 == 0:
            kept.write_text(str(step + 1))
    if rank == 3 and first == 0 and (step == 50 or kept.exists()):
        is_node = os.environ["VICTIM"] == "node"
        os.kill(int(os.environ["RESILIENCE_AGENT_PID"]) if is_node else os.getpid(), signal.SIGKILL)
print("the words are", sys.argv[1:])
"""


@pytest.mark.parametrize("victim", ["worker", slow("node")])
def test_a_script_is_started_again_and_goes_on_from_its_own_checkpoint(
    tmp_path: Path, victim: str
) -> None:
    put(tmp_path / "train.py", PLAIN)
    assert launch("init", "--script", "train.py", folder=tmp_path).status == 0
    (name,) = (each.relative_to(tmp_path / "recipes") for each in tmp_path.glob("recipes/*/*.yaml"))
    words = (
        "action=run",
        f"+env.VICTIM={victim}",
        "trainer.preload=[]",
        "+trainer.arguments.lr=3e-4",
        *SIZE[:2],
    )

    ended = launch(f"recipe={name.with_suffix('')}", *words, folder=tmp_path)

    assert ended.status == 0, ended.out + ended.err
    steps = [each.step for each in named(tmp_path / "runs/train", "step")]
    assert steps[-1] == 60
    assert steps.count(60) == 1
    assert len({*steps} & {20, 40}) == 2
    assert "train version 1: finished\n  steps       60\n" in ended.out
    assert "faults      1, " in ended.out
    assert ("node-1 was killed, and is started again\n" in ended.out) == (victim == "node")
    assert "the words are ['--lr', '3e-4']" in launch("logs", "train", folder=tmp_path).out


def done(run: Path) -> int:
    return max((each.step or 0 for each in named(run, "step")), default=0)


@pytest.mark.slow
def test_a_script_is_started_again_and_every_command_knows_its_run(code: Path) -> None:
    started = launch(
        "recipe=lab/train", "action=run", "run.detach=true", ARGUMENTS, *SIZE, folder=code
    )
    assert started.status == 0, started.err
    run = code / "runs" / "train"
    wait_until(lambda: done(run) >= 30)
    victim = int((run / "pid-3").read_text())
    alive = launch("status", "train", folder=code)
    assert "train: running\n" in alive.out
    assert "training (4 of 4 workers)" in alive.out
    assert " s a step, " in alive.out

    os.kill(victim, signal.SIGKILL)
    wait_for_end(launcher_of(run))

    steps = [each.step for each in named(run, "step")]
    again = next(place for place, step in enumerate(steps[1:], 1) if step < steps[place - 1] + 1)
    assert steps[again] % 20 == 1, "it goes on from a checkpoint of its own"
    assert steps[again] > 1
    assert steps[-1] == 300
    assert int((run / "pid-3").read_text()) != victim
    wrong = [
        f"{' '.join(words)}: status {ended.status}, no {text!r} in {ended.out}{ended.err}"
        for words, status, texts in COMMANDS
        for ended in [launch(*words, folder=code)]
        for text in texts
        if ended.status != status or text not in ended.out + ended.err
    ]
    assert wrong == []


COMMANDS = [
    (("status", "train"), 0, ("train: succeeded", "steps     300 of 300, loss ", "rank 3: died")),
    (("runs",), 0, ("succeeded", "step 300 of 300")),
    (("logs", "train", "--rank", "0"), 0, ("goes on after step ",)),
    (("logs", "train", "--rank", "4"), 2, ("allowed: 0 to 3",)),
    (("report", "train", "--json"), 0, ('"num_steps": 300', '"tokens_per_second": null')),
    (("report", "train"), 0, ("report.html",)),
    (("attach", "train"), 0, ("finished", "300 of 300")),
    (("cancel", "train"), 0, ("has ended before",)),
    (("scale", "train", "nodes=1"), 2, ("since it runs a script",)),
    (("branch", "train"), 2, ("train runs a script, whose states only its program knows",)),
    (("continue", "train", "trainer.arguments.step-seconds=0", "trainer.arguments.lr=0.1"), 0,
     ("train goes on in", "trainer.arguments.lr: null -> ", "train version 1: finished")),
    (("clean", "train"), 0, ("",)),
    (("list", "lab"), 0, ("lab/train", "script", "1 processes")),
    (("show", "lab/train"), 0, ("entry: train.py",)),
    (("explain", "recipe=lab/train", "trainer.folder"), 0, ("from recipes/lab/train.yaml",)),
    (("diff", "lab/train", "script/torch_ddp"), 1, ("trainer.entry",)),
    (("plan", "recipe=lab/train"), 0, ("parameters, memory and days are not known",)),
    (("plan", "recipe=lab/train", "--json"), 0, ("parameters, memory and days are not known",)),
    (("check", "--update", "-m", "as it begins"), 0, ("lab/train is version 1 now",)),
    (("check",), 0, ("1 recipe",)),
    (("history", "lab/train"), 0, ("as it begins",)),
    (("freeze", "recipe=lab/train"), 0, ("entry: train.py",)),
    (("schema",), 0, ("ScriptTrainer",)),
    (("-m", "recipe=lab/train", "+trainer.arguments.lr=1e-3,1e-4"), 0, ("node-0.sh",)),
    (("recipe=lab/train", "run.dir=other", "cluster=slurm"), 0, ("job.sbatch",)),
    (("recipe=lab/train", "run.dir=k8s", "cluster=k8s"), 0, ("manifest.yaml",)),
]  # fmt: skip
"""Each with its status and words."""
