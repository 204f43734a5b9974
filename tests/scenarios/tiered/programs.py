"""Training programs that change the world around a run, or tell what it has imported."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from recipes_training import __main__ as program
from resilience.events import EventLog


def lose_daemon(arguments: list[str]) -> int:
    """Train; worker 0 sends the node's daemon a signal when it reports step 5."""
    write = EventLog.write

    def write_and_send(log: EventLog, event: str, /, **fields: Any) -> None:
        write(log, event, **fields)
        if event == "step" and fields.get("step") == 5:
            os.kill(int(os.environ["TEST_DAEMON"]), int(os.environ["TEST_SIGNAL"]))

    EventLog.write = write_and_send  # type: ignore[method-assign,assignment]
    return program.main(arguments)


def stand_still(arguments: list[str]) -> int:
    """Train; rank 0 stands still when it has told of step TEST_STEP, until it may go on.

    It makes the file `held-STEP` in the run's folder, and waits for `go-STEP`.
    """
    write = EventLog.write
    run_dir = Path(arguments[1].removeprefix("--run-dir="))
    step = int(os.environ["TEST_STEP"])

    def write_and_wait(log: EventLog, event: str, /, **fields: Any) -> None:
        write(log, event, **fields)
        if event == "step" and fields.get("step") == step:
            (run_dir / f"held-{step}").touch()
            end_s = time.monotonic() + 60
            while not (run_dir / f"go-{step}").exists() and time.monotonic() < end_s:
                time.sleep(0.01)

    EventLog.write = write_and_wait  # type: ignore[method-assign,assignment]
    return _act_on_save(arguments)


def leave_at_event(arguments: list[str]) -> int:
    """Train; each worker is sent SIGUSR1 when it has written the event TEST_EVENT."""
    write = EventLog.write

    def write_and_ask(log: EventLog, event: str, /, **fields: Any) -> None:
        write(log, event, **fields)
        if event == os.environ["TEST_EVENT"]:
            os.kill(os.getpid(), signal.SIGUSR1)

    EventLog.write = write_and_ask  # type: ignore[method-assign,assignment]
    return _act_on_save(arguments)


def _act_on_save(arguments: list[str]) -> int:
    """Train; rank TEST_RANK gets TEST_SIGNAL as it begins to wait for the store.

    With TEST_DAEMON that process gets it, before the last save.
    """
    from recipes_training.backends.tiered import TieredCheckpoints

    is_due = os.environ.get("TEST_RANK") == os.environ["RANK"]
    daemon = os.environ.get("TEST_DAEMON")
    name = "finish" if daemon else "wait_stored"
    method = getattr(TieredCheckpoints, name)

    def act(saves: TieredCheckpoints, *values: Any) -> Any:
        if is_due:
            os.kill(int(daemon or os.getpid()), int(os.environ["TEST_SIGNAL"]))
        return method(saves, *values)

    setattr(TieredCheckpoints, name, act)
    return program.main(arguments)


if __name__ == "__main__":
    sys.exit(stand_still(sys.argv[1:]))
