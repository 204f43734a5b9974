"""Ask daemons of checkpoints: python -m resilience.tiered wait|status [options].

    wait    return as soon as a daemon answers
    status  show which steps there are, and in which tier

Exit status 0; 1 where a daemon does not answer or refuses, 2 for wrong options.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from resilience.arguments import Parser, read_as, read_token
from resilience.settings import Seconds
from resilience.tiered.errors import RefusedError, TieredError
from resilience.tiered.memoryd.options import default_folder
from resilience.tiered.status import Told, ask_daemon, find_folders, render_status, wait_for_daemon

_FOLDER = "MEMORYD_DIR"
_TOKEN_FILE = "MEMORYD_TOKEN_FILE"


def main(arguments: Sequence[str] | None = None) -> int:
    """Do what the command line asks for; returns the exit status."""
    given = _parse(arguments)
    if given.command == "status":
        return _tell_status(given)
    try:
        wait_for_daemon(given.dir, timeout_s=given.timeout_s, token=given.token_file or "")
    except TieredError as error:
        return _complain(str(error))
    return 0


def _tell_status(given: argparse.Namespace) -> int:
    own = os.environ.get(_FOLDER)
    folders = given.dir or ([Path(own)] if own else find_folders())
    if not folders:
        return _complain("no daemon of this user has a folder in /dev/shm; name one with --dir")
    told: list[Told] = []
    status = 0
    for folder in folders:
        try:
            told.append(ask_daemon(folder, token=given.token_file or ""))
        except RefusedError as error:
            status = _complain(
                f"{folder}: {error}; --token-file names the file with the daemon's, which is "
                "run.token in the run's folder"
            )
        except TieredError as error:
            status = _complain(f"{folder}: {error}")
    with suppress(BrokenPipeError):  # nobody reads on
        if given.json:
            content = {"daemons": [each.to_json() for each in told]}
            sys.stdout.write(json.dumps(content, indent=2) + "\n")
        elif told:
            sys.stdout.write(render_status(told))
        sys.stdout.flush()
    return status


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(
        prog="python -m resilience.tiered",
        description="Ask daemons of checkpoints.",
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    wait = commands.add_parser(
        "wait", help="return as soon as a daemon answers", allow_abbrev=False
    )
    wait.add_argument(
        "--dir", type=Path, default=Path(os.environ.get(_FOLDER) or default_folder()),
        help=f"the daemon's folder (default: {_FOLDER}, else /dev/shm/memoryd-UID)",
    )  # fmt: skip
    wait.add_argument(
        "--timeout-s", type=read_as(Seconds), default=60.0, metavar="N",
        help="how long to wait at most (default 60)",
    )  # fmt: skip
    status = commands.add_parser(
        "status", help="show which steps there are, and in which tier", allow_abbrev=False
    )
    status.add_argument(
        "--dir", type=Path, action="append",
        help=f"a daemon's folder, may be given many times (default: {_FOLDER}, else all of this "
             "user in /dev/shm)",
    )  # fmt: skip
    status.add_argument("--json", action="store_true", help="all that the daemons say, as JSON")
    for each in (wait, status):
        each.add_argument(
            "--token-file", type=read_token, default=os.environ.get(_TOKEN_FILE) or None,
            metavar="FILE", help=f"file with what the daemon asks for (default: {_TOKEN_FILE})",
        )  # fmt: skip
    return parser.parse_args(arguments)


def _complain(text: str) -> int:
    with suppress(OSError):  # nobody reads
        sys.stderr.write(f"resilience.tiered: {text}\n")
    return 1


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    sys.exit(main())
