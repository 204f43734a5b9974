"""The processes that an agent keeps beside its workers, such as the node's checkpoint daemon.

Each runs in a session of its own and is not ended by the agent's death: it outlives the agent by
a lease, in which the node's next agent takes it over. What is done about one is decided in
`supervision`; here are the processes, connections and logs. One thread, which never blocks but
in `end`, and for a log whose folder hangs at most a second.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import closing, nullcontext, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import BinaryIO, TypeVar

from resilience.agent.services.connection import Supervisor
from resilience.agent.services.supervision import (
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
    Missed,
    Outdated,
    Refused,
    Say,
    SendSignal,
    ServiceLimits,
    ServicePhase,
    ServiceState,
    StartProcess,
    TakenOver,
    TellSlowEnd,
    TimePassed,
    Tried,
    Unstarted,
    begin,
    decide,
)
from resilience.agent.watch import Watch
from resilience.plain_files import open_linkless, open_plain
from resilience.tiered.errors import RefusedError, TierError
from resilience.tiered.news import StoreNews, read_news
from resilience.tiered.stores.deadline import Calls, DeadlineError, Hung

T = TypeVar("T")
_PAUSE_S = 0.5
_WORDS_BYTES = 2000
_ARGPARSE = ": error: "
"""What stands between a program's name and what is wrong with its command."""
_LOG_DEADLINE_S = 1.0
"""How long a log's folder that hangs can hold up the agent, once for each end of a service."""
_BLOCKED = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
"""Signals that a service waits for: one that comes before it does must not kill it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """A process beside the workers, with a door that says whether it is ready."""

    name: str
    command: tuple[str, ...]
    """What starts it; `arguments` are its last words."""
    arguments: tuple[str, ...]
    """By these an earlier agent's service is known for the same."""
    socket: Path
    """Where it answers."""
    token: str
    node: str
    log: Path
    limits: ServiceLimits = field(default_factory=ServiceLimits)
    duty: str = "end"
    """What its end may take long for."""
    loss: str = ""
    """What it costs where it does not come to that; empty: nothing."""
    is_required: bool = False
    """A run has not succeeded before it has come to that, and what it keeps stays until then."""


class Services:
    """All services of a node. `say` tells a person, `note` writes an event and raises nothing."""

    def __init__(
        self,
        services: Sequence[Service],
        say: Callable[[str], None],
        note: Callable[..., None],
        *,
        is_joining: bool = False,
    ) -> None:
        """Start nothing yet. A node that `is_joining` a run starts with a bad store as well."""
        self._watch = Watch()
        self._kept = []
        for each in services:
            limits = replace(each.limits, is_trial_binding=not is_joining)
            self._kept.append(_Kept(replace(each, limits=limits), self._watch, say, note))
        self._told: tuple[Callable[[], None], Callable[[str], None]] | None = None
        """Who is yet to be told how the start went."""

    def fileno(self) -> int:
        """Return what becomes readable when `serve` has something to do."""
        return self._watch.selector.fileno()

    def begin(self, work: Callable[[], None], leave: Callable[[str], None]) -> None:
        """Start all; `work` is called once they are ready, or `leave` with what is wrong."""
        self._told = work, leave
        for each in self._kept:
            each.begin()
        self._tell()

    def serve(self, timeout_s: float = 0.0) -> None:
        """Do what is to be done; to be called twice a second, and whenever there is something."""
        self._watch.serve(timeout_s)
        for each in self._kept:
            each.feed(TimePassed())
        self._tell()

    def end(self, *, removes: bool) -> bool:
        """End all and return when they are gone, with all they keep where `removes`.

        A job that is done needs nothing of them any more; the next start of another one does.
        Takes at most as long as the services' limits allow. Returns whether all have done what is
        required of them; what others have not stays.
        """
        self._told = None
        for each in self._kept:
            each.feed(Asked(removes))
        while not all(each.state.phase is ServicePhase.OVER for each in self._kept):
            self.serve(_PAUSE_S)
        for each in self._kept:
            each.close(removes=removes)
        self._watch.selector.close()
        return all(each.is_done for each in self._kept)

    def _tell(self) -> None:
        """Tell once how the start went."""
        failures = [each.failure for each in self._kept if each.failure]
        if self._told and (failures or all(each.state.was_ready for each in self._kept)):
            (work, leave), self._told = self._told, None
            if failures:
                leave(failures[0])
            else:
                work()


class _Kept:
    """One service: its state, its process and the connection to it."""

    def __init__(
        self, service: Service, watch: Watch, say: Callable[[str], None], note: Callable[..., None]
    ) -> None:
        self._service = service
        self._watch = watch
        self._say = say
        self._note = note
        self.state = ServiceState(phase=ServicePhase.OVER, until_s=0.0)
        self._news: StoreNews | None = None
        """What was said last of its store."""
        self._events: deque[Event] = deque()
        self._process: subprocess.Popen[bytes] | None = None
        self._process_file: int | None = None
        self._ready_file: int | None = None
        self._link: Supervisor | None = None
        self._log_bytes = 0
        self._hung = Hung()
        self._is_given_up = False
        self._is_others = service.limits.is_external
        """Another agent has it, or somebody else ends it."""
        self.failure = ""
        """Why it never was ready."""

    @property
    def is_done(self) -> bool:
        """Return whether it has done what is required of it, which nobody knows of one given up."""
        has_store = self._service.limits.try_s > 0
        is_undone = self.state.is_undone or (has_store and self._is_given_up)
        return not (is_undone and self._service.is_required)

    def begin(self) -> None:
        self.state, actions = begin(time.monotonic(), self._service.limits)
        self._act(actions)

    def feed(self, event: Event) -> None:
        """Decide on an event and act, also on what comes of that."""
        self._events.append(event)
        while self._events:
            self.state, actions = decide(
                self.state, self._events.popleft(), time.monotonic(), self._service.limits
            )
            self._act(actions)

    def close(self, *, removes: bool) -> None:
        """Let go of a process that is over, or another agent's.

        With `removes`, nothing stays of one that was given up, or killed before it could remove it.
        """
        self._forget_link()
        self._forget_process()
        is_ours = not self._is_others and self.is_done
        if removes and is_ours and (self.state.removes or self._is_given_up):
            shutil.rmtree(self._service.socket.parent, ignore_errors=True)

    def _act(self, actions: Sequence[Action]) -> None:
        for action in actions:
            if isinstance(action, Find):
                self._find()
            elif isinstance(action, AskNews):
                self._ask_news(0)
            elif isinstance(action, StartProcess):
                self._start(action)
            elif isinstance(action, SendSignal):
                self._send(action.number)
            elif isinstance(action, Say):
                self._say(f"{self._service.name} {action.text}")
            elif isinstance(action, TellSlowEnd):
                lacks = f"; the store lacks {action.lacks}" if action.lacks else ""
                self._warn(
                    f"has not ended yet, and has {action.rest_s:.0f} s more to "
                    f"{self._service.duty}{lacks}"
                )
            elif isinstance(action, GiveUp):
                self._give_up(action.text)
            else:
                self._lose(action.text)

    def _warn(self, text: str) -> None:
        # By this word a launcher tells what a person has to see, line by line.
        lines = f"{self._service.name} {text}".splitlines()
        self._say("\n".join(f"WARNING: {line}" for line in lines))

    def _give_up(self, text: str) -> None:
        self._is_given_up = True
        if self.state.was_ready:
            self._lose(f"{text}, and is given up; the run goes on without it")
            return
        # One line, for whoever shows but the first one of why a run ended.
        if words := self._last_words().splitlines():
            text = f"{text}: {words[-1].split(_ARGPARSE, 1)[-1]} (see {self._service.log})"
        self.failure = f"{self._service.name} {text}"
        self._note("service_lost", service=self._service.name, text=text)

    def _lose(self, text: str) -> None:
        """Tell what is not as it would be if the service had done its work."""
        loss = "" if self._is_others else self._service.loss
        text = "; ".join(filter(None, [text, loss]))
        self._note("service_lost", service=self._service.name, text=text)
        words = self._last_words()
        self._warn(f"{text}; its last words, of {self._service.log}:\n{words}" if words else text)

    def _last_words(self) -> str:
        """Return the end of what the last process has said."""
        try:
            return self._call(lambda: _read_end(self._service.log, self._log_bytes))
        except TierError:
            return ""

    def _open_log(self) -> BinaryIO | None:
        """Return the log; None where its folder hangs: the service can do without.

        Raises TierError where it cannot be opened.
        """
        try:
            log, self._log_bytes = self._call(lambda: _open_end(self._service.log))
        except DeadlineError as error:
            self._warn(f"is started without its log: {error}")
            return None
        return log

    def _call(self, function: Callable[[], T]) -> T:
        """Return what the function makes of the log; raises TierError, at its deadline as well."""
        with closing(Calls(f"{self._service.log}", _LOG_DEADLINE_S, self._hung)) as calls:
            return calls.call(function)

    # ---- the process

    def _start(self, order: StartProcess) -> None:
        service = self._service
        words = [*service.command, *service.arguments]
        if order.removes:
            words.append("--remove-on-exit")
        ready, told = os.pipe2(os.O_CLOEXEC)
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _BLOCKED)
        try:
            with self._open_log() or nullcontext(subprocess.DEVNULL) as log:
                self._process = subprocess.Popen(
                    [*words, f"--ready-file={told}"],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    pass_fds=[told],
                )
                process_file = os.pidfd_open(self._process.pid)
        except (OSError, TierError) as error:
            os.close(ready)
            self._events.append(Unstarted(f"cannot be started: {error}"))
            return
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            os.close(told)
        self._watch_process(process_file)
        self._ready_file = ready
        self._watch.add(ready, self._hear_ready)

    def _watch_process(self, file: int) -> None:
        self._process_file = file
        self._watch.add(file, self._bury)

    def _hear_ready(self) -> None:
        assert self._ready_file is not None
        is_ready = bool(os.read(self._ready_file, 16))
        self._forget_ready_file()
        if is_ready:
            self.feed(Announced())

    def _bury(self) -> None:
        status = self._process.wait() if self._process else None
        self._read_last_news()
        self._forget_process()
        self._forget_link()
        self.feed(Ended(status))

    def _read_last_news(self) -> None:
        """Take in what the process has said of its store just before its end."""
        while self._link is not None and self._link.has_words:
            message = self._link.read()
            if message is None:
                return
            if "store" in message:
                self._hear_news(message)

    def _send(self, number: signal.Signals) -> None:
        if self._process_file is not None:
            with suppress(ProcessLookupError):  # its end is about to be heard
                signal.pidfd_send_signal(self._process_file, number)

    def _forget_process(self) -> None:
        self._forget_ready_file()
        if self._process_file is not None:
            self._watch.drop(self._process_file)
            os.close(self._process_file)
        self._process = self._process_file = None

    def _forget_ready_file(self) -> None:
        if self._ready_file is not None:
            self._watch.drop(self._ready_file)
            os.close(self._ready_file)
            self._ready_file = None

    # ---- the connection

    def _find(self) -> None:
        if self._link is not None:
            return  # it has been asked, and may be slow
        service = self._service
        arguments = None if service.limits.is_external else service.arguments
        try:
            self._link = Supervisor(
                service.socket, token=service.token, node=service.node, arguments=arguments
            )
        except RefusedError as error:
            self._events.append(Refused(f"cannot be asked: {error}"))
        except OSError:
            self._events.append(Missed())
        else:
            self._watch.add(self._link, self._hear)

    def _hear(self) -> None:
        assert self._link is not None
        message = self._link.read()
        if message is None:
            self._forget_link()
            self.feed(Missed())
        elif message.get("is_taken_over"):
            self._is_others = True
            self._forget_process()
            self.feed(TakenOver())
        elif "store" in message:
            self._hear_news(message)
        else:
            self._answer(message)

    def _answer(self, message: dict[str, object]) -> None:
        """Take in the answer to the hello, or to the last request."""
        assert self._link is not None
        if message.get("error") == "busy" and not self._link.num_answers:
            self._find_process()
            self.feed(Outdated(is_ending=True))
        elif "error" in message:
            self._forget_link()
            if message["error"] == "busy":
                return  # it has no room for another connection just now
            self.feed(Refused(f"refuses this agent: {message.get('message')}"))
        elif not self._link.num_answers:
            is_found = self._process is None
            if self._service.limits.is_external:
                self._hear_ready_answer(is_found=False)
                return
            if is_found:
                self._find_process()
            if message.get("is_same"):
                self._hear_ready_answer(is_found=is_found)
            else:
                self.feed(Outdated(is_ending=False))

    def _hear_ready_answer(self, *, is_found: bool) -> None:
        self.feed(Answered(is_found))
        if self._service.limits.try_s:
            self._ask_news(0)
        elif self._service.limits.is_external:
            self._forget_link()

    # ---- the store

    def _ask_news(self, number: int) -> None:
        if self._link is None:
            self._events.append(Missed())
            return
        with suppress(OSError):  # it ends, and what it has said before is yet to be read
            self._link.ask_news(number)

    def _hear_news(self, message: dict[str, object]) -> None:
        """Take in what the daemon says of its store, and ask for what comes next."""
        number, news = message.get("number"), read_news(message)
        is_last = bool(message.get("is_last"))
        if self._link is None or news is None or (self._link.num_answers and not is_last):
            return  # there is a newer answer to come, or nothing to ask for
        if isinstance(number, int) and not is_last:
            self._ask_news(number)
        if news.trial is not None:
            self.feed(Tried(news.trial))
        if self.state.was_ready:
            self._note_news(news)
        self.feed(LackTold(lacks_text(news)))

    def _note_news(self, news: StoreNews) -> None:
        """Write what is new of the store to the record of the run, and tell a person."""
        before, self._news = self._news, news
        if news.failure and not (before and before.failure):
            self._note("store_failing", store=news.name, text=news.failure)
            self._warn(f"cannot bring checkpoints to the store {news.name}: {news.failure}")
        elif before and before.failure and not news.failure:
            self._note("store_well", store=news.name)
            self._say(f"{self._service.name}: the store {news.name} answers again")
        if news.stored_step is not None and news.stored_step != (before and before.stored_step):
            self._note("step_stored", step=news.stored_step, store=news.name)

    def _find_process(self) -> None:
        """Watch the process of a service that an earlier agent has started."""
        if self._process is not None or self._link is None:
            return
        file = self._link.open_process()
        if file is None:
            self._events.append(Ended(None))
        else:
            self._watch_process(file)

    def _forget_link(self) -> None:
        if self._link is not None:
            self._watch.drop(self._link.fileno())
            self._link.close()
            self._link = None


def lacks_text(news: StoreNews) -> str:
    """Return what a store is to get and has not, in words; nothing where it has all."""
    if not news.lacking:
        return ""
    steps = ", ".join(map(str, news.lacking))
    return f"{'steps' if len(news.lacking) > 1 else 'step'} {steps}"


def _open_end(path: Path) -> tuple[BinaryIO, int]:
    """Return a log and how long it is."""
    log = open(path, "ab", opener=open_linkless)  # noqa: SIM115  its caller closes it
    try:
        return log, log.seek(0, os.SEEK_END)
    except OSError:
        log.close()
        raise


def _read_end(path: Path, first: int) -> str:
    """Return the end of a log, from byte `first` on."""
    with open(path, "rb", opener=open_plain) as log:
        log.seek(max(first, log.seek(0, os.SEEK_END) - _WORDS_BYTES))
        return log.read().decode(errors="replace").strip()
