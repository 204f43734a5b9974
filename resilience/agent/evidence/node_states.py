"""What the platform says of a silent node: it is off, or has booted since.

A command of the user's or the launcher's is asked (`--node-state-command`), in a thread of its
own: when a silence begins, and once more when it has lasted for as long as patience does, since a
machine takes minutes to boot. No word is none: nothing rests on it.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from resilience.agent.coordination.events import NodeEnded
from resilience.agent.evidence.questions import Questions

ANSWER_DEADLINE_S = 5.0
CLOCKS_APART_S = 60.0
"""By how much another machine's clock may differ from this one's."""
_CLOSE_S = 1.0
_BOOTED = re.compile(r"booted (\d{1,11}(?:\.\d{1,9})?)")


def judge_word(word: str, *, heard_s: float, now_s: float) -> str | None:
    """Return why the processes of a node have ended, None where the word is no evidence of it.

    A boot counts that comes after `heard_s`, when the agent was heard at the latest, by more than
    clocks differ. One that is still to come is told by a clock that is wrong. Times are Unix
    seconds, `heard_s` and `now_s` by this machine's clock. Pure.
    """
    if word == "off":
        return "its node is off"
    found = _BOOTED.fullmatch(word)
    if found is None:
        return None
    booted_s = float(found[1])
    is_later = booted_s - heard_s > CLOCKS_APART_S
    return "its node has booted since" if is_later and booted_s - now_s <= CLOCKS_APART_S else None


@dataclass(slots=True)
class _Silence:
    """An agent that is not heard."""

    starts: frozenset[str]
    heard_s: float
    """Not later than this it was heard, in Unix seconds."""
    again_s: float
    """When it is asked for once more."""


class NodeStates:
    """Asks about silent agents. Its methods are for the agent's thread and never wait."""

    def __init__(self, command: Sequence[str], *, patience_s: float) -> None:
        self._command = tuple(command)
        self._patience_s = patience_s
        self._silences: dict[str, _Silence] = {}
        self._questions: Questions[NodeEnded] = Questions("node-states")
        self._process: subprocess.Popen[bytes] | None = None
        self._is_closed = False

    def fileno(self) -> int:
        """Return a descriptor that is readable while `answers` has something."""
        return self._questions.fileno()

    def ask(self, doubted: Mapping[str, frozenset[str]]) -> None:
        """Ask about agents that are silent now, each twice in a silence; `NodeEnded` may follow."""
        if not self._command:
            return
        now_s = time.monotonic()
        known = {
            node: silence
            for node, silence in self._silences.items()
            if doubted.get(node) == silence.starts
        }
        for node, starts in doubted.items():
            if node not in known:
                known[node] = _Silence(starts, time.time(), now_s + self._patience_s)
            elif now_s >= known[node].again_s:
                known[node].again_s = float("inf")
            else:
                continue
            self._questions.ask(partial(self._judge, node, known[node]))
        self._silences = known

    def answers(self) -> list[NodeEnded]:
        """Return what was found out since the last call."""
        return self._questions.answers()

    def close(self) -> None:
        """Ask no more, and end the command that is asked."""
        self._is_closed = True
        if self._process is not None:
            _kill(self._process)
        self._questions.close(_CLOSE_S)

    def _judge(self, node: str, silence: _Silence) -> NodeEnded | None:
        word = "" if self._is_closed else self._run(node)
        reason = judge_word(word, heard_s=silence.heard_s, now_s=time.time())
        if reason is None or self._is_closed:
            return None
        return NodeEnded(node=node, starts=silence.starts, reason=reason)

    def _run(self, node: str) -> str:
        """Return what the command says of a node; empty where it does not say it in time."""
        try:
            process = subprocess.Popen(
                [*self._command, node],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        except OSError:
            return ""
        with process:
            self._process = process
            if self._is_closed:
                _kill(process)
            try:
                output, _ = process.communicate(timeout=ANSWER_DEADLINE_S)
            except subprocess.TimeoutExpired:
                _kill(process)
                return ""
        return output.decode(errors="replace").removesuffix("\n") if process.returncode == 0 else ""


def _kill(process: subprocess.Popen[bytes]) -> None:
    """End a command that has not ended, and what it has started."""
    if process.returncode is None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
