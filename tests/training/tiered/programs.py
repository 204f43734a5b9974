"""Training programs that change the world around a run, or tell what it has imported."""

from __future__ import annotations

import os
import sys
from typing import Any

from resilience.events import EventLog
from training import __main__ as program


def lose_daemon(arguments: list[str]) -> int:
    """Train; worker 0 sends the node's daemon a signal when it reports step 5."""
    write = EventLog.write

    def write_and_send(log: EventLog, event: str, /, **fields: Any) -> None:
        write(log, event, **fields)
        if event == "step" and fields.get("step") == 5:
            os.kill(int(os.environ["TEST_DAEMON"]), int(os.environ["TEST_SIGNAL"]))

    EventLog.write = write_and_send  # type: ignore[method-assign,assignment]
    return program.main(arguments)


def name_modules(arguments: list[str]) -> int:
    """Train, and write the names of all modules that are imported then."""
    status = program.main(arguments)
    sys.stdout.write("\n".join(sorted(sys.modules)))
    return status
