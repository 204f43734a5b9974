"""A run without recovery: one generation, which ends with the process.

An elastic one changes its size from one start to the next. SIGUSR1, which HyperPod's agent sends
its workers, has all of them save the state after the same step, and end.
"""

from __future__ import annotations

from datetime import timedelta
from typing import NoReturn

from recipes_training.coordinator import Members, open_generation
from recipes_training.environment import WorkerEnvironment
from recipes_training.errors import GroupError
from recipes_training.group import poll
from recipes_training.loop import Loop, Worker
from recipes_training.stop import StopSignal
from recipes_training.trainer import MakeTrainer
from resilience.errors import PlannedError

OWN_SIGNAL_TIMEOUT = timedelta(seconds=10)
"""How much later than those of another node a node's workers may be asked to leave."""


def run_once(worker: Worker, make_trainer: MakeTrainer, environment: WorkerEnvironment) -> None:
    """Train without recovery, in the one generation that the environment tells of."""
    loop = Loop(worker, make_trainer)
    is_left = False
    with open_generation(worker.job, environment) as generation:
        loop.enter(generation)
        try:
            loop.run(generation)
        except PlannedError:
            loop.save_to_leave(generation)
            is_left = True
    if is_left:
        leave(generation, worker.stop, OWN_SIGNAL_TIMEOUT)
    loop.end()


def leave(generation: Members, stop: StopSignal, timeout: timedelta) -> NoReturn:
    """End a worker whose state is saved for a start at another size.

    Status 0 is for the agent that has asked: to another one it says that the run is finished.
    """
    if not poll(generation.is_to_be_left, timeout):
        raise GroupError("another worker was asked to leave (SIGUSR1) and this one was not")
    stop.release()
    raise SystemExit(0)
