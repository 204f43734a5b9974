"""What a command says of silent nodes, and what is believed of it."""

from __future__ import annotations

import os
import select
from pathlib import Path

import pytest

from resilience.agent.coordination.events import NodeEnded
from resilience.agent.evidence.node_states import CLOCKS_APART_S, NodeStates, judge_word
from tests.cases import slow

HEARD_S = 1_700_000_000.0
DOUBTED = {"n1": frozenset({"a"})}


@pytest.mark.parametrize(
    ("word", "reason"),
    [
        ("off", "its node is off"),
        (f"booted {HEARD_S + 300}", "its node has booted since"),
        (f"booted {HEARD_S + 301:.0f}", "its node has booted since"),
        pytest.param(f"booted {HEARD_S + CLOCKS_APART_S}", None, id="clocks"),
        pytest.param(f"booted {HEARD_S - 9}", None, id="before"),
        pytest.param(f"booted {HEARD_S + 900}", None, id="still-to-come"),
        *((word, None) for word in ("", "OFF", "off ", "on", "booted", "booted x", "booted -1")),
        *((word, None) for word in ("off\noff", "booted 1e99", "booted inf", " off")),
    ],
)
def test_word_of_a_node(word: str, reason: str | None) -> None:
    assert judge_word(word, heard_s=HEARD_S, now_s=HEARD_S + 600) == reason


def open_states(path: Path, text: str, patience_s: float = 600.0) -> NodeStates:
    script = path / "script"
    script.write_text(f"#!/bin/sh\necho $2 >>{path}/asked\n{text}\n")
    script.chmod(0o755)
    return NodeStates([str(script), "-n"], patience_s=patience_s)


def wait_for_answers(states: NodeStates) -> list[NodeEnded]:
    while not (found := states.answers()):
        assert select.select([states], [], [], 60)[0]
    return found


def test_node_that_is_off_is_dead(tmp_path: Path) -> None:
    states = open_states(tmp_path, "echo off")

    states.ask(DOUBTED)

    assert wait_for_answers(states) == [
        NodeEnded(node="n1", starts=DOUBTED["n1"], reason="its node is off")
    ]
    states.close()


@pytest.mark.parametrize(
    "text", ["echo off; exit 1", "echo no", "exit 0", slow("sleep 1000; echo off")]
)
def test_other_words_are_none(tmp_path: Path, text: str) -> None:
    """Nor is a command that does not answer in time. The next one's word comes after them."""
    states = open_states(tmp_path, f"[ $2 = n2 ] && echo off && exit 0\n{text}")

    states.ask({**DOUBTED, "n2": frozenset({"b"})})

    assert [each.node for each in wait_for_answers(states)] == ["n2"]
    states.close()


def test_it_is_asked_at_the_beginning_of_a_silence_and_once_more(tmp_path: Path) -> None:
    states = open_states(tmp_path, "[ $2 = end ] && echo off", patience_s=0.0)

    for _ in range(9):
        states.ask(DOUBTED)
    states.ask({})
    states.ask(DOUBTED)
    states.ask({"end": frozenset({"z"})})
    wait_for_answers(states)

    assert (tmp_path / "asked").read_text().split() == ["n1", "n1", "n1", "end"]
    states.close()


def test_command_that_hangs_ends_with_its_agent(tmp_path: Path) -> None:
    told = tmp_path / "told"
    os.mkfifo(told)
    states = open_states(tmp_path, f"echo $$ >{told}\nexec sleep 1000")
    states.ask(DOUBTED)
    end = os.pidfd_open(int(told.read_text()))

    states.close()

    assert select.select([end], [], [], 60)[0]
    os.close(end)


def test_without_a_command_nobody_is_asked() -> None:
    states = NodeStates((), patience_s=1.0)

    states.ask(DOUBTED)

    assert states.answers() == []
    states.close()
