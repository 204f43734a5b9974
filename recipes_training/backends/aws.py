"""Checkpoints by AWS's own library, for a HyperPod cluster that runs its own daemon.

Writer and reader are used as they come. A save is staged when the step's gate is passed,
so that what the library makes visible is stable; its thread sends it while training goes on.
Whatever fails in a save costs that checkpoint and nothing else, and on every worker alike.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.planner import LoadPlan
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save

from launcher.job import TrainingJob
from launcher.job.lineage import checkpoints_namespace
from recipes_training.backends.aws_library import PACKAGE, find_steps, open_library
from recipes_training.checkpoints import Begun, CadencedCheckpoints, Subject
from recipes_training.errors import CheckpointError
from recipes_training.group import CHECKPOINT_TIMEOUT, WorkerGroup, keep
from resilience.events import EventLog
from resilience.settings import TieredSettings
from resilience.state.view import Distributed, StateView
from resilience.tiered.dcp.step_reader import check_asked
from resilience.tiered.uploads import Cadence, decide_save

SAVE_TIMEOUT_S = 900.0
"""How long a save of the library may take: it tries each tier for a minute at least."""
FIND_TIMEOUT_S = 30.0
"""How long tiers that fail are asked again for their steps before the run gives up."""

_PULSE_S = 0.5
_PAUSE_S = 1.0
_OTHER_NAME = "set resilience.tiered.namespace to another name to begin anew"
_MEMORY, _STORE = "ram", "s3"


@dataclass(slots=True)
class _UnderWay:
    """A save that the library has begun."""

    step: int
    future: Future[Any]
    num_bytes: int
    began_s: float
    blocked_s: float


class AwsCheckpoints(CadencedCheckpoints):
    """Saves and loads the whole state with torch.distributed.checkpoint."""

    def __init__(
        self, job: TrainingJob, settings: TieredSettings, *, run_dir: Path, events: EventLog
    ) -> None:
        super().__init__(job, settings, events)
        self._library = open_library()
        self._settings = settings
        self._namespace = checkpoints_namespace(job, run_dir)
        self._last_store_s: float | None = None
        self._due: int | None = None
        self._under_way: _UnderWay | None = None
        self._kept: int | None = None
        """The last step, once memory has it: what is saved of it then is for S3 alone."""
        self._is_off = False
        self._gloo: dist.ProcessGroup | None = None

    def bind(self, subject: Subject) -> None:
        """Take what the checkpoints are of, and a process group for the library's thread."""
        super().bind(subject)
        # A worker that has just been started knows nothing of what the others switched off.
        self._is_off = False
        self._kept = None
        self._gloo = dist.new_group(backend="gloo", timeout=timedelta(seconds=SAVE_TIMEOUT_S))
        keep(self._gloo)

    @property
    def place(self) -> str:
        """Return the namespace."""
        return f"the tiers, namespace {self._namespace}"

    # ---- saving

    def wants_save(self) -> bool:
        """Return whether so many seconds have passed that rank 0 asks for a checkpoint."""
        return not self._is_off and super().wants_save()

    def _is_wanted(self, step: int, *, is_requested: bool) -> bool:
        return not self._is_off and super()._is_wanted(step, is_requested=is_requested)

    def _start(self, step: int) -> None:
        """Note that the state is to be saved when the step's gate is passed."""
        self._due = step

    def keep(self) -> None:
        """Stage the state if it is due; what the library has begun can no longer be left."""
        if self._due is not None:
            step, self._due = self._due, None
            self._save(step)

    def abandon(self) -> None:
        """Leave what is due and under way: the library's threads meet in no other generation."""
        self._due = None
        self._settle()
        if (under_way := self._under_way) is not None:
            self._under_way = None
            self._fail(under_way.step, "it was under way when a worker failed")
        super().abandon()

    def finish(self, step: int) -> None:
        """Save the last state, and wait for what is under way.

        S3 gets it, too, whatever its cadence: memory may go with the run. Memory comes first: a
        run that is asked to end may not have the time for both.
        """
        self._await_end()
        self._subject.progress.check()
        for is_stored in (False, True) if self._settings.store else (False,):
            if self._is_new and not self._is_off:
                self._kept = step if is_stored and self._saved == step else None
                self._save(step, is_stored=is_stored)
                self._await_end()
        if (under_way := self._under_way) is not None:
            self._fail(under_way.step, _describe_stuck(under_way))

    def _save(self, step: int, *, is_stored: bool | None = None) -> None:
        """Begin a save on all workers or on none: the library's threads meet each other.

        Where nobody says whether S3 gets the step, its cadence does.
        """
        # The last step is saved twice: what a worker says of one save is not read of the other.
        topic = f"{step}/{is_stored}"
        began_s = self._last_s = time.monotonic()
        if not self._agree_on_end(step, topic):
            return
        if is_stored is None:
            is_stored = self._agree_on_store(step)
        content, writer, problem = self._content(), None, None
        try:
            config = self._configure(knows_s3=is_stored, is_stored=is_stored)
            writer = self._library.writer(config, step=step)
        except Exception as error:  # noqa: BLE001 - whatever the library raises, the run goes on
            problem = _describe(error)
        if told := self._first_problem(f"{topic}/writer", problem):
            self._fail(step, told)
            return
        try:
            future = async_save(content, storage_writer=writer, process_group=self._gloo)
        except (Exception, CheckpointException) as error:  # noqa: BLE001 - likewise
            problem = _describe(error)
        if told := self._first_problem(f"{topic}/begun", problem):
            # The threads of the others wait for this one, in a group that is of no use now.
            self._fail(step, told)
            self._switch_off(step, told)
            return
        assert isinstance(future, Future)
        self._under_way = _UnderWay(
            step=step,
            future=future,
            num_bytes=self._num_bytes(),
            began_s=began_s,
            blocked_s=time.monotonic() - began_s,
        )

    def _agree_on_end(self, step: int, topic: str) -> bool:
        """Return whether the save before is over on all workers, after a short wait.

        Nothing shows that the worker gets on meanwhile: it does not.
        """
        self._wait(time.monotonic() + self._subject.stall_s)
        self._settle()
        under_way, busy, stuck = self._under_way, None, None
        if under_way is not None:
            busy = f"the save of step {under_way.step} has not ended"
            if time.monotonic() >= under_way.began_s + SAVE_TIMEOUT_S:
                stuck = _describe_stuck(under_way)
        if (told := self._first_problem(f"{topic}/busy", busy)) is None:
            return True
        self._fail(step, told)
        if told := self._first_problem(f"{topic}/stuck", stuck):
            self._switch_off(step, told)
        return False

    def _first_problem(self, topic: str, own: str | None) -> str | None:
        return self._group.first_problem(f"aws/{topic}", own, CHECKPOINT_TIMEOUT)

    def _switch_off(self, step: int, reason: str) -> None:
        """Take no more checkpoints in this generation; all workers do so at the same step."""
        self._is_off = True
        self._under_way = None
        self._warn(step, f"no more checkpoints are taken from step {step} on: {reason}")

    def _warn(self, step: int, text: str) -> None:
        if self._is_leader:
            self._events.write("warning", step=step, text=text)
            sys.stderr.write(f"recipes_training: {text}; the run goes on\n")

    def _content(self) -> dict[str, Any]:
        rest = json.dumps(dict(self._view.read_rest()))
        return {"state": _entries(self._subject.state), "rest": rest}

    def _agree_on_store(self, step: int) -> bool:
        """Return whether the step goes to S3: rank 0 decides where seconds are counted."""
        store = self._settings.store
        if store is None:
            return False
        if store.every_n_steps is not None:
            return step % store.every_n_steps == 0
        now_s = time.monotonic()
        due = decide_save(
            Cadence(every_s=store.every_s),
            step=step,
            now_s=now_s,
            last_s=self._last_store_s,
        )
        own = _STORE if due else _MEMORY
        is_stored = self._group.first_text(f"aws/{step}", own, CHECKPOINT_TIMEOUT) == _STORE
        if is_stored:
            self._last_store_s = now_s
        return is_stored

    def _configure(self, *, knows_s3: bool, is_stored: bool = False) -> Any:
        """Return the library's settings; with a path, it asks S3 for it on each use."""
        store = self._settings.store
        url = store.url if store is not None and knows_s3 else None
        return self._library.config(
            namespace=self._namespace,
            world_size=self._group.world_size,
            s3_tier_base_path=(url or "").rstrip("/"),
            save_to_s3=is_stored,
        )

    def _await_end(self) -> None:
        """Wait for what is under way at the end of a run, where no deadline but this holds."""
        if (under_way := self._under_way) is not None:
            self._wait(under_way.began_s + SAVE_TIMEOUT_S, self._subject.pulse)
            self._settle()

    def _wait(self, end_s: float, pulse: Callable[[], None] | None = None) -> None:
        under_way = self._under_way
        while under_way is not None and not under_way.future.done():
            left_s = end_s - time.monotonic()
            if left_s <= 0:
                return
            if pulse is not None:
                pulse()
            with suppress(FutureTimeoutError):
                under_way.future.exception(timeout=min(left_s, _PULSE_S))

    def _settle(self) -> None:
        """Tell what came of a save that is over."""
        under_way = self._under_way
        if under_way is None or not under_way.future.done():
            return
        self._under_way = None
        if (error := under_way.future.exception()) is not None:
            self._fail(under_way.step, _describe(error))
            return
        if under_way.step == self._kept:
            return  # told when memory had it
        self._tell_saved(
            under_way.step,
            num_bytes=under_way.num_bytes,
            seconds=time.monotonic() - under_way.began_s,
            blocked_s=under_way.blocked_s,
        )

    def _fail(self, step: int, reason: str, *, is_said: bool = True) -> None:
        """Tell that a checkpoint failed: on all workers alike, so that one of them says it."""
        if step == self._kept:
            self._warn(step, f"step {step} is in memory, and S3 has not got it: {reason}")
            return
        super()._fail(step, reason, is_said=is_said and self._is_leader)

    # ---- loading

    def load_newest(self, *, newer_than: int | None = None) -> Begun | None:
        """Load the newest step that every worker can have.

        Raises CheckpointError where no other state is at hand, and it cannot be known which
        steps there are, or none of them can be loaded: to begin anew would give them up.
        """
        self._refused.clear()
        is_needed = newer_than is None
        steps = self._agree_on_steps(is_needed=is_needed)
        problems: list[str] = []
        for step in steps:
            if newer_than is not None and step <= newer_than:
                break
            began_s = time.monotonic()
            problem = self._try(step)
            if problem is None:
                return self._tell_loaded(
                    step,
                    source="aws",
                    num_bytes=self._num_bytes(),
                    seconds=time.monotonic() - began_s,
                )
            problems.append(f"step {step}: {problem}")
            self._refuse(step, problem)
        if problems and is_needed:
            raise CheckpointError(
                f"{PACKAGE} can load no step of {self._namespace}, and there are "
                f"{', '.join(map(str, steps))}: {problems[0]}; mend that, or {_OTHER_NAME}"
            )
        return None

    def _agree_on_steps(self, *, is_needed: bool) -> list[int]:
        """Return the steps to try, newest first: rank 0 asks the tiers, and tells the others."""
        text = self._find() if self._is_leader else ""
        told = json.loads(self._group.first_text("aws/steps", text, CHECKPOINT_TIMEOUT))
        if "error" not in told:
            return list(told["steps"])
        if is_needed:
            raise CheckpointError(
                f"cannot tell which checkpoints there are: {told['error']}; mend that, or "
                f"{_OTHER_NAME}"
            )
        self._fail(0, told["error"])
        return []

    def _find(self) -> str:
        """Return what the tiers say, as text; those that fail are asked again for a while."""
        end_s = time.monotonic() + FIND_TIMEOUT_S
        while True:
            try:
                reader = self._library.reader(self._configure(knows_s3=True), step=None)
                return json.dumps({"steps": find_steps(reader)})
            except Exception as error:  # noqa: BLE001 - all workers have to hear of it
                if time.monotonic() >= end_s:
                    return json.dumps({"error": _describe(error)})
            # Nothing tells of a daemon or a bucket that answers again.
            time.sleep(_PAUSE_S)

    def _try(self, step: int) -> str | None:
        """Load a step on all workers; returns what went wrong on one of them."""
        reader, problem = None, None
        try:
            reader = self._library.reader(self._configure(knows_s3=True), step=step)
        except Exception as error:  # noqa: BLE001 - whatever the library raises
            problem = _describe(error)
        if told := self._first_problem(f"load/{step}/reader", problem):
            return told
        content = self._content()
        try:
            load(
                content,
                storage_reader=reader,
                planner=_WholePlanner(),
                process_group=self._gloo,
            )
            self._view.write_rest(json.loads(content["rest"]))
        except (Exception, CheckpointException) as error:  # noqa: BLE001 - likewise
            problem = _describe(error)
        return self._first_problem(f"load/{step}", problem)

    def _num_bytes(self) -> int:
        return sum(each.tensor.nbytes for each in self._view.tensors())

    @property
    def _group(self) -> WorkerGroup:
        return self._subject.group


class _WholePlanner(DefaultLoadPlanner):
    """Loads steps that have nothing but what the workers ask for."""

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        assert self.metadata is not None
        check_asked(self.metadata, global_plan)
        return super().create_global_plan(global_plan)


def _entries(state: StateView) -> Mapping[str, Tensor]:
    assert isinstance(state, Distributed), "the rules let no other trainer have this backend"
    return state.entries()


def _describe(error: BaseException) -> str:
    """Return an error and what it comes from: the library names only the outermost."""
    if isinstance(error, CheckpointException):
        # Of a rank each, with a traceback in its text.
        return _describe(next(iter(error.failures.values()))[0])
    own = str(error) or repr(error)
    return own if error.__cause__ is None else f"{own}: {_describe(error.__cause__)}"


def _describe_stuck(under_way: _UnderWay) -> str:
    return (
        f"{PACKAGE} has not ended its save of step {under_way.step} within {SAVE_TIMEOUT_S:g} s; "
        "look at its daemon, and at S3"
    )
