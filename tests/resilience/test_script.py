"""What a program of one's own tells its run: with an agent, without one, and what is refused."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

import resilience
from resilience import script
from resilience.comm.page import Page, create_page
from resilience.inprocess.handles import AGENT_FD, EVENTS_FD, SLOT, WorkerHandles


@dataclass
class Agent:
    """What an agent gives a worker, and what it sees of it."""

    page: Page
    reading: int

    def events(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in os.read(self.reading, 1 << 20).splitlines()]


@pytest.fixture(autouse=True)
def _nobody_listens_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(script, "_say", None)


@pytest.fixture
def agent(monkeypatch: pytest.MonkeyPatch) -> Iterator[Agent]:
    reading, writing = os.pipe()
    page_file = create_page(2)
    handles = WorkerHandles(
        agent_file=-1, events_file=-1, events_path="/run/events.jsonl", page_file=page_file,
        transfer_file=-1, state_files=(), slot=-1, num_slots=2, num_local_ranks=2,
        transfer_bytes=0, node="n0", agent_pid=os.getpid(), recovers=False,
    )  # fmt: skip
    rank = {"RANK": "0", "WORLD_SIZE": "4", "TORCHELASTIC_RESTART_COUNT": "3"}
    own = {AGENT_FD: "-1", EVENTS_FD: str(writing), SLOT: "1"}
    for name, value in (handles.variables() | own | rank).items():
        monkeypatch.setenv(name, value)
    page = Page(page_file, 2)
    yield Agent(page, reading)
    page.close()
    for file in (reading, writing, page_file):
        os.close(file)


def test_steps_are_events_and_stand_in_the_page(agent: Agent) -> None:
    resilience.log(4, 2.5)
    resilience.log(np.int64(6), np.float32(0.5), lr=1e-3, note="warm", tokens=7)

    first, second = agent.events()
    assert {name: first[name] for name in ("event", "step", "rank", "generation", "node")} == {
        "event": "step", "step": 4, "rank": 0, "generation": 3, "node": "n0",
    }  # fmt: skip
    assert first["fields"] == {"loss": 2.5, "duration_s": None, "start": 0}
    fields = second["fields"]
    seconds = fields.pop("duration_s")
    assert 0 < seconds <= (second["time"] - first["time"]) / 2 + 0.1
    assert fields == {"loss": 0.5, "lr": 1e-3, "note": "warm", "tokens": 7, "start": 0}
    assert (agent.page.read(1).step, agent.page.read(0).step) == (6, 0)


def test_loss_that_needs_a_gradient_becomes_a_number_without_a_warning(agent: Agent) -> None:
    class Tensor:
        def item(self) -> float:
            return 2.5

        def __float__(self) -> float:
            raise AssertionError("torch warns here")

    resilience.log(1, Tensor())

    assert agent.events()[0]["fields"]["loss"] == 2.5


def test_a_step_that_is_told_again_has_no_duration(agent: Agent) -> None:
    for step in (5, 6, 6, 2, 3):
        resilience.log(step)

    told = [(each["step"], each["fields"]["duration_s"] is None) for each in agent.events()]
    assert told == [(5, True), (6, False), (6, True), (2, True), (3, False)]


def test_other_ranks_are_seen_to_get_on_and_write_nothing(
    agent: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "2")
    resilience.log(9, 1.0)

    os.set_blocking(agent.reading, False)
    with pytest.raises(BlockingIOError):
        agent.events()
    assert agent.page.read(1).step == 9


def test_an_agent_that_reads_nothing_holds_nobody_up_and_loses_no_step(agent: Agent) -> None:
    for step in range(2000):
        resilience.log(step, 1.0)

    told: list[dict[str, Any]] = []
    rest = b""
    while len(told) < 2000:
        if not rest or len(told) < 1999:
            resilience.log(2000)  # what the pipe had no room for goes with the next step
        *lines, rest = (rest + os.read(agent.reading, 1 << 16)).split(b"\n")
        told += map(json.loads, lines)
    assert [each["step"] for each in told[:2000]] == list(range(2000))


def test_a_program_without_an_agent_says_its_steps_on_rank_0(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    resilience.log(1, 2.5, lr=0.001, note="x")
    resilience.log(2)
    monkeypatch.setattr(script, "_say", None)
    monkeypatch.setenv("RANK", "1")
    resilience.log(3)

    assert capsys.readouterr().out == "step 1, loss 2.5, lr 0.001, note x\nstep 2\n"


def test_a_process_that_is_forked_finds_its_own_listener(agent: Agent) -> None:
    resilience.log(1)
    agent.events()
    child = os.fork()
    if child == 0:
        os.environ["RANK"] = "1"
        resilience.log(2)
        os._exit(0)

    assert os.waitpid(child, 0)[1] == 0
    assert agent.page.read(1).step == 2
    resilience.log(3)
    assert [each["step"] for each in agent.events()] == [3]


@pytest.mark.parametrize(
    ("step", "values", "error", "words"),
    [
        (1.5, {}, TypeError, "step 1.5 is no whole number"),
        (math.nan, {}, TypeError, "step nan is no whole number"),
        (-1, {}, ValueError, "step -1 is less than 0"),
        (1, {"loss": [1.0]}, TypeError, "loss is a list; want a number or text"),
        (1, {"rank": 0}, ValueError, "rank is the run's own"),
    ],
)
def test_what_is_no_step_is_refused(
    step: Any, values: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        resilience.log(step, **values)


def test_rank_info_is_that_of_torchrun_or_of_a_lone_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    alone = resilience.RankInfo(
        rank=0, world_size=1, local_rank=0, local_world_size=1, node_rank=0, num_nodes=1,
        start=0, restart=0,
    )  # fmt: skip
    assert resilience.rank_info() == alone

    for name, value in {"RANK": 5, "WORLD_SIZE": 8, "LOCAL_RANK": 1, "GROUP_RANK": 2}.items():
        monkeypatch.setenv(name, str(value))
    told = replace(alone, rank=5, world_size=8, local_rank=1, node_rank=2)
    assert resilience.rank_info() == told


def test_the_package_imports_nothing_but_the_standard_library() -> None:
    code = "import resilience, sys; print(*sorted({name.split('.')[0] for name in sys.modules}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)

    found = set(done.stdout.split()) - set(sys.stdlib_module_names)
    assert "resilience" in found, done.stderr
    assert not found & {"torch", "numpy", "pydantic", "launcher", "recipes_training"}
