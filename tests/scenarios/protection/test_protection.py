"""Programs of a user's kind, protected, through faults: the bits of the run without them."""

from __future__ import annotations

import random
import re
from typing import Any

import pytest

from tests.resilience.agent.runs import Run
from tests.scenarios.protection.conftest import FOLDER, Protect

PLACES = ("forward", "backward", "reduced", "gate", "gate_passed", "before_update", "after_update")
MORE = {"ddp": ("tail", "scheduler"), "fsdp": ("tail",), "many": ("tail", "evaluation")}


@pytest.mark.parametrize(
    ("name", "faults"),
    [
        pytest.param(
            "ddp",
            "1@3:forward:exception 2@5:gate:kill 0@7:after_update:kill 3@9:scheduler:exception "
            "0@12:below:kill",
            id="ddp",
        ),
        pytest.param(
            "fsdp",
            "1@3:backward:exception 2@5:gate_passed:kill 0@8:after_update:kill",
            id="fsdp",
        ),
        pytest.param(
            "many",
            "1@2:forward:exception 0@4:tail:kill 2@3:evaluation:kill 3@9:below:kill "
            "1@12:evaluated:kill",
            id="many",
        ),
        pytest.param(
            "talking",
            "2@-1:talking:kill 1@2:forward:kill 0@5:gate:kill 3@7:backward:kill",
            id="talking",
        ),
    ],
)
def test_program_ends_with_the_bits_of_a_run_without_faults(
    protect: Protect, name: str, faults: str
) -> None:
    protect(name, faults)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("name", MORE)
def test_program_survives_faults_at_random_places(protect: Protect, name: str, seed: int) -> None:
    protect(name, draw_faults(name, random.Random(f"{name} {seed}")))


@pytest.mark.slow
@pytest.mark.parametrize("place", ["set_up", "forward", "gate"])
def test_program_survives_a_stopped_process(protect: Protect, place: str) -> None:
    protect("ddp", f"1@{-1 if place == 'set_up' else 3}:{place}:stop")


@pytest.mark.parametrize(
    ("way", "words"),
    [
        ("caught", "in step 3 of 8, epoch 0, batch 3, with"),
        pytest.param("also", ", Meter ", marks=pytest.mark.slow),
        pytest.param("epochs", "in step 3 of 8, epoch ", marks=pytest.mark.slow),
        pytest.param("until", "in step 0 of ", marks=pytest.mark.slow),
        pytest.param("stop", "epoch 0, batch 3, with", marks=pytest.mark.slow),
        pytest.param("functions", "batch 0, with functions every ", marks=pytest.mark.slow),
        pytest.param("checkpoints", "different steps: 0, 2; have", marks=pytest.mark.slow),
        pytest.param("protected twice", "protect a second time in", marks=pytest.mark.slow),
        pytest.param("protected later", "protect a second time in", marks=pytest.mark.slow),
    ],
)
def test_rank_that_does_something_else_ends_the_run_with_its_words(
    run: Run, way: str, words: str
) -> None:
    """Else ranks would wait for each other, or train on different steps."""
    program = (str(FOLDER / "differing_program.py"),)
    options = ("--nproc-per-node", "2")
    run.start("n0", *options, program=program, warm="imports", variables={"WAY": way})

    assert run.wait() == 1, run.show()
    assert words in run.text(), run.show()
    assert re.search(r"this rank is at .*, and rank [01] at|different|second time", run.text())
    assert "was left at step" not in run.text(), "an error ended the loop"
    assert {each.generation for each in run.events() if each.event == "generation_opened"} == {0}
    run.assert_nothing_left()


def draw_faults(name: str, source: random.Random) -> str:
    """Return four faults at places that the program reaches, each on a rank and in a step."""
    found: dict[Any, str] = {}
    while len(found) < 4:
        place = source.choice((*PLACES, *MORE[name]))
        step = source.choice((3, 6, 12)) if place == "evaluation" else source.randrange(16)
        if name == "many" and step in (4, 9) and place in ("reduced", "before_update"):
            continue  # the scaler leaves these steps out
        if name == "many" and step in (4, 9) and place == "after_update":
            continue
        rank = source.randrange(4)
        kind = source.choice(("exception", "kill"))
        found[rank, step] = f"{rank}@{step}:{place}:{kind}"
    return " ".join(found.values())
