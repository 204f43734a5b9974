"""Run a node's checkpoint daemon: python -m resilience.tiered.memoryd --budget-mib N [options].

SIGINT ends it and leaves the arena to the next one, as SIGTERM does where no agent supervises it;
SIGUSR1 takes it away.

Exit status 0 after one of these, 3 where the store then lacks steps that it was to get, 1 where
the folder or an address cannot be used, 2 for wrong options.
"""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Sequence
from contextlib import suppress

from resilience.tiered.errors import ArenaError
from resilience.tiered.memoryd.daemon import run_daemon
from resilience.tiered.memoryd.options import parse_options
from resilience.tiered.memoryd.output import complain


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve until told to end; returns the exit status."""
    options = parse_options(arguments)
    _allow_descriptors()
    # Files, sockets and folders are this user's alone, whoever makes them.
    os.umask(0o077)
    try:
        return run_daemon(options)
    except (ArenaError, OSError) as error:
        complain(str(error))
        return 1


def _allow_descriptors() -> None:
    """Take as many descriptors as there may be: each segment needs up to three."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


if __name__ == "__main__":
    status = main()
    with suppress(OSError):  # nobody reads
        sys.stdout.flush()
        sys.stderr.flush()
    # The doors are closed; a thread of theirs that has not noticed is nobody's business any more.
    os._exit(status)
