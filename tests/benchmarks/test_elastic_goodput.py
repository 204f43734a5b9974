"""The goodput of an elastic run under nodes that come and go: its trace and its arithmetic."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any
from unittest.mock import Mock, call

import pytest
import torch

from benchmarks.elastic_goodput import ELASTIC, SLEEP_S, Model, write_run
from benchmarks.elastic_trace import (
    FOREVER_S,
    GAP_S,
    NODES_MAX,
    NODES_MIN,
    NOTICE_S,
    NUM_AT_FIRST,
    SETTLED_S,
    Happening,
    Stay,
    Step,
    account,
    capacity,
    goodput,
    keep_steps,
    plan_happenings,
    plan_stays,
    until_ended,
)
from benchmarks.recovery_peers.slow_trainer import SlowWatch
from benchmarks.recovery_peers.small_model import SmallModel, descend
from resilience.events import Event

WORKERS = "benchmarks.recovery_peers"
SECONDS = 180.0
SEEDS = range(1, 21)


def event(name: str, at_s: float, **values: Any) -> Event:
    where = {"node": "node-0", "rank": 0, "generation": 0, "step": None}
    given = {key: values.pop(key) for key in where if key in values}
    return Event(time=at_s, event=name, fields=values, **{**where, **given})


def step(number: int, at_s: float, generation: int = 0, duration_s: float | None = 1.0) -> Event:
    return event("step", at_s, step=number, generation=generation, duration_s=duration_s)


def joined(at_s: float, node: str) -> Event:
    return Event(
        time=at_s, event="node_joined", node="node-0", rank=None, generation=-1, step=None,
        fields={"node": node},
    )  # fmt: skip


def ready(generation: int, *slots: int) -> list[Event]:
    return [
        event("process_group_ready", 0.0, node=f"node-{slot}", generation=generation)
        for slot in slots
    ]


@pytest.mark.parametrize("seed", SEEDS)
def test_there_are_always_as_many_nodes_as_there_may_be(seed: int) -> None:
    """And one goes only beside one that has been there for a while."""
    stays = plan_stays(seed, SECONDS)

    for each in plan_happenings(stays):
        here = [one for one in stays if one.came_s <= each.at_s < one.gone_s]
        staying = [one for one in here if one.asked_s is None or each.at_s < one.asked_s]
        assert len(staying) >= NODES_MIN
        assert len(here) <= NODES_MAX
        assert len({one.node for one in here}) == len(here)
    for leaving in (one for one in stays if one.gone_s < FOREVER_S):
        at_s = leaving.gone_s if leaving.asked_s is None else leaving.asked_s
        others = [one for one in stays if one is not leaving and one.came_s <= at_s]
        staying = [one for one in others if at_s < (one.asked_s or one.gone_s)]
        assert any(one.came_s == 0 or at_s - one.came_s > SETTLED_S for one in staying)


def test_nodes_come_and_go_as_often_as_is_said_and_half_of_them_are_asked() -> None:
    traces = [plan_stays(seed, SECONDS) for seed in SEEDS]

    for stays in traces:
        gone = [each for each in stays if each.gone_s < FOREVER_S]
        asked = [each for each in gone if each.asked_s is not None]
        num_changes = len(stays) - NUM_AT_FIRST + len(gone)
        assert num_changes == SECONDS / GAP_S
        assert abs(len(asked) - len(gone) / 2) <= 0.5
        assert all(each.gone_s == (each.asked_s or 0) + NOTICE_S for each in asked)
    assert len(set(traces)) == len(traces)
    assert plan_stays(1, SECONDS) == traces[0]


def test_what_is_done_to_nodes_is_in_order() -> None:
    stays = (
        Stay(node="node-0", asked_s=4.0, gone_s=9.0),
        Stay(node="node-1", gone_s=5.0),
        Stay(node="node-2", came_s=6.0),
    )

    assert plan_happenings(stays) == [
        Happening(4.0, "ask", "node-0"),
        Happening(5.0, "kill", "node-1"),
        Happening(6.0, "start", "node-2"),
        Happening(9.0, "kill", "node-0"),
    ]
    assert capacity(stays, 20.0) == 9 + 5 + 14


def test_nodes_that_do_as_much_as_one_alone_have_a_goodput_of_one() -> None:
    stays = (Stay(node="node-0"), Stay(node="node-1", gone_s=10.0))

    assert goodput(60, stays, seconds=20.0, alone_per_s=2.0) == 1.0
    assert goodput(30, stays, seconds=20.0, alone_per_s=2.0) == 0.5


def test_a_step_that_is_done_again_counts_once_and_then() -> None:
    events = [step(number, 100.0 + number) for number in range(6)]
    events += [step(3, 110.0, 1), step(4, 111.0, 1), step(5, 130.0, 1)]

    assert keep_steps(events, 101.5, 20.0) == [
        Step(number=2, end_s=0.5, generation=0),
        Step(number=3, end_s=8.5, generation=1),
        Step(number=4, end_s=9.5, generation=1),
    ]


def test_steps_from_before_the_window_that_are_done_again_in_it_do_not_count() -> None:
    events = [step(number, 100.0 + number) for number in range(6)]
    events += [step(4, 110.0, 1), step(5, 111.0, 1), step(6, 112.0, 1)]

    assert [each.number for each in keep_steps(events, 105.0, 20.0)] == [6]


def test_what_rank_0_says_once_more_of_the_last_step_is_no_step() -> None:
    events = [step(0, 1.0), step(0, 5.0, 1, duration_s=None), step(1, 6.0, 1)]

    assert keep_steps(events, 0.0, 10.0) == [
        Step(number=0, end_s=1.0, generation=0),
        Step(number=1, end_s=6.0, generation=1),
    ]


def check_account(
    events: list[Event], stays: tuple[Stay, ...], seconds: float, expected: dict[str, float]
) -> None:
    """Assert what was lost; one node alone takes a step in two seconds, at 100 s it begins."""
    steps = keep_steps(events, 100.0, seconds)

    lost = account(steps, stays, events, began_s=100.0, seconds=seconds, alone_per_s=0.5)

    assert {what: each for what, each in lost.items() if abs(each) > 1e-9} == pytest.approx(
        expected
    )
    assert sum(lost.values()) + len(steps) / 0.5 == pytest.approx(capacity(stays, seconds))


def test_a_killed_node_costs_the_step_that_was_broken_and_a_node_that_starts_itself() -> None:
    stays = (
        Stay(node="node-0"),
        Stay(node="node-1", gone_s=1.5),
        Stay(node="node-1", came_s=4.0),
    )
    events = [
        *ready(0, 0, 1), *ready(1, 0), *ready(2, 0, 1),
        step(10, 101.0), event("generation_broken", 101.5, generation=0),
        step(11, 103.7, 1), step(12, 105.7, 1), joined(107.0, "node-1"),
        step(13, 107.8, 1), step(14, 109.0, 2), step(15, 110.0, 2),
    ]  # fmt: skip

    check_account(
        events, stays, 10.5,
        {
            # Half a second of the one that was killed, and what the other takes beyond a step.
            "a lost node": 0.5 + 0.7,
            "steps of 1": 0.1,
            "a node that starts": 3.0,
            "a node that waits": 0.8,
            "an agreed change": 0.4,
            "the window's end": 1.0,
        },
    )  # fmt: skip


def test_a_node_that_goes_before_it_has_to_costs_what_is_left_of_its_time() -> None:
    stays = (Stay(node="node-0"), Stay(node="node-1", asked_s=0.5, gone_s=5.5))
    events = [*ready(0, 0, 1), *ready(1, 0)]
    events += [step(10, 101.0), step(11, 102.0), step(12, 104.1, 1), step(13, 106.1, 1)]

    check_account(events, stays, 6.1, {"an agreed change": 0.1, "a node that is to go": 2.1 + 1.4})


def test_a_slow_watch_tells_the_other_one_of_all_and_sleeps_before_each_forward() -> None:
    watch = Mock(places=("forward",))
    slow = SlowWatch(watch, watch.sleep)

    slow.forward(1, is_last=True)
    slow.backward(1)
    slow.reach("reduction")

    assert watch.mock_calls == [
        call.forward(1, is_last=True), call.sleep(), call.backward(1), call.reach("reduction"),
    ]  # fmt: skip
    assert (slow.places, slow.requests()) == (("forward",), watch.requests.return_value)


@pytest.mark.parametrize(
    ("model", "preloaded", "trainer"),
    [("small", f"{WORKERS}.small_trainer", "small_trainer"),
     ("llama", "recipes_training.preload", "slow_trainer")],
)  # fmt: skip
def test_every_node_of_a_run_trains_with_slow_micro_batches(
    tmp_path: Path, model: Model, preloaded: str, trainer: str
) -> None:
    scripts = [path.read_text() for path in write_run(tmp_path, ELASTIC, model).glob("node-*.sh")]

    assert len(scripts) == NODES_MAX
    for text in scripts:
        modules = re.findall(r"-m \\\n  (\S+) ", text)
        assert modules == ["resilience.agent", f"{WORKERS}.{trainer}"]
        assert re.findall(r"--preload=(\S+)", text) == [preloaded]
    assert SLEEP_S == 0.02


def test_a_node_that_was_asked_is_there_until_it_has_ended_and_a_killed_one_until_then() -> None:
    stays = (
        Stay(node="node-0", asked_s=4.0, gone_s=9.0),
        Stay(node="node-1", gone_s=5.0),
        Stay(node="node-0", came_s=12.0, asked_s=20.0, gone_s=25.0),
        Stay(node="node-2", asked_s=6.0, gone_s=11.0),
    )
    # One is seen to have ended a moment after it was killed, and one was never seen.
    ended = [("node-0", 6.5), ("node-1", 5.1), ("node-0", 25.2)]

    gone_s = [each.gone_s for each in until_ended(stays, ended)]

    assert gone_s == [6.5, 5.0, 25.0, 11.0]
    assert [each.asked_s for each in until_ended(stays, ended)] == [4.0, None, 20.0, 6.0]


def test_the_small_model_learns() -> None:
    model = SmallModel()
    model.fill()
    rows = torch.arange(33)[None] % 7
    parameters = list(model.parameters())
    momenta = [torch.zeros_like(each) for each in parameters]

    losses = []
    for _ in range(20):
        model.zero_grad()
        loss = model(rows)
        loss.backward()
        descend(parameters, momenta, 0.1)
        losses.append(float(loss.detach()))

    assert losses[-1] < losses[0] / 2
