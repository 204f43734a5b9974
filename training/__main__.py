"""The worker's command line: python -m training --job JOB --run-dir DIR --node-name NAME."""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from pydantic import ValidationError

from launcher.job import Job, read_job
from resilience.events import EventLog, EventLogError
from training.environment import WorkerEnvironment, has_agent, parse_environment
from training.errors import TrainingError
from training.stop import StopSignal

EVENTS_NAME = "events.jsonl"


def main(arguments: list[str] | None = None) -> int:
    """Run one worker to its end; returns its exit status."""
    options = _parse_options(arguments)
    stop = StopSignal()
    try:
        environment = None if has_agent(os.environ) else parse_environment(os.environ)
        events = _open_events(options, environment)
    except TrainingError as error:
        return _complain(error)
    with events:
        try:
            stop.install()
            if environment is None:
                _train_under_agent(_read_job(options.job), options, events, stop)
            else:
                events.write("worker_started", pid=os.getpid(), world_size=environment.world_size)
                _train(_read_job(options.job), environment, options, events, stop)
            events.write("worker_finished")
        except SystemExit:
            _write_last(events, "worker_stopped", step=stop.last_step)
            raise
        except (TrainingError, EventLogError) as error:
            _write_last(events, "worker_failed", message=_last_line(error))
            return _complain(error)
        except BaseException as error:
            _write_last(events, "worker_failed", message=_last_line(error))
            raise
    return 0


def _write_last(
    events: EventLog, event: str, *, step: int | None = None, message: str | None = None
) -> None:
    """Write how the worker ended; a log that cannot take it does not hide why it did."""
    with suppress(EventLogError):
        if message is None:
            events.write(event, step=step)
        else:
            events.write(event, step=step, message=message)


def _train_under_agent(
    job: Job, options: argparse.Namespace, events: EventLog, stop: StopSignal
) -> None:
    """Train through faults; the worker learns its rank from the agent."""
    if job.resilience.checkpointless is None:
        raise TrainingError(
            "the node agent has started a job without resilience.checkpointless; "
            "start its workers with torchrun, or add the feature to the recipe"
        )
    from training.torch_trainer.resilient import run_resilient

    run_resilient(job, run_dir=options.run_dir, node=options.node_name, events=events, stop=stop)


def _train(
    job: Job,
    environment: WorkerEnvironment,
    options: argparse.Namespace,
    events: EventLog,
    stop: StopSignal,
) -> None:
    if job.trainer.kind == "megatron":
        raise TrainingError(
            "trainer.kind 'megatron' is not run by this version; "
            "set trainer: torch in the recipe, or render the job without running it"
        )
    if job.resilience.checkpointless is not None:
        raise TrainingError(
            "resilience.checkpointless needs the node agent, and another program has started "
            "this worker; start it with python -m resilience.agent, or leave the feature out"
        )
    # torch takes seconds to import, and a bad job should not wait for it.
    from training.torch_trainer.run import run_training

    run_training(
        job, environment, run_dir=options.run_dir, node=options.node_name, events=events, stop=stop
    )


def _parse_options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m training", description=__doc__)
    parser.add_argument("--job", type=Path, required=True, help="the job.json to train")
    parser.add_argument("--run-dir", type=Path, required=True, help="folder for what is written")
    parser.add_argument("--node-name", required=True, help="name of this node in events")
    return parser.parse_args(arguments)


def _open_events(options: argparse.Namespace, environment: WorkerEnvironment | None) -> EventLog:
    try:
        options.run_dir.mkdir(parents=True, exist_ok=True)
        return EventLog(
            options.run_dir / EVENTS_NAME,
            node=options.node_name,
            rank=environment.rank if environment else None,
            generation=environment.generation if environment else -1,
            # A run that survives faults does not end for its record.
            complain=None if environment else _say,
        )
    except OSError as error:
        raise TrainingError(f"cannot write events to {options.run_dir}: {error}") from error


def _read_job(path: Path) -> Job:
    try:
        return read_job(path)
    except OSError as error:
        raise TrainingError(f"cannot read the job {path}: {error.strerror}") from error
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        raise TrainingError(f"{path} is no valid job: {place}: {first['msg']}") from error


def _say(text: str) -> None:
    print(f"training: {text}", file=sys.stderr, flush=True)  # noqa: T201


def _complain(error: TrainingError | EventLogError) -> int:
    print(f"training: {error}", file=sys.stderr)  # noqa: T201
    return 1


def _last_line(error: BaseException) -> str:
    return traceback.format_exception_only(error)[-1].strip()


def run_and_exit() -> NoReturn:
    """Run one worker and end the process, without the destructors of what torch holds."""
    try:
        status = main()
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
