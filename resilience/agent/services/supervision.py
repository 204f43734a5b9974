"""What is done about a service, a process that an agent keeps beside its workers. Pure.

A service is looked for, started where nobody answers, started again where it ends, and ended
after the workers. One that an earlier agent has left running is taken over as it is.
`services` carries out what is decided here.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass, replace
from enum import Enum

from resilience.agent.processes.worker import name_signal
from resilience.node_config import UNDONE_STATUS

RESTART_PAUSE_S = 1.0
"""Between the end of a service and its next start."""
SHORT_LIFE_S = 5.0
KILLED_S = 5.0
"""A process that is there so long after SIGKILL is in the kernel's hands."""
SLOW_END_S = 5.0
"""An end that takes longer is told to whoever waits for it."""
_WRONG_COMMAND = 2
_NEVER = float("inf")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceLimits:
    """How long a service may take."""

    ready_s: float = 60.0
    """Until it answers."""
    end_s: float = 65.0
    """After the signal to end, with what it has to bring to safety."""
    remove_s: float = 165.0
    """After SIGUSR1, which leaves nothing of it behind."""
    short_lives_max: int = 10
    """So many lives in a row that were short: another one would not be longer."""
    try_s: float = 0.0
    """Until it says what came of the trial of its store; 0: it has none."""
    is_trial_binding: bool = True
    """A store that fails its trial ends the node; else it is only told."""
    is_external: bool = False
    """Somebody else starts and ends it: the agent waits until it answers, and at the end of a run
    that succeeds until the store has what it is to get."""


class ServicePhase(Enum):
    """Where a service is in its life."""

    SEARCHING = "searching"
    """Asked whether it answers already."""
    GIVING_WAY = "giving way"
    """An earlier one is about to end, and the next one can start then."""
    STARTING = "starting"
    TRYING = "trying"
    """It answers, and tries its store."""
    READY = "ready"
    PAUSING = "pausing"
    """Before the next start."""
    ENDING = "ending"
    OVER = "over"
    """The agent does nothing about it any more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceState:
    """What is known of a service."""

    phase: ServicePhase
    until_s: float
    """When the phase has lasted too long, or long enough."""
    began_s: float = 0.0
    """When the present life began."""
    num_short_lives: int = 0
    was_ready: bool = False
    """It has answered in this agent's life."""
    removes: bool = False
    """Its end leaves nothing behind."""
    is_last: bool = False
    """No further process is started to remove what is left."""
    is_killed: bool = False
    told_s: float = _NEVER
    """When a person is told that the end takes long."""
    lacks: str = ""
    """What its store is to get and has not, in words."""
    is_undone: bool = False
    """It has ended, or was left, before its store had what it was to get."""


# ---- what happened


@dataclass(frozen=True, slots=True)
class Missed:
    """Nobody answers."""


@dataclass(frozen=True, slots=True)
class Answered:
    """The service answers, and this agent supervises it."""

    is_found: bool = False
    """An earlier agent has started it."""


@dataclass(frozen=True, slots=True)
class Tried:
    """It says what came of the trial of its store."""

    words: str
    """The store's own words; empty: it can be used."""


@dataclass(frozen=True, slots=True)
class LackTold:
    """It says what its store lacks."""

    lacks: str


@dataclass(frozen=True, slots=True)
class Outdated:
    """An earlier one answers that this agent has no use for."""

    is_ending: bool
    """It ends by itself."""


@dataclass(frozen=True, slots=True)
class Refused:
    """Somebody answers who wants nothing from this agent."""

    text: str


@dataclass(frozen=True, slots=True)
class TakenOver:
    """Another agent supervises the service from now on."""


@dataclass(frozen=True, slots=True)
class Announced:
    """The process that was started can be asked now."""


@dataclass(frozen=True, slots=True)
class Unstarted:
    """There is no process."""

    text: str


@dataclass(frozen=True, slots=True)
class Ended:
    """The process has ended."""

    status: int | None
    """None where only its parent would know."""


@dataclass(frozen=True, slots=True)
class Asked:
    """The workers are gone, and the service has to go, too."""

    removes: bool


@dataclass(frozen=True, slots=True)
class TimePassed:
    """Nothing else happened."""


Event = (
    Missed
    | Answered
    | Tried
    | LackTold
    | Outdated
    | Refused
    | TakenOver
    | Announced
    | Unstarted
    | Ended
    | Asked
    | TimePassed
)


# ---- what is to be done


@dataclass(frozen=True, slots=True)
class Find:
    """Ask whether it answers, unless it has been asked already."""


@dataclass(frozen=True, slots=True)
class AskNews:
    """Ask what its store lacks, at once."""


@dataclass(frozen=True, slots=True)
class StartProcess:
    """Start a process."""

    removes: bool = False
    """It takes away what an earlier one has left, and is told to end at once."""


@dataclass(frozen=True, slots=True)
class SendSignal:
    """Send a signal to the process."""

    number: signal.Signals


@dataclass(frozen=True, slots=True)
class Say:
    """Tell the person."""

    text: str


@dataclass(frozen=True, slots=True)
class TellSlowEnd:
    """Tell the person what the end waits for, so many seconds more at most."""

    rest_s: float
    lacks: str = ""


@dataclass(frozen=True, slots=True)
class GiveUp:
    """Go on without the service; at the start, end the node."""

    text: str


@dataclass(frozen=True, slots=True)
class Lose:
    """Tell the person and the run's record that the service has ended with work undone."""

    text: str


_END_SIGNAL = signal.SIGINT
"""A service leaves SIGTERM to its agent: a scheduler sends it to all processes of a job."""
_REMOVE = (StartProcess(removes=True), SendSignal(signal.SIGUSR1))
Action = Find | AskNews | StartProcess | SendSignal | Say | TellSlowEnd | GiveUp | Lose
Decision = tuple[ServiceState, tuple[Action, ...]]


def begin(now_s: float, limits: ServiceLimits) -> Decision:
    """Return what is done first."""
    return ServiceState(phase=ServicePhase.SEARCHING, until_s=now_s + limits.ready_s), (Find(),)


def decide(state: ServiceState, event: Event, now_s: float, limits: ServiceLimits) -> Decision:
    """Return what becomes of a service by an event, and what is to be done."""
    if state.phase is ServicePhase.OVER:
        return state, ()
    if isinstance(event, Asked):
        return _ask(state, event, now_s, limits)
    if isinstance(event, LackTold):
        state = replace(state, lacks=event.lacks)
    if state.phase is ServicePhase.ENDING:
        return _end(state, event, now_s, limits)
    if isinstance(event, LackTold):
        return state, ()
    if isinstance(event, Tried):
        return _judge_trial(state, event.words, now_s, limits)
    if isinstance(event, TimePassed):
        return _wait(state, now_s, limits)
    if isinstance(event, Ended):
        return _bury(state, event.status, now_s, limits)
    if isinstance(event, Refused):
        return _give_up(state, event.text, now_s, limits)
    if isinstance(event, Unstarted):
        return _give_up(replace(state, phase=ServicePhase.PAUSING), event.text, now_s, limits)
    if isinstance(event, TakenOver):
        text = "was taken over by another agent of this node"
        return replace(state, phase=ServicePhase.OVER), (GiveUp(text),)
    return _hear(state, event, now_s, limits)


def _hear(
    state: ServiceState,
    event: Missed | Answered | Outdated | Announced,
    now_s: float,
    limits: ServiceLimits,
) -> Decision:
    """Go on by what is at the service's door."""
    if isinstance(event, Announced):
        return state, (Find(),)
    if isinstance(event, Answered):
        if limits.try_s and not state.was_ready:
            answered = replace(state, phase=ServicePhase.TRYING, until_s=now_s + limits.try_s)
        else:
            answered = _make_ready(state)
        if not event.is_found:
            return answered, ()
        return replace(answered, began_s=now_s), (Say("of an earlier agent goes on"),)
    if isinstance(event, Missed) and limits.is_external and state.phase is ServicePhase.TRYING:
        # It is started again by whoever has started it.
        searching = ServicePhase.SEARCHING
        return replace(state, phase=searching, until_s=now_s + limits.ready_s), ()
    if state.phase is not ServicePhase.SEARCHING:
        return state, ()
    if isinstance(event, Outdated):
        # It may have to bring checkpoints to the store before it ends.
        giving_way = replace(state, phase=ServicePhase.GIVING_WAY, until_s=now_s + limits.remove_s)
        return giving_way, () if event.is_ending else _tell_to_end(_END_SIGNAL)
    if limits.is_external:
        return state, ()
    return replace(state, phase=ServicePhase.STARTING, began_s=now_s), (StartProcess(),)


def _make_ready(state: ServiceState) -> ServiceState:
    return replace(state, phase=ServicePhase.READY, until_s=_NEVER, was_ready=True)


def _judge_trial(state: ServiceState, words: str, now_s: float, limits: ServiceLimits) -> Decision:
    """Go on with a store that can be used, or with a run that goes on all the same."""
    if state.phase is not ServicePhase.TRYING:
        return state, ()
    if words and limits.is_trial_binding:
        return _give_up(state, f"cannot use its store: {words}", now_s, limits)
    return _make_ready(state), ()


def _wait(state: ServiceState, now_s: float, limits: ServiceLimits) -> Decision:
    """Act where a phase has lasted long enough."""
    if now_s < state.until_s:
        looks = state.phase is ServicePhase.SEARCHING
        # What it says of its store is heard again once it answers again.
        looks |= limits.is_external and state.phase is ServicePhase.READY
        return state, (Find(),) if looks else ()
    if state.phase is ServicePhase.PAUSING:
        return replace(state, phase=ServicePhase.SEARCHING, until_s=now_s + limits.ready_s), (
            Find(),
        )
    text = f"did not answer within {limits.ready_s:g} s"
    if state.phase is ServicePhase.GIVING_WAY:
        text = f"of an earlier agent did not end within {limits.remove_s:g} s"
    if state.phase is ServicePhase.STARTING and state.was_ready:
        # A life like any other, that begins again.
        return replace(state, until_s=_NEVER), (
            Say(f"{text}, and is killed"),
            SendSignal(signal.SIGKILL),
        )
    if state.phase is ServicePhase.TRYING:
        text = f"did not say within {limits.try_s:g} s whether its store can be used"
    return _give_up(state, text, now_s, limits)


def _bury(state: ServiceState, status: int | None, now_s: float, limits: ServiceLimits) -> Decision:
    """Start a service again that has ended, unless that would not help."""
    if state.phase is ServicePhase.GIVING_WAY:
        searching = ServicePhase.SEARCHING
        return replace(state, phase=searching, until_s=now_s + limits.ready_s), (Find(),)
    state = replace(state, phase=ServicePhase.PAUSING, until_s=now_s + RESTART_PAUSE_S)
    if status == _WRONG_COMMAND:
        return _give_up(state, "refused to start (exit status 2)", now_s, limits)
    is_short = now_s - state.began_s < SHORT_LIFE_S
    num_short_lives = state.num_short_lives + 1 if is_short else 0
    how = "ended" if status is None else f"ended with {_describe(status)}"
    if num_short_lives == limits.short_lives_max:
        return _give_up(state, f"{how}, {num_short_lives} times in a row at once", now_s, limits)
    pausing = replace(state, num_short_lives=num_short_lives)
    return pausing, (Say(f"{how}; starting it again"),)


def _give_up(state: ServiceState, text: str, now_s: float, limits: ServiceLimits) -> Decision:
    """Do without the service; a process that has been started and is of no use goes, too."""
    has_process = state.phase in (ServicePhase.STARTING, ServicePhase.TRYING)
    if limits.is_external or not has_process:
        return replace(state, phase=ServicePhase.OVER), (GiveUp(text),)
    killed = replace(
        state, phase=ServicePhase.ENDING, is_last=True, is_killed=True, until_s=now_s + KILLED_S
    )
    return killed, (GiveUp(text), SendSignal(signal.SIGKILL))


def _ask(state: ServiceState, event: Asked, now_s: float, limits: ServiceLimits) -> Decision:
    """Begin the end; what a dead process has kept, only another one can take away."""
    if state.phase is ServicePhase.ENDING:
        return state, ()
    has_process = state.phase in (ServicePhase.STARTING, ServicePhase.TRYING, ServicePhase.READY)
    is_left_alone = state.phase is ServicePhase.GIVING_WAY or not (has_process or event.removes)
    has_duty = bool(limits.try_s) and event.removes and state.phase is ServicePhase.READY
    if is_left_alone or (limits.is_external and not has_duty):
        return replace(state, phase=ServicePhase.OVER), ()
    ending = replace(
        state,
        phase=ServicePhase.ENDING,
        removes=event.removes,
        until_s=now_s + (limits.remove_s if event.removes else limits.end_s),
        told_s=now_s + SLOW_END_S,
    )
    if limits.is_external:
        return ending, (AskNews(),)
    if not has_process:
        return replace(ending, is_last=True), _REMOVE
    return ending, _tell_to_end(signal.SIGUSR1 if event.removes else _END_SIGNAL)


def _end(state: ServiceState, event: Event, now_s: float, limits: ServiceLimits) -> Decision:
    """Wait for the end of a service that was asked to end."""
    over = replace(state, phase=ServicePhase.OVER)
    undone = replace(over, is_undone=True)
    if limits.is_external and isinstance(event, LackTold | Missed):
        if isinstance(event, Missed):
            return undone, (Lose("does not answer any more, and may not have brought all of it"),)
        return (state, ()) if event.lacks else (over, ())
    if isinstance(event, Unstarted | TakenOver):
        return over, ()
    if isinstance(event, Ended):
        if event.status == UNDONE_STATUS:
            return undone, (Lose(f"has ended, and the store lacks {state.lacks or 'a part'}"),)
        if not state.removes or state.is_last or event.status == 0:
            return over, ()
        return replace(state, is_last=True), _REMOVE
    if not isinstance(event, TimePassed) or now_s < min(state.until_s, state.told_s):
        return state, ()
    if now_s < state.until_s:
        again_s = now_s + SLOW_END_S if state.lacks else _NEVER
        return replace(state, told_s=again_s), (TellSlowEnd(state.until_s - now_s, state.lacks),)
    if limits.is_external:
        return undone, (Lose(f"has not ended, and the store lacks {state.lacks or 'a part'}"),)
    if state.is_killed:
        return over, ()
    is_undone = bool(limits.try_s)
    killed = replace(
        state, is_last=True, is_killed=True, is_undone=is_undone, until_s=now_s + KILLED_S
    )
    return killed, (Lose("did not end in time, and was killed"), SendSignal(signal.SIGKILL))


def _tell_to_end(number: signal.Signals) -> tuple[Action, ...]:
    """Return how a process is told, also one that is stopped and would hear of nothing else."""
    return SendSignal(number), SendSignal(signal.SIGCONT)


def _describe(status: int) -> str:
    return name_signal(-status) if status < 0 else f"exit status {status}"
