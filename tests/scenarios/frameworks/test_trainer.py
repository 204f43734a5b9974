"""transformers.Trainer through faults: the bits, lines and calls of a run without them."""

from __future__ import annotations

import json
import random
import re
import shutil
from collections import Counter
from pathlib import Path

import pytest

from tests.resilience.agent.conftest import run
from tests.resilience.agent.runs import Run
from tests.scenarios.frameworks.beside_plain import run_plain_and_ours
from tests.scenarios.protection.conftest import Ended, Protect, protect, start

__all__ = ["protect", "run"]

ROOT = Path(__file__).parents[3]
STEPS = range(10)
IN_STEP = ("forward", "backward", "reduced", "gate", "gate_passed", "before_update", "after_update")
BETWEEN = {
    "log": (2, 3, 4, 6, 8, 9, 10),
    "logged": (2, 3, 4, 6, 8, 9, 10),
    "predict": (3, 6, 9, 10),
    "evaluated": (3, 6, 9, 10),
    "save": (4, 8, 10),
    "saved": (4, 8, 10),
}
"""Places between steps, and after how many steps the program reaches them."""


def test_faults_change_no_bit_and_no_call_of_a_callback(protect: Protect, tmp_path: Path) -> None:
    faults = (
        "1@0:forward:exception 1@3:predict:exception 2@4:save:kill 3@5:clip:exception "
        "0@8:logged:kill 2@10:evaluated:exception"
    )
    ended = protect("trainer", faults)

    expected = protect.undisturbed("trainer")  # type: ignore[attr-defined]
    assert ended.calls[1] == expected.calls[1]
    assert ended.calls[3] == expected.calls[3]
    for rank in (0, 2):  # a new process calls its own for what it begins with
        assert not Counter(expected.calls[rank]) - Counter(ended.calls[rank])
    logged = [json.loads(each) for each in ended.calls[1] if each.startswith('["log"')]
    assert [step for _, step, _ in logged] == [2, 3, 4, 6, 6, 8, 9, 10, 10, 10]
    assert (
        ended.checkpoints
        == expected.checkpoints
        == ["checkpoint-10", "checkpoint-4", "checkpoint-8"]
    )


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_trainer_survives_faults_at_random_places(protect: Protect, seed: int) -> None:
    source, found = random.Random(seed), dict[tuple[int, int], str]()
    while len(found) < 4:
        place = source.choice((*IN_STEP, "clip", *BETWEEN))
        rank, step = source.randrange(4), source.choice(BETWEEN.get(place, STEPS))
        found[rank, step] = f"{rank}@{step}:{place}:{source.choice(('exception', 'kill'))}"
    protect("trainer", " ".join(found.values()))


@pytest.mark.slow
def test_best_model_is_that_of_a_run_without_faults(protect: Protect) -> None:
    """Grouped samples and workers that last draw random numbers in evaluations, too."""
    ended = protect("best", "0@4:save:kill 2@6:predict:kill 1@8:saved:kill 3@10:logged:exception")

    assert ended.checkpoints == protect.undisturbed("best").checkpoints  # type: ignore[attr-defined]


@pytest.mark.slow
@pytest.mark.parametrize(
    "faults",
    [
        "1@3:backward:exception 0@4:save:kill 2@6:predict:exception 3@8:after_update:exception",
        "2@0:forward:kill 1@4:saved:kill 0@7:clip:exception 3@10:logged:kill",
        "3@2:gate:stop 0@6:evaluated:kill",
    ],
)
def test_sharded_training_ends_with_the_bits_of_a_run_without_faults(
    protect: Protect, faults: str
) -> None:
    ended = protect("sharded", faults)

    assert ended.checkpoints == protect.undisturbed("sharded").checkpoints  # type: ignore[attr-defined]


@pytest.mark.slow
def test_resumed_training_ends_with_the_bits_of_one_in_one_go(
    protect: Protect, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that joins loads a newer checkpoint than the others did."""
    first = protect.undisturbed("trainer")  # type: ignore[attr-defined]
    monkeypatch.setenv("RESUME", "newest")
    own = run.folder / "out" / "trained" / "checkpoint-4"
    shutil.copytree(first.folder / "trained" / "checkpoint-4", own)

    start(run, "trainer", "1@6:backward:kill 0@8:saved:kill 2@9:gate:exception 3@10:logged:kill")

    assert [run.wait(node) for node in run.agents] == [0, 0], run.show()
    ended = Ended(run.folder / "out")
    assert len(ended.fired) == 4
    for rank, found in first.ends.items():
        # The mean loss, in the last line too, is that of the steps since the resume.
        own = ended.ends[rank]
        assert own["history"][:-1] == found["history"][:-1]
        assert {**own, "loss": found["loss"], "history": found["history"]} == found


@pytest.mark.slow
@pytest.mark.parametrize("name", ["trainer", "sharded"])
def test_process_that_joins_a_run_from_step_0_loads_no_checkpoint(
    protect: Protect, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Its program would resume from the newest one; with FSDP2 all ranks have to load."""
    monkeypatch.setenv("RESUME", "newest")

    protect(name, "0@4:saved:kill 2@5:backward:kill 1@8:saved:kill")


def test_callback_that_communicates_is_refused(run: Run) -> None:
    """A new process would call it alone, and its collective meet another one."""
    start(run, "talking_callback")

    assert 1 in [run.wait(node) for node in run.agents], run.show()
    assert "allreduce in a callback, which a process that joins may call alone" in run.text()


@pytest.mark.parametrize(
    ("kind", "status", "words"),
    [("each", 1, "of rank 0"), ("new", 75, "of the process whose place it takes")],
)
def test_data_that_a_process_shuffles_anew_are_refused(
    run: Run, monkeypatch: pytest.MonkeyPatch, kind: str, status: int, words: str
) -> None:
    """Samples would be lost and come twice, and a process that joins would read others."""
    monkeypatch.setenv("KIND", kind)

    program = (str(Path(__file__).parent / "shuffled_program.py"),)
    run.start("n0", "--nproc-per-node", "2", program=program, warm="imports")

    assert run.wait("n0") == status, run.show()
    assert re.search(f"other training data, or another order of it, than that {words}", run.text())


@pytest.mark.slow
def test_without_dropout_two_ranks_log_what_the_plain_trainer_logs(tmp_path: Path) -> None:
    folders = run_plain_and_ours("trainer", tmp_path, DROPOUT="0")
    plain, ours = (json.loads((each / "end-0.json").read_text()) for each in folders)

    assert "model/parameter" not in plain
    assert {key: ours[key] for key in plain} == plain


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["SFT", "DPO"])
def test_trl_ends_with_the_bits_of_a_run_without_faults(
    protect: Protect, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    if not list(ROOT.glob(".venv-frameworks/lib/*/site-packages/trl")):
        pytest.skip("scripts/install-frameworks.sh has not run")
    monkeypatch.setenv("KIND", kind)

    protect("trl", "1@2:forward:exception 0@3:predict:kill 3@4:save:exception 2@7:gate:kill", kind)


@pytest.mark.slow
@pytest.mark.parametrize("place", ["forward", "predict"])
def test_trainer_survives_a_stopped_process(protect: Protect, place: str) -> None:
    protect("trainer", f"1@3:{place}:stop")
