"""What benchmarks/gpu.py shows: on a GPU where there is one, and as a program on every machine."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from benchmarks.events import Event
from benchmarks.gpu import (
    PARTS,
    TRAINER_STEPS,
    RanksRun,
    judge_losses,
    judge_sticky,
    judge_trainer,
    main,
    name_ends,
    show_bits,
    show_fork,
    show_gate,
    show_megatron,
    show_sticky,
    show_trainer,
)
from benchmarks.gpu_recipes import RecipeRun

CALM = [Event(9.0, "finished", rank, 10 + rank, {"digest": "d"}) for rank in (0, 1)]


def restored(rank: int, pid: int, role: str, source: int | None = None) -> Event:
    return Event(1.0, "restored", rank, pid, {"step": 4, "role": role, "source": source})


START = [restored(0, 10, "started"), restored(1, 11, "started")]
AFTER = [restored(0, 10, "kept"), restored(1, 12, "repaired", 0)]


def ended(*events: Event, end: str = "finished") -> RanksRun:
    return RanksRun(end=end, events=(*START, *events), log="")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_nothing_is_shown_and_nothing_fails(capsys: Any) -> None:
    assert main([]) == 0

    lines = capsys.readouterr().out.splitlines()
    assert sum("| not shown: no GPU |" in line for line in lines) == len(PARTS) == 6


def test_part_that_is_none_is_refused_with_those_there_are(capsys: Any) -> None:
    with pytest.raises(SystemExit) as ending:
        main(["--parts", "fork,forks"])

    assert ending.value.code == 2
    words = "argument --parts: no forks; known: fork, sticky, gate, bits, trainer, megatron"
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("run", "problems"),
    [
        pytest.param(ended(*AFTER, *CALM), [], id="as-it-has-to-be"),
        pytest.param(
            ended(AFTER[0], restored(1, 11, "repaired", 0), *CALM),
            ["the victim was not replaced"],
            id="same-process",
        ),
        pytest.param(
            ended(restored(0, 13, "repaired", 1), AFTER[1], *CALM),
            ["the other rank was replaced", "the other did not keep its state"],
            id="both-replaced",
        ),
        pytest.param(
            ended(AFTER[0], restored(1, 12, "started"), *CALM),
            ["the victim was not repaired from the other"],
            id="state-from-elsewhere",
        ),
        pytest.param(
            ended(*AFTER, *(Event(9.0, "finished", 0, 10, {"digest": "other"}),)),
            ["the bits differ"],
            id="other-bits",
        ),
        pytest.param(
            ended(*AFTER, end="stalled"),
            ["the run did not finish: stalled", "the bits differ"],
            id="stalled",
        ),
    ],
)
def test_what_is_missing_of_a_rank_whose_kernel_failed(run: RanksRun, problems: list[str]) -> None:
    assert judge_sticky(CALM, run) == problems


@pytest.mark.parametrize(
    ("runs", "seen"),
    [
        pytest.param([("finished", "d"), ("finished", "d")], "same bits", id="same"),
        pytest.param([("finished", "d"), ("finished", "e")], "other bits", id="other"),
        pytest.param([("finished", "d"), ("stalled", "d")], "finished; stalled", id="not-finished"),
    ],
)
def test_what_runs_that_should_be_the_same_came_to(runs: Any, seen: str) -> None:
    assert name_ends(runs) == seen


@pytest.mark.parametrize(
    ("losses", "problem"),
    [
        pytest.param([5.0, 4.0, 3.0, 2.0, 1.0005], None, id="near"),
        pytest.param(
            [5.0, 4.0, 3.1, 2.0, 1.0],
            "loss 3.100000 at step 2, and 3.000000 on a CPU",
            id="far",
        ),
        pytest.param(
            [5.0, float("nan"), 3.0, 2.0, 1.0],
            "loss nan at step 1, and 4.000000 on a CPU",
            id="not-a-number",
        ),
        pytest.param([5.0, 4.0], "2 steps, and 5 on a CPU", id="ended-before"),
    ],
)
def test_losses_of_a_gpu_are_those_of_a_cpu(losses: list[float], problem: str | None) -> None:
    assert judge_losses(losses, [5.0, 4.0, 3.0, 2.0, 1.0]) == problem


def recipe_run(**fields: Any) -> RecipeRun:
    known: dict[str, Any] = {
        "status": 0,
        "losses": (5.0,) * TRAINER_STEPS,
        "num_faults": 0,
        "digest": "d",
        "last_words": "word",
    }
    return RecipeRun(**known | fields)


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        pytest.param({}, None, id="as-it-has-to-be"),
        pytest.param(
            {"status": 75, "losses": ()},
            "with faults: status 75, 0 steps; word",
            id="failed",
        ),
        pytest.param({"digest": ""}, "with faults: status 0, 40 steps; word", id="no-weights"),
        pytest.param({"num_faults": 0}, "0 and 0 faults were detected", id="no-faults"),
        pytest.param({"digest": "e"}, "other losses or weights", id="other-weights"),
        pytest.param(
            {"losses": (5.0,) * 39 + (5.1,)}, "other losses or weights", id="other-losses"
        ),
    ],
)
def test_what_a_run_with_faults_lacks(fields: dict[str, Any], problem: str | None) -> None:
    faulty = recipe_run(**{"num_faults": 2} | fields)

    assert judge_trainer(recipe_run(), faulty) == problem
    assert judge_trainer(recipe_run(), recipe_run(num_faults=2)) is None


def test_a_broken_generation_keeps_the_gate_shut_on_a_cpu_as_well() -> None:
    assert [row.is_shown for row in show_gate("cpu")] == [True, True, True]


@pytest.mark.slow
def test_program_that_shares_a_device_runs_on_a_cpu() -> None:
    """Its zygote, a rank that cannot read its state and is replaced, and its bits."""
    rows = [
        *show_fork("cpu"),
        *show_sticky("cpu"),
        *show_bits("cpu", flags=["product"], num_steps=5),
    ]

    assert [row.is_shown for row in rows] == [True, True, True], rows
    assert "its report failed" in rows[1].seen


@pytest.mark.slow
def test_program_that_runs_recipes_runs_on_a_cpu() -> None:
    rows = show_trainer("cpu")

    assert [row.is_shown for row in rows] == [True] * 5, rows


@pytest.mark.slow
def test_program_that_runs_megatron_runs_on_a_cpu() -> None:
    rows = show_megatron("cpu")

    assert [row.is_shown for row in rows] == [True, True], rows
    assert all(row.seen.startswith("losses 5.") for row in rows), rows


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("part", PARTS)
def test_part_holds_on_a_gpu(part: str) -> None:
    rows = PARTS[part][1]("cuda")

    assert [row for row in rows if row.is_shown is False] == []
    assert any(row.is_shown for row in rows), rows
