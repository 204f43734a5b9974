"""What is decided about a service, and that no order of events leads astray."""

from __future__ import annotations

import random
import signal
from dataclasses import dataclass, field, replace

import pytest

from resilience.agent.services.supervision import (
    RESTART_PAUSE_S,
    SLOW_END_S,
    Action,
    Announced,
    Answered,
    Asked,
    AskNews,
    Ended,
    Event,
    Find,
    GiveUp,
    LackTold,
    Lose,
    Missed,
    Outdated,
    Refused,
    Say,
    SendSignal,
    ServiceLimits,
    ServicePhase,
    StartProcess,
    TakenOver,
    TellSlowEnd,
    TimePassed,
    Tried,
    Unstarted,
    begin,
    decide,
)

LIMITS = ServiceLimits(ready_s=60.0, end_s=65.0, remove_s=165.0)
EXTERNAL = ServiceLimits(is_external=True)
STORING = ServiceLimits(ready_s=60.0, end_s=65.0, remove_s=165.0, try_s=45.0)


@dataclass
class Story:
    """A service to which one event happens after the other."""

    limits: ServiceLimits = LIMITS
    now_s: float = 1000.0
    actions: list[Action] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.state, actions = begin(self.now_s, self.limits)
        self.actions = list(actions)

    def tell(self, event: Event, after_s: float = 0.0) -> list[Action]:
        """Return what is done because of an event."""
        self.now_s += after_s
        self.state, actions = decide(self.state, event, self.now_s, self.limits)
        return list(actions)


def told_to_end(number: signal.Signals) -> list[Action]:
    """Return how a process is told that may be a stopped one."""
    return [SendSignal(number), SendSignal(signal.SIGCONT)]


def told(limits: ServiceLimits, *events: Event) -> Story:
    """Return a service to which this has happened."""
    story = Story(limits)
    for event in events:
        story.tell(event)
    return story


def ready(limits: ServiceLimits = LIMITS) -> Story:
    """Return a service that was started and answers."""
    story = told(limits, Missed(), Announced(), Answered(), Tried(""))
    assert story.state.phase is ServicePhase.READY
    return story


def test_a_service_is_looked_for_before_it_is_started() -> None:
    story = Story()

    assert story.actions == [Find()]
    assert story.tell(Missed()) == [StartProcess()]
    assert story.tell(Announced()) == [Find()]
    assert story.tell(Answered()) == []
    assert story.state.was_ready


def test_one_that_an_earlier_agent_has_left_goes_on() -> None:
    story = Story()

    assert story.tell(Answered(is_found=True)) == [Say("of an earlier agent goes on")]
    assert story.tell(Asked(removes=False)) == told_to_end(signal.SIGINT)


def test_one_of_another_start_is_ended_first() -> None:
    story = Story()

    assert story.tell(Outdated(is_ending=False)) == told_to_end(signal.SIGINT)
    assert story.tell(Ended(None)) == [Find()]
    assert story.tell(Missed()) == [StartProcess()]


def test_one_that_is_about_to_end_is_waited_for() -> None:
    story = Story()

    assert story.tell(Outdated(is_ending=True)) == []
    assert story.tell(TimePassed(), after_s=30.0) == []
    assert story.tell(Ended(None)) == [Find()]


def test_one_that_ends_is_started_again_after_a_pause() -> None:
    story = ready()

    assert story.tell(Ended(-9), after_s=10.0) == [Say("ended with SIGKILL; starting it again")]
    assert story.tell(TimePassed(), after_s=0.5 * RESTART_PAUSE_S) == []
    assert story.tell(TimePassed(), after_s=RESTART_PAUSE_S) == [Find()]
    assert story.tell(Missed()) == [StartProcess()]


@pytest.mark.parametrize(
    ("events", "reason"),
    [
        ((Missed(), Ended(2)), "refused to start (exit status 2)"),
        ((Missed(), Unstarted("cannot be started")), "cannot be started"),
        ((Refused("wrong token"),), "wrong token"),
    ],
    ids=["wrong-command", "no-command", "refused"],
)
def test_what_would_come_again_is_not_tried_again(events: tuple[Event, ...], reason: str) -> None:
    story = Story()

    *_, actions = [story.tell(event) for event in events]

    assert actions == [GiveUp(reason)]
    assert story.state.phase is ServicePhase.OVER


@pytest.mark.parametrize("was_ready", [False, True])
def test_ten_short_lives_in_a_row_are_the_last(was_ready: bool) -> None:
    story = ready() if was_ready else told(LIMITS, Missed())
    for _ in range(LIMITS.short_lives_max - 1):
        assert isinstance(story.tell(Ended(1))[0], Say)
        story.tell(TimePassed(), after_s=RESTART_PAUSE_S)
        story.tell(Missed())

    (given_up,) = story.tell(Ended(1))

    assert given_up == GiveUp("ended with exit status 1, 10 times in a row at once")
    assert story.state.was_ready is was_ready


def test_a_long_life_counts_anew() -> None:
    story = ready()
    for _ in range(3 * LIMITS.short_lives_max):
        after_s = 10.0 if story.state.num_short_lives == LIMITS.short_lives_max - 1 else 0.0
        assert isinstance(story.tell(Ended(1), after_s=after_s)[0], Say)
        story.tell(TimePassed(), after_s=RESTART_PAUSE_S)
        story.tell(Missed())


def test_one_that_never_answers_is_given_up_and_killed() -> None:
    story = told(LIMITS, Missed())

    actions = story.tell(TimePassed(), after_s=60.0)

    assert actions == [GiveUp("did not answer within 60 s"), SendSignal(signal.SIGKILL)]
    assert not story.state.was_ready
    story.tell(Ended(-9))
    assert story.state.phase is ServicePhase.OVER


def test_one_that_does_not_answer_again_is_killed_and_started_again() -> None:
    story = ready()
    story.tell(Ended(-9))
    story.tell(TimePassed(), after_s=RESTART_PAUSE_S)
    story.tell(Missed())

    actions = story.tell(TimePassed(), after_s=60.0)

    assert actions[-1] == SendSignal(signal.SIGKILL)
    assert story.tell(Ended(-9)) == [Say("ended with SIGKILL; starting it again")]


def test_one_that_another_agent_has_taken_over_is_left_alone() -> None:
    story = ready()

    (given_up,) = story.tell(TakenOver())

    assert isinstance(given_up, GiveUp)
    assert story.tell(Asked(removes=True)) == []


@pytest.mark.parametrize(
    ("removes", "number", "limit_s"),
    [(False, signal.SIGINT, LIMITS.end_s), (True, signal.SIGUSR1, LIMITS.remove_s)],
)
def test_the_end_has_its_time_and_then_comes_by_force(
    removes: bool, number: signal.Signals, limit_s: float
) -> None:
    story = ready()

    assert story.tell(Asked(removes)) == told_to_end(number)
    assert story.tell(TimePassed(), after_s=SLOW_END_S - 1) == []
    assert story.tell(TimePassed(), after_s=1) == [TellSlowEnd(limit_s - SLOW_END_S)]
    assert story.tell(TimePassed(), after_s=limit_s - SLOW_END_S - 1) == []
    assert story.tell(TimePassed(), after_s=1) == [
        Lose("did not end in time, and was killed"), SendSignal(signal.SIGKILL),
    ]  # fmt: skip
    assert story.tell(Ended(-9)) == []
    assert story.state.phase is ServicePhase.OVER


@pytest.mark.parametrize("removes", [False, True])
def test_an_end_with_work_left_undone_is_told(removes: bool) -> None:
    story = ready()
    story.tell(Asked(removes))

    story.tell(LackTold("step 7"))

    assert story.tell(Ended(3)) == [Lose("has ended, and the store lacks step 7")]
    assert story.state.phase is ServicePhase.OVER
    assert story.state.is_undone


def test_an_end_that_lacks_something_is_told_again_and_again() -> None:
    story = ready()
    story.tell(LackTold("steps 6, 7"))
    story.tell(Asked(removes=True))

    assert story.tell(TimePassed(), after_s=SLOW_END_S) == [TellSlowEnd(160.0, "steps 6, 7")]
    story.tell(LackTold("step 7"))
    assert story.tell(TimePassed(), after_s=SLOW_END_S) == [TellSlowEnd(155.0, "step 7")]
    story.tell(LackTold(""))
    assert story.tell(TimePassed(), after_s=SLOW_END_S) == [TellSlowEnd(150.0)]
    assert story.tell(TimePassed(), after_s=SLOW_END_S) == []
    assert story.tell(Ended(0)) == []
    assert not story.state.is_undone


@pytest.mark.parametrize("is_binding", [True, False])
def test_a_store_is_tried_before_the_service_is_ready(is_binding: bool) -> None:
    limits = replace(STORING, is_trial_binding=is_binding)
    story = told(limits, Missed(), Announced(), Answered())
    assert not story.state.was_ready

    actions = story.tell(Tried("no such bucket"))

    if is_binding:
        give_up = GiveUp("cannot use its store: no such bucket")
        assert actions == [give_up, SendSignal(signal.SIGKILL)]
    else:
        assert (actions, story.state.was_ready) == ([], True)


def test_a_store_that_can_be_used_is_tried_once() -> None:
    story = ready(STORING)
    story.tell(Ended(-9))
    story.tell(TimePassed(), after_s=RESTART_PAUSE_S)
    story.tell(Missed())

    story.tell(Answered())

    assert story.state.phase is ServicePhase.READY
    assert story.tell(Tried("no such bucket")) == []


def test_a_trial_that_never_ends_ends_the_start() -> None:
    story = told(STORING, Missed(), Announced(), Answered())

    actions = story.tell(TimePassed(), after_s=45.0)

    assert actions == [
        GiveUp("did not say within 45 s whether its store can be used"),
        SendSignal(signal.SIGKILL),
    ]


def test_one_that_is_killed_with_a_store_may_have_left_something() -> None:
    story = ready(STORING)
    story.tell(Asked(removes=True))
    story.tell(TimePassed(), after_s=STORING.remove_s)
    story.tell(TimePassed(), after_s=STORING.remove_s)

    story.tell(Ended(-9))

    assert story.state.is_undone


def external_ready() -> Story:
    story = told(replace(STORING, is_external=True), Missed(), Answered(), Tried(""))
    assert story.state.phase is ServicePhase.READY
    return story


def test_an_external_one_is_asked_again_where_it_is_not_heard_any_more() -> None:
    story = external_ready()
    story.tell(Missed())

    assert story.tell(TimePassed(), after_s=1.0) == [Find()]
    assert story.tell(Answered()) == []
    assert story.state.phase is ServicePhase.READY


def test_an_external_one_that_is_started_again_in_its_trial_is_tried_again() -> None:
    story = told(replace(STORING, is_external=True), Answered(), Missed())

    assert story.tell(TimePassed(), after_s=1.0) == [Find()]
    story.tell(Answered())
    assert story.tell(Tried("no such bucket")) == [GiveUp("cannot use its store: no such bucket")]


def test_the_end_waits_until_the_store_of_an_external_one_has_all() -> None:
    story = external_ready()

    assert story.tell(Asked(removes=True)) == [AskNews()]
    assert story.tell(LackTold("step 7")) == []
    assert story.tell(TimePassed(), after_s=SLOW_END_S) == [TellSlowEnd(160.0, "step 7")]
    assert story.tell(LackTold("")) == []
    assert story.state.phase is ServicePhase.OVER
    assert not story.state.is_undone


@pytest.mark.parametrize("is_gone", [True, False])
def test_an_external_one_whose_store_does_not_get_all_is_not_done(is_gone: bool) -> None:
    story = external_ready()
    story.tell(Asked(removes=True))
    story.tell(LackTold("step 7"))

    (lose,) = story.tell(Missed() if is_gone else TimePassed(), after_s=STORING.remove_s)

    assert isinstance(lose, Lose)
    assert story.state.is_undone


def test_an_external_one_is_not_waited_for_where_the_run_has_failed() -> None:
    assert external_ready().tell(Asked(removes=False)) == []


def test_a_process_that_not_even_sigkill_ends_is_left() -> None:
    story = ready()
    story.tell(Asked(removes=False))
    story.tell(TimePassed(), after_s=LIMITS.end_s)

    story.tell(TimePassed(), after_s=10.0)

    assert story.state.phase is ServicePhase.OVER


@pytest.mark.parametrize("phase", ["dies-at-its-end", "pausing", "not-there-yet"])
def test_what_a_dead_one_has_left_is_removed_by_another(phase: str) -> None:
    story = Story() if phase == "not-there-yet" else ready()
    if phase == "pausing":
        story.tell(Ended(-9))
    actions = story.tell(Asked(removes=True))
    if phase == "dies-at-its-end":
        actions = story.tell(Ended(-9))

    assert actions == [StartProcess(removes=True), SendSignal(signal.SIGUSR1)]
    assert story.tell(Ended(-9)) == []
    assert story.state.phase is ServicePhase.OVER


def test_an_external_one_is_waited_for_and_no_more() -> None:
    story = Story(EXTERNAL)

    assert story.tell(Missed()) == []
    assert story.tell(TimePassed(), after_s=1.0) == [Find()]
    assert story.tell(Answered()) == []
    assert story.tell(Asked(removes=True)) == []
    assert story.state.phase is ServicePhase.OVER


@pytest.mark.parametrize("seed", range(300))
def test_whatever_happens_processes_are_few_and_the_end_comes(seed: int) -> None:
    """A process runs at a time, none is left at the end, and the end comes within its limits."""
    rng = random.Random(seed)
    limits = replace(rng.choice([LIMITS, STORING]), is_trial_binding=rng.random() < 0.5)
    story = Story(limits)
    world = World(rng)
    actions = story.actions
    end_s = story.now_s + rng.choice([1.0, 50.0, 500.0])
    asked_s = None
    while story.state.phase is not ServicePhase.OVER:
        if asked_s is None and story.now_s >= end_s:
            asked_s = story.now_s
            event: Event = Asked(rng.random() < 0.5)
        else:
            event = world.next()
        actions = story.tell(event, after_s=rng.choice([0.0, 0.3, 0.5]))
        world.check(actions)
        assert story.now_s < end_s + LIMITS.remove_s + 20.0, story.state

    assert not world.is_running or world.is_stuck or world.is_anothers
    assert asked_s is None or story.now_s - asked_s <= LIMITS.remove_s + 20.0


class World:
    """A process that answers, dies, hangs and is found as a random source has it."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self.is_running = False
        self.is_stuck = rng.random() < 0.1
        self.is_anothers = False
        self._waiting: list[Event] = []

    def check(self, actions: list[Action]) -> None:
        """Carry out what was decided."""
        for action in actions:
            if isinstance(action, StartProcess):
                assert not self.is_running
                if self._rng.random() < 0.05:
                    self._waiting.append(Unstarted("no such command"))
                    continue
                self.is_running = True
                if self._rng.random() < 0.8:
                    self._waiting.append(Announced())
            elif isinstance(action, Find):
                self._waiting.append(self._answer())
            elif action == SendSignal(signal.SIGCONT):
                continue
            elif isinstance(action, SendSignal) and self.is_running and not self.is_stuck:
                is_kill = action.number is signal.SIGKILL
                if is_kill or self._rng.random() < 0.7:
                    self._die(-9 if is_kill else 0)

    def _answer(self) -> Event:
        if self.is_running:
            return Answered()
        chance = self._rng.random()
        if chance < 0.1:
            self.is_running = True
            return Answered(is_found=True)
        if chance < 0.2:
            self.is_running = self.is_anothers = True
            return Outdated(is_ending=self._rng.random() < 0.5)
        return Missed()

    def next(self) -> Event:
        """Return what happens next."""
        if self._waiting:
            return self._waiting.pop(0)
        if self.is_running and not self.is_stuck and self._rng.random() < 0.05:
            self._die(self._rng.choice([-9, 1, 1, None, 2 if self._rng.random() < 0.1 else 0]))
            return self._waiting.pop(0)
        if self.is_running and self._rng.random() < 0.1:
            return Tried(self._rng.choice(["", "no such bucket"]))
        if self.is_running and self._rng.random() < 0.1:
            return LackTold(self._rng.choice(["", "step 7"]))
        if self.is_running and self._rng.random() < 0.002:
            self.is_anothers = True
            return TakenOver()
        return TimePassed()

    def _die(self, status: int | None) -> None:
        self.is_running = self.is_anothers = False
        self._waiting = [each for each in self._waiting if not isinstance(each, Announced)]
        self._waiting.append(Ended(status))
