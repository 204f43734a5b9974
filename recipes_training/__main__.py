"""The worker's command line: python -m recipes_training --job JOB --run-dir DIR --node-name NAME.

A program that calls `run_and_exit` with a trainer of its own has the same command line.
"""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from launcher.job import JobFileError, TrainingJob, read_training_job
from recipes_training.environment import (
    AGENT_PID,
    WorkerEnvironment,
    has_agent,
    parse_environment,
)
from recipes_training.errors import TrainingError
from recipes_training.stop import StopSignal
from resilience.arguments import Parser
from resilience.event_files import EVENTS_NAME
from resilience.events import EventLog, EventLogError
from resilience.inprocess.event_pipe import open_events
from resilience.node_config import UNSTORED_STATUS

if TYPE_CHECKING:
    from recipes_training.trainer import MakeTrainer


def main(arguments: list[str] | None = None, make_trainer: MakeTrainer | None = None) -> int:
    """Run one worker to its end; returns its exit status.

    `make_trainer` makes a `recipes_training.trainer.Trainer`; without it the job says which.
    """
    options = _parse_options(arguments)
    stop = StopSignal()
    try:
        environment = None if has_agent(os.environ) else parse_environment(os.environ)
        events = _open_events(options, environment)
    except TrainingError as error:
        _say(str(error))
        return 1
    with events:
        try:
            stop.install()
            if environment is not None:
                events.write("worker_started", pid=os.getpid(), world_size=environment.world_size)
            _train(read_training_job(options.job), environment, options, events, stop, make_trainer)
            events.write("worker_finished")
        except BaseException as error:
            # A log that cannot take how the worker ended does not hide why it did.
            with suppress(EventLogError):
                if isinstance(error, SystemExit) and error.code == UNSTORED_STATUS:
                    events.write("worker_finished")
                elif isinstance(error, SystemExit):
                    events.write("worker_stopped", step=stop.last_step)
                else:
                    last_line = traceback.format_exception_only(error)[-1].strip()
                    events.write("worker_failed", message=last_line)
            if not isinstance(error, (TrainingError, JobFileError, EventLogError)):
                raise
            _say(str(error))
            return error.exit_status if isinstance(error, TrainingError) else 1
    return 0


def _train(
    job: TrainingJob,
    environment: WorkerEnvironment | None,
    options: argparse.Namespace,
    events: EventLog,
    stop: StopSignal,
    make_trainer: MakeTrainer | None,
) -> None:
    """Train with recovery where the job asks for it, and once where it does not."""
    is_recoverable = job.resilience.checkpointless is not None
    if is_recoverable and not has_agent(os.environ):
        raise TrainingError(
            "resilience.checkpointless needs the node agent, and another program has started "
            "this worker; start it with python -m resilience.agent, or leave the feature out"
        )
    if not is_recoverable and environment is None:
        raise TrainingError(
            "the node agent has started a job without resilience.checkpointless for recovery; "
            "start its agents with --no-recovery, or add the feature to the recipe"
        )
    # torch takes seconds to import, and a bad job should not wait for it.
    from recipes_training.loop import Worker

    if make_trainer is None:
        make_trainer = choose_trainer(job)
    worker = Worker(
        job=job,
        run_dir=options.run_dir,
        node=options.node_name,
        owner_pid=int(os.environ.get(AGENT_PID, os.getppid())),
        events=events,
        stop=stop,
    )
    if is_recoverable:
        from recipes_training.recovery import run_with_recovery

        run_with_recovery(worker, make_trainer)
    else:
        from recipes_training.once import run_once

        assert environment is not None
        run_once(worker, make_trainer, environment)


def _has_megatron() -> bool:
    """Return whether Megatron-Core is here; other packages have a part of `megatron` as well."""
    try:
        return find_spec("megatron.core") is not None
    except ModuleNotFoundError:
        return False


def choose_trainer(job: TrainingJob) -> MakeTrainer:
    """Return what makes the trainer that the job names; raises TrainingError where it lacks."""
    if job.trainer.kind == "torch":
        from recipes_training.torch.trainer import TorchTrainer

        return TorchTrainer
    if not _has_megatron():
        raise TrainingError(
            "trainer.kind 'megatron' needs Megatron-Core, which this Python does not have; install "
            "training-recipes[megatron], or run `make install-megatron` in a checkout"
        )
    if job.instance.accelerator == "cpu":
        from recipes_training.megatron.cpu import stand_in

        stand_in()
    from recipes_training.megatron.trainer import MegatronTrainer

    return MegatronTrainer


def _parse_options(arguments: list[str] | None) -> argparse.Namespace:
    parser = Parser(prog="python -m recipes_training", description=__doc__)
    parser.add_argument("--job", type=Path, required=True, help="the job.json to train")
    parser.add_argument("--run-dir", type=Path, required=True, help="folder for what is written")
    parser.add_argument("--node-name", required=True, help="name of this node in events")
    return parser.parse_args(arguments)


def _open_events(options: argparse.Namespace, environment: WorkerEnvironment | None) -> EventLog:
    try:
        return open_events(
            options.run_dir / EVENTS_NAME,
            node=options.node_name,
            rank=environment.rank if environment else None,
            generation=environment.generation if environment else -1,
            # A run that survives faults does not end for its record.
            complain=_say if has_agent(os.environ) else None,
        )
    except OSError as error:
        raise TrainingError(f"cannot write events to {options.run_dir}: {error}") from error


def _say(text: str) -> None:
    print(f"recipes_training: {text}", file=sys.stderr, flush=True)  # noqa: T201


def run_and_exit(make_trainer: MakeTrainer | None = None) -> NoReturn:
    """Run one worker and end the process, without the destructors of what torch holds."""
    try:
        status = main(make_trainer=make_trainer)
    except SystemExit as stop:
        status = stop.code if isinstance(stop.code, int) else 1
    except BaseException:  # noqa: BLE001 - what the interpreter would do, but for the destructors
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    run_and_exit()
