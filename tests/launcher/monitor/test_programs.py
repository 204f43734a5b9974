"""What a script's events come to: its steps, its workers, its code."""

from __future__ import annotations

from functools import reduce
from io import StringIO
from typing import Any

import pytest
from rich.console import Console

from launcher.monitor.progress import render_line, render_state
from launcher.monitor.runstate import RunState, next_state, start_state
from launcher.report.page import build_page, summary_rows
from launcher.report.record import build_record
from launcher.report.summary import summary_text
from resilience.events import Event
from tests.launcher.run_events import event, on_node
from tests.launcher.script_job import script_job

NODES = ["node-1", "node-0"]
BEGUN = [
    event("run_started", 100.0),
    *(event("agent_started", 101.0, at=node, start="a") for node in NODES),
    on_node("generation_opened", 102.0, 0, number=0, world_size=4),
]
AGAIN = [
    event("fault_detected", 113.0, 3, reason="died", text="rank 3 was killed by SIGKILL"),
    on_node("generation_broken", 113.0, 0, reason="rank 3 was killed by SIGKILL"),
    on_node("generation_opened", 114.0, 1, number=1, world_size=4),
]
CODE = {"folder": "/fsx/lab", "commit": "1a2b3c4d5e6f", "is_dirty": True}
SHOWN_CODE = "/fsx/lab at 1a2b3c4 (with changes that are not committed)"


def told(number: int, time: float, generation: int = 0, **fields: Any) -> Event:
    return event("step", time, 0, step=number, generation=generation, duration_s=1.0, **fields)


def state_of(events: list[Event], max_steps: int | None = None) -> RunState:
    return reduce(next_state, events, start_state(script_job(max_steps=max_steps), NODES))


def drawn(state: RunState) -> str:
    console = Console(file=StringIO(), width=100)
    console.print(render_state(state, 120.0))
    assert isinstance(console.file, StringIO)
    return console.file.getvalue()


@pytest.mark.parametrize(
    ("events", "max_steps", "line"),
    [
        pytest.param([], None, "training (4 of 4 workers)", id="no-step"),
        pytest.param([told(7, 110.0)], None, "step 7, 1 s a step, no step for 10 s", id="no-loss"),
        pytest.param(
            [told(7, 119.0, loss=0.5)], 10, "step 7 of 10, loss 0.5000, 1 s a step, 3.0 s left",
            id="loss-and-end",
        ),
        pytest.param([told(0, 119.0)], None, "training (4 of 4 workers)", id="step-0"),
    ],
)  # fmt: skip
def test_a_line_has_what_the_program_tells(
    events: list[Event], max_steps: int | None, line: str
) -> None:
    state = state_of([*BEGUN, *events], max_steps)

    assert render_line(state, 120.0) == f"script/torch_ddp: {line}"
    assert [state.node_phase(node) for node in NODES] == ["training", "training"]
    assert (f"step {state.steps_text}" in drawn(state)) == bool(max_steps or state.num_steps)


def test_steps_that_are_done_again_are_lost() -> None:
    """A program that is started again keeps its number until it says another one."""
    before = [*BEGUN, told(37, 110.0), told(38, 112.0), *AGAIN]
    after = [told(21, 120.0, 1), told(22, 121.0, 1)]

    assert state_of(before).num_steps == 38
    (recovery,) = state_of([*before, *after]).recoveries
    assert (recovery.rank, recovery.step, recovery.steps_lost) == (3, 38, 18)


@pytest.mark.parametrize("losses", [{}, {"loss": 2.5, "lr": 0.1, "grad_norm": 1.0}])
def test_a_report_has_what_the_program_tells(losses: dict[str, float]) -> None:
    code = [on_node("code_seen", 101.5, 0, **CODE), event("code_seen", 101.6, at="node-1", **CODE)]
    steps = [told(number, 103.0 + number, **losses) for number in (1, 2, 3)]
    end = event("run_finished", 120.0, exit_status=0, reason="all nodes succeeded")

    record = build_record(script_job(max_steps=None), [*BEGUN, *code, *steps, end])

    rows = dict(summary_rows(record))
    assert (rows["steps"], rows["code"]) == ("3", SHOWN_CODE)
    assert ("last loss" in rows) == ("last learning rate" in rows) == bool(losses)
    assert not {"tokens per second", "samples per second"} & rows.keys()
    page = build_page(record, (), b"")
    assert ("<h2>Loss</h2>" in page) == ("<h2>Gradient norm</h2>" in page) == bool(losses)
    assert "did not get that far" not in page
    assert {span.rank: span.node for span in record.spans} == {
        0: "node-0", 1: "node-0", 2: "node-1", 3: "node-1",
    }  # fmt: skip
    assert "steps       3\n" in summary_text(record.state, None)


def again(number: int, time: float, rank: int = 3, **fields: Any) -> Event:
    """Return a step that another rank has told, or what rank 0 has printed."""
    return event("step", time, rank, step=number, duration_s=1.0, **fields)


@pytest.mark.parametrize(
    ("steps", "curve", "last"),
    [
        pytest.param(
            [told(1, 103.0, loss=3.0), again(1, 103.1, loss=3.0), told(2, 104.0, loss=2.0),
             again(2, 104.1, loss=2.0)],
            [(0, 3.0), (1, 2.0)], (2, 2.0), id="two-nodes",
        ),
        pytest.param(
            [told(1, 103.0, loss=3.0), told(2, 104.0, loss=2.0), again(1, 105.0, loss=3.0),
             again(2, 106.0, loss=2.0), told(3, 107.0, loss=1.0), again(3, 106.9, loss=1.0)],
            [(0, 3.0), (1, 2.0), (2, 1.0)], (3, 1.0), id="one-behind",
        ),
        pytest.param(
            [told(1, 103.0), told(2, 104.0), again(1, 103.5, 0, loss=3.0, printed=True),
             told(3, 105.0), again(3, 105.5, 0, loss=2.0, printed=True)],
            [(0, 3.0), (1, None), (2, 2.0)], (3, 2.0), id="logged-and-printed",
        ),
        pytest.param(
            [told(7, 103.0, loss=3.0), again(7, 103.1, loss=3.0), *AGAIN,
             told(5, 120.0, 1, loss=4.0)],
            [(6, 3.0), (4, 4.0)], (5, 4.0), id="started-again",
        ),
        pytest.param(
            [told(7, 103.0, loss=3.0), told(1, 104.0, loss=2.0)], [(6, 3.0), (0, 2.0)], (1, 2.0),
            id="went-back-by-itself",
        ),
    ],
)  # fmt: skip
def test_a_step_that_several_tell_is_shown_once(
    steps: list[Event], curve: list[tuple[int, float | None]], last: tuple[int, float]
) -> None:
    state = state_of([*BEGUN, *steps])
    record = build_record(script_job(max_steps=None), [*BEGUN, *steps])

    assert [(each.step, each.loss) for line in record.lines for each in line] == curve
    assert len(record.lines) == 1 + (curve[-1][0] < curve[0][0])
    assert (state.num_steps, state.loss) == last


@pytest.mark.parametrize(
    ("progress", "steps", "words"),
    [
        ("transformers", [], "trainer.progress matched no line\n"),
        ("transformers", [told(7, 110.0)], "7, trainer.progress matched no line\n"),
        ("transformers", [told(7, 110.0, printed=True)], "7\n"),
        (None, [], None),
    ],
)
def test_a_pattern_that_no_line_has_matched_is_told(
    progress: str | None, steps: list[Event], words: str | None
) -> None:
    start = start_state(script_job(max_steps=None, progress=progress), NODES)
    state = reduce(next_state, [*BEGUN, *steps], start)

    text = summary_text(state, None) + "\n"
    assert (f"steps       {words}" in text) if words else ("steps" not in text)


def test_a_program_that_told_no_steps_has_no_row_of_them() -> None:
    record = build_record(script_job(max_steps=None), BEGUN)

    assert "steps" not in dict(summary_rows(record))
    assert "steps" not in summary_text(record.state, None)
