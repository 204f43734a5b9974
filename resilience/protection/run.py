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
from contextlib import AbstractContextManager
from functools import wraps
from types import TracebackType
from typing import Any, NoReturn

from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel

from resilience.comm.page import Activity
from resilience.errors import StateError
from resilience.inprocess.handles import read_handles
from resilience.inprocess.lasting import LastingGroup
from resilience.protection.batches import Batches
from resilience.protection.engine import Alone, Engine, Recovering, RetryStep
from resilience.protection.models import bind, detach
from resilience.protection.state import ProtectedState
from resilience.script import log
from resilience.state.rng import seed_from


def protect(
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer],
    also: Sequence[object] = (),
    *,
    seed: int = 0,
) -> Run:
    """Return a run whose steps go on through faults, with the bits of a run without them.

    Called by every rank once its model, wrapped as it is trained, and its optimizers are made.
    `also` has all else that a step changes: schedulers, a GradScaler, an averaged model. torch,
    NumPy and random are seeded at each step from `seed`, the step and the rank. Under an agent
    that recovers, the run outlives faults; else its first fault ends it, and the bits are the
    same. Raises StateError for what is not kept exact, with the remedy.
    """
    return Run(model, optimizer, also, seed=seed)


class Run:
    """The steps of one program; made by `protect`. Called from the training thread alone."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | Sequence[Optimizer],
        also: Sequence[object],
        *,
        seed: int,
    ) -> None:
        optimizers = [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer)
        self._seed = seed
        self._binding = bind(model)
        for wrapped in _wrapped(also):
            detach(wrapped)
        core = model.module if isinstance(model, DistributedDataParallel) else model
        assert isinstance(core, nn.Module)
        self.state = ProtectedState(core, optimizers, also)
        self._functions: list[tuple[int, Callable[[int], object]]] = []
        self._is_in_step = self._may_communicate = False
        self._has_batch = self._is_looping = self._must_retry = self._is_checked = False
        self._is_over = False
        """All ranks have ended their last step."""
        self._update: AbstractContextManager[None] | None = None
        self._logged: dict[str, Any] | None = None
        self._optimizers = optimizers
        for own in optimizers:
            own.register_step_pre_hook(self._before_optimizer)
        for other in also:
            if isinstance(other, GradScaler):
                # A step that the scaler leaves out calls no optimizer.
                _wrap(other, "step", after=self._enter_update)
            elif isinstance(other, AveragedModel):
                _wrap(other, "update_parameters", before=self._enter_update)
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
        if self._is_looping:
            self._refuse("run.steps() a second time; one loop takes all steps of a run")
        try:
            batches = Batches(loader, accumulate, self._seed_at)
        except (StateError, ValueError) as error:
            self._refuse(str(error))
        self._is_looping = True
        return _Steps(self, batches, until=until)

    def step(self) -> AbstractContextManager[None]:
        """Return the block in which the program takes one step: forward to scheduler and log."""
        return _Step(self)

    def every(self, num_steps: int, function: Callable[[int], object]) -> None:
        """Call a function with the number of steps taken, after each `num_steps` of them.

        It may communicate, and is called again where a fault has struck on any rank meanwhile.
        """
        if self._is_looping:
            self._refuse("run.every() after run.steps(); name functions before the loop")
        if num_steps < 1:
            raise ValueError(f"every {num_steps} steps; allowed: 1 and more")
        self._functions.append((num_steps, function))

    def stop(self) -> None:
        """End the loop once this step counts; called by all ranks in the same step."""
        if not self._is_in_step:
            self._refuse("run.stop() outside `with run.step():`; stop within the step")
        self.state.move_cursor({**self.state.cursor, "is_last": True})

    def state_dict(self) -> dict[str, Any]:
        """Return how many steps count and where in the loader they end, for a checkpoint."""
        cursor = {key: each for key, each in self.state.cursor.items() if key != "is_last"}
        return {"step": self.index, "cursor": cursor}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Begin where a checkpoint ends; called by all ranks, before the loop."""
        if self._is_looping:
            self._refuse("run.load_state_dict() after run.steps(); load before the loop")
        self._engine.begin_at(state_dict["step"])
        self.state.move_cursor(dict(state_dict["cursor"]))

    def log(self, **values: Any) -> None:
        """Log values with the number of steps taken, once this one counts; see `resilience.log`."""
        if not self._is_in_step:
            self._refuse("run.log() outside `with run.step():`; log within the step")
        self._logged = {**(self._logged or {}), **values}

    # ---- the loop

    def _next(self, batches: Batches) -> Any:
        """Return the batches of the step that comes next."""
        engine = self._engine
        while True:
            engine.settle()
            if not self._call_functions() or not engine.mark(Activity.DATA):
                continue
            try:
                cursor, found = batches.read(self.state.cursor, engine.step)
                self.state.move_cursor(cursor)
                engine.keep("step", self.state.snapshot())
            except StateError as error:
                self._refuse(str(error))
            self._has_batch = True
            return found

    def _is_last(self) -> bool:
        """Return whether the last step that counts has called `stop`."""
        cursor = self.state.cursor
        return bool(cursor.get("is_last")) and cursor["step"] < self.index

    def _end(self) -> bool:
        """Return whether all ranks have ended their last step; else a step is to be run again."""
        while True:
            self._engine.settle()
            if self._call_functions():
                break
        if not self._engine.finish():
            return False
        self._is_over = self._may_communicate = True
        return True

    def _call_functions(self) -> bool:
        """Call what is due after the last step; returns False where that is to be done again."""
        engine, step = self._engine, self._engine.step
        due = [function for every, function in self._functions if step and step % every == 0]
        if not due or engine.done >= step:
            engine.note_done(step)
            return True
        engine.keep("functions", self.state.snapshot())
        engine.mark(Activity.NOWHERE)
        self._seed_at("functions", step)
        self._may_communicate = True
        try:
            for function in due:
                function(step)
        except Exception as error:
            if engine.fail(error):
                raise
            return False
        finally:
            self._may_communicate = False
        engine.note_done(step)
        return True

    # ---- a step

    def _begin(self) -> None:
        if self._is_in_step:
            raise StateError("`with run.step():` within another one")
        if not self._has_batch:
            self._refuse(
                "`with run.step():` without a batch of its own; take one step for each batch of "
                "run.steps()"
            )
        self._has_batch = self._must_retry = False
        self._is_in_step, self._update, self._logged = True, None, None
        self._engine.begin_step()
        for each in self._optimizers:
            each.zero_grad()  # what is left of the step before would be lost by a fault
        self._seed_at("step", self._engine.step)

    def _before_optimizer(self, optimizer: Optimizer, given: Sequence[Any], named: Any) -> None:
        if not self._is_in_step:
            self._refuse("optimizer.step() outside `with run.step():`; step within it")
        if len(given) > 1 or named.get("closure") is not None:
            raise StateError(
                "optimizer.step(closure) computes gradients after all ranks have agreed on theirs; "
                "compute them before, and call step() without a closure"
            )
        self._enter_update()

    def _enter_update(self) -> None:
        if not self._is_in_step or self._update is not None:
            return
        if self._must_retry:
            raise RetryStep  # the program has caught the first one
        try:
            self._update = self._engine.pass_gate(self._binding.share_buffers)
        except RetryStep:
            self._must_retry = True
            raise

    def _leave(self, given: BaseException | None) -> bool:
        """End a step; returns whether its error is swallowed, and the step run again."""
        step, error = self._engine.step, given
        try:
            if error is None:
                self._enter_update()  # where nothing was updated
                update, self._update = self._update, None
                assert update is not None
                update.__exit__(None, None, None)
                self._check_optimizers()
        except BaseException as problem:  # noqa: BLE001 - judged below
            error = problem
        finally:
            self._is_in_step = False
        if error is None:
            if self._logged is not None and self._engine.rank == 0:
                log(step + 1, **self._logged)
            return False
        if self._update is not None:
            _abandon(self._update, error)
        if not isinstance(error, GeneratorExit) and not self._engine.fail(error):
            return True
        if error is not given:
            raise error
        return False

    def _refuse(self, words: str) -> NoReturn:
        """Raise StateError with these words; a run with agents ends with them, too."""
        error = StateError(words)
        if not self._is_in_step and not self._is_over:  # else the end of the step tells the agent
            self._engine.fail(error)
        raise error

    def _check_optimizers(self) -> None:
        """Raise StateError after the first step where the optimizers' state cannot travel."""
        if not self._is_checked:
            self.state.describe()
            self._is_checked = True

    def _check_collective(self, name: str) -> None:
        if self._is_in_step and self._update is not None:
            raise StateError(
                f"{name} between optimizer.step() and the end of the step, where a rank may be "
                "alone; put it before optimizer.step()"
            )
        if not self._is_in_step and not self._may_communicate:
            self._refuse(
                f"{name} outside a step, which a process that joins does not call; put forward and "
                "backward into the step, and give a function that communicates to run.every()"
            )

    def _seed_at(self, *place: object, is_shared: bool = False) -> None:
        own = () if is_shared else (self._engine.rank,)
        seed_from("/".join(map(str, (self._seed, *place, *own))))


class _Steps(Iterator[Any]):
    def __init__(self, run: Run, batches: Batches, *, until: int) -> None:
        self._run, self._batches, self._until = run, batches, until
        self._is_over = False

    def __del__(self) -> None:
        """Say that the program has left the loop, since the run will call that a fault."""
        if not self._is_over:
            sys.stderr.write(
                f"the loop over run.steps() was left at step {self._run.index} of {self._until}, "
                "where the other ranks wait for this one; to end early, call run.stop() in the "
                "step\n"
            )

    def __next__(self) -> Any:
        run = self._run
        if run._has_batch:  # noqa: SLF001
            run._refuse(  # noqa: SLF001
                "no `with run.step():` for the last batch, so that it would come again; put what "
                "leaves a batch out into the step"
            )
        run._engine.settle()  # noqa: SLF001
        while run.index >= self._until or run._is_last():  # noqa: SLF001
            if run._end():  # noqa: SLF001
                self._is_over = True
                raise StopIteration
            run._engine.settle()  # noqa: SLF001
        return run._next(self._batches)  # noqa: SLF001


class _Step(AbstractContextManager[None]):
    def __init__(self, run: Run) -> None:
        self._run = run

    def __enter__(self) -> None:
        self._run._begin()  # noqa: SLF001

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        return self._run._leave(error)  # noqa: SLF001


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
