"""A rank for a program that reads it from its environment, as torchrun gives it.

Such a program is started once a generation has opened. It may still have a
block of its own: what was read here is handed on to it.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable

from resilience.comm.messages import End, Open, Ready, encode
from resilience.comm.page import Page
from resilience.inprocess.link import listen
from resilience.inprocess.variables import rank_variables

# Not in the environment: the reports of a large run are longer than a variable may be.
_opening: Open | None = None


def await_rank(
    agent: socket.socket,
    page: Page,
    slot: int,
    describe: Callable[[Open], dict[str, str]] = rank_variables,
) -> dict[str, str]:
    """Wait for a generation to open; returns the variables that say which rank this is.

    Ends the process where the agent is gone or has no use for it.
    """
    global _opening  # noqa: PLW0603 - this process has one rank
    agent.sendall(encode(Ready(pid=os.getpid())))
    messages = listen(agent, page, slot)
    while True:
        message = next(messages)
        if isinstance(message, Open):
            _opening = message
            return describe(message)
        if isinstance(message, End):
            sys.exit(max(0, message.status))


def take_opening() -> Open | None:
    """Return the generation that this process was started in, once."""
    global _opening
    opening, _opening = _opening, None
    return opening
