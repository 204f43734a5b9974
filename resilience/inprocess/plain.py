"""A rank for a program that reads it from its environment, as torchrun gives it.

Such a program is started once a generation has opened. It may still have a block of its own: what
was read here is handed on to it. The process has one link to its agent, for all its users.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from resilience.comm.messages import End, LineReader, Message, Open, Ready, encode
from resilience.comm.page import Page
from resilience.inprocess.handles import WorkerHandles, read_handles
from resilience.inprocess.link import AgentLink, listen
from resilience.inprocess.variables import rank_variables

if TYPE_CHECKING:  # it imports torch, which the program may not need
    from resilience.comm.agent_store import AgentStore


@dataclass(frozen=True, slots=True, kw_only=True)
class _Start:
    """What was read before the program began."""

    opening: Open
    reader: LineReader
    messages: tuple[Message, ...]


# Not in the environment: the reports of a large run are longer than a variable may be.
_start: _Start | None = None
_is_taken = False
_link: AgentLink | None = None


def await_rank(
    agent: socket.socket,
    page: Page,
    slot: int,
    describe: Callable[[Open], dict[str, str]] = rank_variables,
) -> dict[str, str]:
    """Wait for a generation to open; returns the variables that say which rank this is.

    Ends the process where the agent is gone or has no use for it.
    """
    global _start  # noqa: PLW0603 - this process has one rank
    agent.sendall(encode(Ready(pid=os.getpid())))
    reader = LineReader()
    for messages in listen(agent, reader, page, slot):
        for number, message in enumerate(messages, start=1):
            if isinstance(message, Open):
                _start = _Start(opening=message, reader=reader, messages=tuple(messages[number:]))
                return describe(message)
            if isinstance(message, End):
                sys.exit(max(0, message.status))
    raise AssertionError


def take_opening() -> Open | None:
    """Return the generation that this process was started in, once."""
    global _is_taken  # noqa: PLW0603
    if _start is None or _is_taken:
        return None
    _is_taken = True
    return _start.opening


def open_link(handles: WorkerHandles, page: Page) -> AgentLink:
    """Return this process's link to its agent."""
    global _link  # noqa: PLW0603
    if _link is None:
        reader, messages = (_start.reader, _start.messages) if _start else (None, ())
        _link = AgentLink(handles.agent_file, page, handles.slot, reader=reader, messages=messages)
    return _link


def own_opening() -> Open | None:
    """Return the generation that this process was started in, also where it was taken."""
    return _start.opening if _start else None


def own_store() -> AgentStore | None:
    """Return the store of that generation; None where no agent has started the process in one."""
    handles = read_handles(os.environ)
    if _start is None or handles is None:
        return None
    page = Page(handles.page_file, handles.num_slots)
    return open_link(handles, page).open_store(_start.opening.generation)
