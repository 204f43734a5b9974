"""Lightning's Trainer through faults: the bits, lines, files and calls of a run without them."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.resilience.agent.conftest import run
from tests.resilience.agent.runs import Run
from tests.scenarios.frameworks.beside_plain import run_plain_and_ours
from tests.scenarios.frameworks.test_trainer import IN_STEP, ROOT
from tests.scenarios.protection.conftest import Ended, Protect, protect, start

__all__ = ["protect", "run"]

pytestmark = pytest.mark.skipif(
    not list(ROOT.glob(".venv-frameworks/lib/*/site-packages/lightning")),
    reason="scripts/install-frameworks.sh has not run",
)
BETWEEN = {
    "validation_step": (2, 4, 7, 9),
    "validated": (2, 4, 7, 9),
    "save": (4, 5, 8, 10),
    "saved": (4, 5, 8, 10),
    "epoch_end": (5, 10),
}
"""Places between steps, and after how many steps the program reaches them."""


def read_lines(ended: Ended) -> str:
    (path,) = ended.folder.glob("logs/*/*/metrics.csv")
    return path.read_text()


def check(protect: Protect, name: str, faults: str) -> tuple[Ended, Ended]:
    """Run with faults; the log has the same lines, and the folder the same checkpoints."""
    ended = protect(name, faults)
    expected: Ended = protect.undisturbed(name)  # type: ignore[attr-defined]
    assert read_lines(ended) == read_lines(expected)
    assert ended.checkpoints == expected.checkpoints
    for each in ended.checkpoints:
        paths = (of.folder / "trained" / each for of in (ended, expected))
        one, other = (torch.load(path, weights_only=True) for path in paths)
        del one["callbacks"], other["callbacks"]  # have the folder in them
        assert json.dumps(one, default=Tensor.tolist) == json.dumps(other, default=Tensor.tolist)
    return ended, expected


def test_faults_change_no_bit_and_no_call_of_a_callback(protect: Protect) -> None:
    faults = (
        "1@0:training_step:exception 2@2:validation_step:kill 1@4:saved:exception "
        "3@6:clip:exception 0@7:validated:kill 1@10:epoch_end:exception"
    )
    ended, expected = check(protect, "fit", faults)

    assert ended.calls[1] == expected.calls[1]
    assert ended.calls[3] == expected.calls[3]
    for rank in (0, 2):  # a new process calls its own for what it begins with
        assert not Counter(expected.calls[rank]) - Counter(ended.calls[rank])
    names = ["end-epoch=0.ckpt", "end-epoch=1.ckpt", "last.ckpt", "step=4.ckpt", "step=8.ckpt"]
    assert ended.checkpoints == names


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_fit_survives_faults_at_random_places(protect: Protect, seed: int) -> None:
    source, found = random.Random(seed), dict[tuple[int, int], str]()
    while len(found) < 4:
        place = source.choice((*IN_STEP, "training_step", "clip", *BETWEEN))
        rank, step = source.randrange(4), source.choice(BETWEEN.get(place, range(10)))
        found[rank, step] = f"{rank}@{step}:{place}:{source.choice(('exception', 'kill'))}"
    check(protect, "fit", " ".join(found.values()))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "faults"),
    [
        # A scheduler of a metric, a stop by EarlyStopping, workers that last, lines of a callback.
        (
            "fit_early",
            "1@3:training_step:kill 0@6:validated:kill 2@9:saved:kill 3@7:clip:exception",
        ),
        ("fit_more", "3@1:validation_step:kill 0@4:after_update:kill 2@5:epoch_end:kill"),
        ("fit_stopping", "0@3:training_step:kill 1@2:after_update:exception 2@5:clip:kill"),
        ("fit_manual", "1@4:training_step:kill 0@9:epoch_end:kill 2@12:after_update:exception"),
    ],
)
def test_other_loops_survive_faults(protect: Protect, name: str, faults: str) -> None:
    check(protect, name, faults)


@pytest.mark.slow
@pytest.mark.parametrize("place", ["forward", "validation_step"])
def test_fit_survives_a_stopped_process(protect: Protect, place: str) -> None:
    check(protect, "fit", f"1@2:{place}:stop")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["end-epoch=0", "step=4"])
def test_resumed_fit_ends_with_the_bits_of_one_in_one_go(
    protect: Protect, run: Run, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    first: Ended = protect.undisturbed("fit")  # type: ignore[attr-defined]
    monkeypatch.setenv("RESUME", str(first.folder / "trained" / f"{name}.ckpt"))

    start(run, "fit", "1@6:backward:kill 0@8:gate:exception 0@5:training_step:kill")

    assert [run.wait(node) for node in run.agents] == [0, 0], run.show()
    ended = Ended(run.folder / "out")
    assert len(ended.fired) == 3
    for rank, found in first.ends.items():
        # Means of an epoch are those since the resume, and names of files another folder's.
        same = ("model/parameter", "model/buffer", "optimizer0/model", "step", "epoch", "loops")
        assert {key: ended.ends[rank][key] for key in same} == {key: found[key] for key in same}


@pytest.mark.slow
def test_without_random_numbers_two_ranks_do_what_the_plain_trainer_does(tmp_path: Path) -> None:
    folders = run_plain_and_ours("fit", tmp_path, NOISE="0")
    plain, ours = map(Ended, folders)

    assert read_lines(plain) == read_lines(ours)
    assert plain.calls == ours.calls
    assert plain.checkpoints == ours.checkpoints
    for rank, end in plain.ends.items():
        assert "model/parameter" not in end
        assert {key: ours.ends[rank][key] for key in end} == end


def test_callback_that_communicates_is_refused(run: Run) -> None:
    """A new process would call it alone, and its collective meet another one."""
    start(run, "talking_fit")

    assert 1 in [run.wait(node) for node in run.agents], run.show()
    assert "allreduce in a callback, which a new process may call alone" in run.text()


def test_settings_that_are_not_kept_exact_are_refused(tmp_path: Path) -> None:
    program = str(Path(__file__).parent / "refused_fit_program.py")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", program],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=200,
        check=True,
    )
    found = json.loads(done.stdout.splitlines()[-1])

    in_a_step = {
        "epoch": "on_train_batch_start: -1 is not kept; set should_stop",
        "no step": "no optimizer.step() in training_step: accumulate by the Trainer",
        "two steps": "backward() between optimizer.step() and the end of the step, where a rank "
        "may be alone; put it before optimizer.step()",
    }
    words = {
        "precision": "DoublePrecision",
        "checkpoints": "another CheckpointIO",
        "profiler": "a profiler",
        "reload": "reload_dataloaders_every_n_epochs",
        "interval": "a val_check_interval of time",
        "time": "Timer",
        "callback": "StochasticWeightAveraging",
        "link": "ModelCheckpoint",
        "optimizer": "LBFGS",
        "loaders": "several loaders",
        "length": "training data without a length",
        "iterator": "a dataloader_iter",
        "version": "Lightning 2.6.6, not 2.5.x,",
    }
    assert found == in_a_step | {
        name: f"training with {each} is not kept exact through faults; leave it out"
        for name, each in words.items()
    }
