"""A protected loop: it takes the steps of a program, through faults.

run = resilience.protect(model=model, optimizer=optimizer, also=[scheduler])
for batch in run.steps(loader, until=1000):
    with run.step():
        ...
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from enum import Enum, auto
from functools import partial, wraps
from typing import Any, NoReturn

from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel

from resilience.comm.page import Activity
from resilience.errors import StateError
from resilience.inprocess.handles import read_handles
from resilience.inprocess.lasting import LastingGroup
from resilience.protection.batches import Batches, find_owners
from resilience.protection.engine import Alone, Engine, Recovering, RetryStep, refuse_second
from resilience.protection.models import bind, detach
from resilience.protection.state import ProtectedState, scalers, unwrap
from resilience.protection.unregistered import NUM_STEPS, StateWatch
from resilience.script import log
from resilience.state.rng import seed_from


def protect(
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer],
    also: Sequence[object] = (),
    *,
    seed: int = 0,
    ignore: Sequence[str] = (),
) -> Run:
    """Return a run whose steps go on through faults, with the bits of a run without them.

    Called by every rank once its model, wrapped as it is trained, and its optimizers are made.
    `also` has all else that a step changes: schedulers, a GradScaler, an averaged model. torch,
    NumPy and random are seeded at each step from `seed`, the step and the rank. What else changes
    in the first steps is named once on standard error, but for the variables of `ignore`. Under
    an agent that recovers, the run outlives faults; else its first fault ends it, and the bits
    are the same. Raises StateError for what is not kept exact, with the remedy.
    """
    return Run(model, optimizer, also, seed=seed, ignore=ignore)


_COMPARE_EVERY = 100
"""Steps between those in which ranks compare what `also` has."""


class _Place(Enum):
    """Positions of the program in its loop."""

    BEFORE = auto()
    """Before the loop."""
    BETWEEN = auto()
    """In the loop, between two steps."""
    WITH_BATCH = auto()
    """The same, with a batch whose step has not begun."""
    STEP = auto()
    UNWOUND = auto()
    """In a step that is to be run again, which the program has not left yet."""
    FUNCTIONS = auto()
    """In a function of `every`."""
    AFTER = auto()
    """All ranks have ended their last step, or an error has ended the run."""


class Run:
    """The steps of one program; made by `protect`. Called from the training thread alone."""

    _keeps_rest = False
    """The batches that are left over at an epoch's end make a step."""
    _shares_seeds = False
    """Functions between steps draw the same on all ranks."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | Sequence[Optimizer],
        also: Sequence[object],
        *,
        seed: int,
        ignore: Sequence[str],
    ) -> None:
        refuse_second()
        given = [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer)
        optimizers = [unwrap(each) for each in given]
        self._seed = seed
        self._model, self._binding = model, bind(model)
        for wrapped in _wrapped(also):
            detach(wrapped)
        core = model.module if isinstance(model, DistributedDataParallel) else model
        assert isinstance(core, nn.Module)
        self.state = ProtectedState(core, optimizers, also)
        self._watch = StateWatch([self, model, *optimizers, *also], ignore)
        self._functions: list[tuple[int, Callable[[int], object]]] = []
        self._place = _Place.BEFORE
        self._until = 0
        self._update: AbstractContextManager[None] | None = None
        self._logged: dict[str, Any] | None = None
        self._is_checked = False
        self._also = ""
        """Digests of small state, where ranks compare it in this step."""
        self._num_writes = 0
        self._optimizers = optimizers
        for own in optimizers:
            own.register_step_pre_hook(self._before_optimizer)
        for scaler in scalers(also):
            # A step that the scaler leaves out calls no optimizer.
            _wrap(scaler, "step", after=lambda: self._enter_update("scaler.step()"))
        for other in also:
            if isinstance(other, AveragedModel):
                enter = partial(self._enter_update, "update_parameters()")
                _wrap(other, "update_parameters", before=enter)
        core.register_forward_pre_hook(self._before_forward)
        self._engine = self._make_engine()
        LastingGroup.check_calls(self._check_collective)

    def _make_engine(self) -> Engine:
        handles = read_handles(os.environ)
        if handles is None or not handles.recovers:
            return Alone(self._binding)
        return Recovering(handles, self.state, self._binding)

    @property
    def index(self) -> int:
        """Return the index of the step that is taken, or comes next; from 0."""
        return self._engine.step

    def steps(self, loader: Iterable[Any], *, until: int, accumulate: int = 1) -> Iterator[Any]:
        """Return the batches of the steps up to number `until`, epoch after epoch of the loader.

        A step that is run again gets the same batches. With `accumulate` a step gets a list of as
        many batches; those that are left over at an epoch's end are left out. Raises StateError
        where it is called a second time.
        """
        if self._place is not _Place.BEFORE:
            self._refuse("run.steps() a second time; one loop takes all steps of a run")
        try:
            batches = Batches(loader, accumulate, self._seed_at, keeps_rest=self._keeps_rest)
        except (StateError, ValueError) as error:
            self._refuse(str(error))
        self._place, self._until = _Place.BETWEEN, until
        self._watch.know(find_owners(loader))
        return self._loop(batches)

    @contextmanager
    def step(self) -> Iterator[None]:
        """Return the block in which the program takes one step: forward to scheduler and log."""
        self._begin()
        try:
            yield
        except BaseException as error:
            if not self._leave(error):
                raise
        else:
            self._leave(None)

    def every(self, num_steps: int, function: Callable[[int], object]) -> None:
        """Call a function with the number of steps taken, after each `num_steps` of them.

        It may communicate, and is called again where a fault has struck on any rank meanwhile.
        The modules' modes, train() and eval(), are put back after it.
        """
        if self._place is not _Place.BEFORE:
            self._refuse("run.every() after run.steps(); name functions before the loop")
        if num_steps < 1:
            self._refuse(f"run.every({num_steps}, ...); allowed: 1 and more")
        self._functions.append((num_steps, function))

    def stop(self) -> None:
        """End the loop once this step counts; called by all ranks in the same step.

        In a step it is called before the first optimizer's, or in a function of `every`.
        """
        if self._update is not None:
            self._refuse(
                "run.stop() after optimizer.step(), where no other rank would learn of it; stop "
                "before that, or in a function of run.every()"
            )
        if not self._is_in_step and self._place is not _Place.FUNCTIONS:
            self._refuse(
                "run.stop() between steps; stop in the step, before optimizer.step(), or in a "
                "function of run.every()"
            )
        self.state.move_cursor({**self.state.cursor, "is_last": True})

    def state_dict(self) -> dict[str, Any]:
        """Return how many steps count and where in the loader they end, for a checkpoint."""
        cursor = {key: each for key, each in self.state.cursor.items() if key != "is_last"}
        return {"step": self.index, "cursor": cursor}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Begin where a checkpoint ends; called by all ranks, before the loop.

        Where it has `step` alone, the epochs before are taken to have been whole ones.
        """
        if self._place is not _Place.BEFORE:
            self._refuse("run.load_state_dict() after run.steps(); load before the loop")
        self._engine.begin_at(state_dict["step"])
        self.state.move_cursor(dict(state_dict.get("cursor", {})))

    def log(self, **values: Any) -> None:
        """Log values with the number of steps taken, once this one counts; see `resilience.log`."""
        if not self._is_in_step:
            self._refuse("run.log() outside `with run.step():`; log within the step")
        self._logged = {**(self._logged or {}), **values}

    # ---- the loop

    def _loop(self, batches: Batches) -> Iterator[Any]:
        engine = self._engine
        while True:
            engine.settle()
            if not self._call_functions():
                continue
            if self.index >= self._until or self._is_last():
                if engine.finish():
                    self._place = _Place.AFTER
                    return
                continue  # a step, or a function, is to be run again
            if not engine.mark(Activity.DATA):
                continue
            found = self._read(batches)
            if engine.rank == 0:
                # The program's frame is the one that runs this generator.
                self._watch.look(sys._getframe(1))  # noqa: SLF001
            try:
                yield found
            except GeneratorExit:
                if self._place is not _Place.AFTER and not sys.is_finalizing():
                    self._say_left()  # else an error has ended the program, with its words
                raise
            if self._place is _Place.WITH_BATCH:
                self._refuse(
                    "no `with run.step():` for the last batch, so that it would come again; put "
                    "what leaves a batch out into the step"
                )
            self._check_writes("between steps")

    def _read(self, batches: Batches) -> Any:
        """Return the batches of the step that comes next."""
        try:
            cursor, found = batches.read(self.state.cursor, self.index)
            self.state.move_cursor(cursor)
            self._engine.keep("step", self.state.snapshot())
            is_compared = self.index % _COMPARE_EVERY in range(NUM_STEPS)
            self._also = self.state.digest_also() if is_compared else ""
        except StateError as error:
            self._refuse(str(error))
        self._place, self._num_writes = _Place.WITH_BATCH, self.state.count_writes()
        return found

    def _say_left(self) -> None:
        """Say that the program has left the loop, since the run will call that a fault."""
        sys.stderr.write(
            f"the loop over run.steps() was left at step {self.index} of {self._until}, where the "
            "other ranks wait for this one; to end early, call run.stop() in the step\n"
        )

    def _is_last(self) -> bool:
        """Return whether the last step that counts, or a function after it, has called `stop`."""
        cursor = self.state.cursor
        return bool(cursor.get("is_last")) and cursor["step"] < self.index

    def _call_functions(self) -> bool:
        """Call what is due after the last step; returns False where that is to be done again."""
        engine, step = self._engine, self._engine.step
        due = self._find_due(step)
        if not due or engine.done >= step:
            engine.note_done(step)
            return True
        engine.keep("functions", self.state.snapshot())
        engine.mark(Activity.NOWHERE)
        self._seed_at("functions", step, is_shared=self._shares_seeds)
        self._place = _Place.FUNCTIONS
        try:
            self._run_functions(due, step)
        except Exception as error:
            self._place = _Place.AFTER
            if engine.fail(error):
                raise
            self._place = _Place.BETWEEN
            return False
        self._place = _Place.BETWEEN
        engine.note_done(step)
        return True

    def _find_due(self, step: int) -> list[Callable[[int], object]]:
        """Return the functions to call after so many steps; the same on all ranks."""
        return [function for every, function in self._functions if step and step % every == 0]

    def _run_functions(self, due: Sequence[Callable[[int], object]], step: int) -> None:
        is_training, modes = self._model.training, self.state.read_modes()
        self._num_writes = self.state.count_writes()
        for function in due:
            function(step)
        self._check_writes("by a function of run.every()")
        # An evaluation leaves the model in eval(): a program sets train() before each epoch.
        self._model.train(is_training)
        self.state.write_modes(modes)
        # A process that joins has not read this step's batches.
        self._also = self.state.digest_also()
        self._binding.share_buffers()  # a forward may have changed each rank's own
        self._engine.meet_at(self._describe("the end of the functions of run.every()"))

    # ---- a step

    def _check_writes(self, where: str) -> None:
        """Refuse parameters that were written since writes were counted last."""
        if self.state.count_writes() != self._num_writes:
            self._refuse(
                f"a parameter was written {where}, and would be written again after a fault; write "
                "it in the step, after optimizer.step()"
            )

    @property
    def _is_in_step(self) -> bool:
        return self._place in (_Place.STEP, _Place.UNWOUND)

    def _describe(self, call: str) -> str:
        """Return where this rank is; all ranks are to be there."""
        cursor = self.state.cursor
        words = [f"{call} in step {self.index} of {self._until}"]
        words += ["the last by run.stop()"] if cursor.get("is_last") else []
        words += [f"epoch {cursor.get('epoch')}", f"batch {cursor.get('position')}"]
        every = ", ".join(str(number) for number, _ in self._functions)
        words += [f"with functions every {every} steps"] if every else []
        words += [f"with {self._also}"] if self._also else []
        return ", ".join(words)

    def _begin(self) -> None:
        if self._is_in_step:
            raise StateError("`with run.step():` within another one")
        if self._place is not _Place.WITH_BATCH:
            self._refuse(
                "`with run.step():` without a batch of its own; take one step for each batch of "
                "run.steps()"
            )
        self._check_writes("between steps")
        self._place, self._update, self._logged = _Place.STEP, None, None
        self._engine.begin_step()
        for each in self._optimizers:
            each.zero_grad()  # what is left of the step before would be lost by a fault
        self._seed_at("step", self._engine.step)

    def _before_forward(self, module: nn.Module, given: object) -> None:
        if self._place is _Place.STEP and self._update is None:
            self._engine.check()
            self._engine.reach("forward")
        is_out_of_place = self._place in (_Place.BETWEEN, _Place.WITH_BATCH)
        if not module.training or not self._binding.shares_buffers:
            return
        if self._update is not None or is_out_of_place:
            self._refuse(
                "a forward in training mode after optimizer.step() or between steps changes "
                "buffers on each rank; call model.eval() for it, or give it to run.every()"
            )

    def _before_optimizer(self, optimizer: Optimizer, given: Sequence[Any], named: Any) -> None:
        if not self._is_in_step:
            self._refuse("optimizer.step() outside `with run.step():`; step within it")
        if any(each is not None for each in (*given[1:], named.get("closure"))):
            raise StateError(
                "optimizer.step(closure) computes gradients after all ranks have agreed on theirs; "
                "compute them before, and call step() without a closure"
            )
        self._enter_update("optimizer.step()")

    def _enter_update(self, call: str) -> None:
        if self._place is _Place.UNWOUND:
            raise RetryStep  # the program has caught the first one
        if self._place is not _Place.STEP or self._update is not None:
            return
        self._check_writes("between the begin of the step and optimizer.step()")
        try:
            place = self._describe(call)
            self._update = self._engine.pass_gate(self._share, place)
        except RetryStep:
            self._place = _Place.UNWOUND
            raise

    def _share(self) -> None:
        """Have all ranks hold the same, once gradients are complete."""
        self._binding.share_buffers()

    def _leave(self, given: BaseException | None) -> bool:
        """End a step; returns whether its error is swallowed, and the step run again."""
        step, error = self._engine.step, given
        try:
            if error is None:
                self._enter_update("the end of the step")  # where nothing was updated
                update, self._update = self._update, None
                assert update is not None
                update.__exit__(None, None, None)
                self._check_optimizers()
        except BaseException as problem:  # noqa: BLE001 - judged below
            error = problem
        broken, self._update = self._update, None
        self._place, self._num_writes = _Place.BETWEEN, self.state.count_writes()
        if error is None:
            if self._logged is not None and self._engine.rank == 0:
                log(step + 1, **self._logged)
            return False
        if broken is not None:
            _abandon(broken, error)
        if not isinstance(error, GeneratorExit) and not self._engine.fail(error):
            return True
        if not isinstance(error, GeneratorExit):
            self._place = _Place.AFTER
        if error is not given:
            raise error
        return False

    def _refuse(self, words: str) -> NoReturn:
        """Raise StateError with these words; a run with agents ends with them, too."""
        error = StateError(words)
        # Else the end of the step or of the functions tells the agent.
        if self._place in (_Place.BEFORE, _Place.BETWEEN, _Place.WITH_BATCH):
            self._engine.fail(error)
            self._place = _Place.AFTER
        raise error

    def _check_optimizers(self) -> None:
        """Raise StateError after the first step where the optimizers' state cannot travel."""
        if not self._is_checked:
            self.state.describe()
            self._is_checked = True

    def _check_collective(self, name: str) -> None:
        if self._place is _Place.UNWOUND:
            raise RetryStep  # the other ranks have left the step
        if self._update is not None:
            raise StateError(
                f"{name} between optimizer.step() and the end of the step, where a rank may be "
                "alone; put it before optimizer.step()"
            )
        if self._place in (_Place.STEP, _Place.FUNCTIONS):
            self._engine.check()
        if self._place in (_Place.BEFORE, _Place.BETWEEN, _Place.WITH_BATCH):
            self._refuse(
                f"{name} outside a step, which a process that joins does not call; put forward and "
                "backward into the step, and give a function that communicates to run.every()"
            )

    def _seed_at(self, *place: object, is_shared: bool = False) -> None:
        own = () if is_shared else (self._engine.rank,)
        seed_from("/".join(map(str, (self._seed, *place, *own))))


def _wrapped(also: Sequence[object]) -> Iterator[DistributedDataParallel]:
    for each in also:
        if isinstance(each, nn.Module):
            yield from (m for m in each.modules() if isinstance(m, DistributedDataParallel))


def _abandon(update: AbstractContextManager[None], error: BaseException) -> None:
    """Have an update end with an error, which its own block raises again."""
    try:
        update.__exit__(type(error), error, error.__traceback__)
    except BaseException as raised:
        if raised is not error:
            raise


def _wrap(
    owner: object,
    name: str,
    *,
    before: Callable[[], None] = lambda: None,
    after: Callable[[], None] = lambda: None,
) -> None:
    method = getattr(owner, name)

    @wraps(method)
    def call(*given: Any, **named: Any) -> Any:
        before()
        result = method(*given, **named)
        after()
        return result

    setattr(owner, name, call)
