"""Rules of membership, each with the one pure function that holds it and what is there without it.

Whoever looks for what goes wrong then, by simulation or by model, is to find it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from resilience.agent.connections.transport import Gone, Heard
from resilience.agent.coordination import founding, succession, votes
from resilience.agent.coordination.events import Heeded
from resilience.agent.coordination.founding import Record
from resilience.agent.coordination.membership import State
from resilience.agent.coordination.standing import Standing
from resilience.agent.coordination.view import MembershipView, Result
from resilience.comm.messages import NO_BALLOT, Goodbye, Join

_find_verdict, _judge, _join, _succeed = (
    votes.find_verdict,
    founding.judge,
    Standing.join,
    succession.decide,
)


def whoever_comes_begins_a_run(
    found: Record | None, *, newcomers: tuple[str, ...], **_: object
) -> Record:
    begun = _judge(None, run="run", newcomers=newcomers, unchanged_s=0.0)
    assert isinstance(begun, Record)
    return begun


def any_member_goes_on(state: State) -> str:
    has_any = bool(state.voters & set(state.members.nodes))
    return votes.GOES_ON if has_any else _find_verdict(state)


def half_goes_on(state: State) -> str:
    verdict = _find_verdict(state)
    return votes.GOES_ON if verdict == votes.TIE else verdict


def standbys_go_on(state: State) -> str:
    verdict = _find_verdict(state)
    is_alone = verdict == votes.WAITS and not state.voters & set(state.members.nodes)
    return votes.GOES_ON if is_alone else verdict


def agreements_lapse(standing: Standing, **words: Any) -> Join:
    return replace(_join(standing, **words), ballot=NO_BALLOT, agreed=None)


def any_place_is_given_away(state: State, *, is_late: bool) -> set[int]:
    return {place for place, node in enumerate(state.nodes) if node is None} - state.awaited


def end_of_file_is_death(view: MembershipView, event: Heeded, now_s: float) -> Result:
    if isinstance(event, Gone) and event.peer in view.lines:
        event = Heard(peer=event.peer, message=Goodbye(reason=event.reason))
    return _succeed(view, event, now_s)


RULES: dict[str, tuple[str, Callable[..., object], tuple[object, ...]]] = {
    "the founding record": ("judge", whoever_comes_begins_a_run, (founding,)),
    "more than half": ("find_verdict", any_member_goes_on, (votes,)),
    "the record of a tie": ("find_verdict", half_goes_on, (votes,)),
    "agreements never lapse": ("join", agreements_lapse, (Standing,)),
    "evidence for standbys alone": ("find_verdict", standbys_go_on, (votes,)),
    "patience for the last holder": ("find_given", any_place_is_given_away, (votes,)),
    "end of file is silence": ("decide", end_of_file_is_death, (succession,)),
}
"""By rule, the function's name, what stands in for it, and where it is to be put."""


def switch_off(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, without, owners = RULES[rule]
    for owner in owners:
        monkeypatch.setattr(owner, name, without)
