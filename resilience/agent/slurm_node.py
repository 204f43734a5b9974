"""What Slurm says of a node, for --node-state-command: python -m resilience.agent.slurm_node NODE.

Prints `off` for a node that Slurm has powered down, else `booted` and the Unix seconds of its last
boot, by the node's own clock. Prints nothing for a node that does not respond, of which Slurm knows
as little as anybody, nor for one that is on its way: a node that is powering down may still run.
"""

from __future__ import annotations

import argparse
import calendar
import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence

from resilience.arguments import Parser

_PROG = "python -m resilience.agent.slurm_node"
_DEADLINE_S = 4.0
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_STATE = re.compile(r"[A-Z_]+\*?(?:\+[A-Z_]+\*?)*")
_TIME_FORMAT = "%Y-%m-%dT%H:%M:%S"
_UNKNOWN = {
    "NOT_RESPONDING",
    "POWERED_DOWN",
    "POWERING_DOWN",
    "POWERING_UP",
    "POWER_DOWN",
    "POWER_UP",
}
"""States in which nobody knows whether the node that was booted last still runs."""


def read_word(text: str, node: str) -> str:
    """Return what `scontrol show node` says of a node, as above; times in it are UTC. Pure.

    Empty where the text is none of this one node, as scontrol writes it.
    """
    fields = {name: _read_field(text, name) for name in ("NodeName", "State", "BootTime")}
    if fields["NodeName"] != node or not _STATE.fullmatch(fields["State"]):
        return ""
    states = {each.rstrip("*") for each in fields["State"].split("+")}
    if "POWERED_DOWN" in states and not states & {"POWERING_UP", "POWER_UP"}:
        return "off"
    if "*" in fields["State"] or states & _UNKNOWN:
        return ""
    try:
        booted_s = calendar.timegm(time.strptime(fields["BootTime"], _TIME_FORMAT))
    except ValueError:
        return ""
    return f"booted {booted_s}"


def _read_field(text: str, name: str) -> str:
    """Return the value of a field that begins a line; empty where not exactly one does."""
    found = re.findall(rf"^\s*{name}=(\S+)", text, re.MULTILINE)
    return str(found[0]) if len(found) == 1 else ""


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the word of one node."""
    parser = Parser(prog=_PROG, description=(__doc__ or "").partition(":")[0] + ".")
    parser.add_argument("node", metavar="NODE", type=_node, help="its name in Slurm")
    node: str = parser.parse_args(arguments).node
    kept = {name: value for name, value in os.environ.items() if name != "SLURM_TIME_FORMAT"}
    try:
        done = subprocess.run(
            ["scontrol", "show", "node", node],
            env={**kept, "TZ": "UTC0"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_DEADLINE_S,
            check=True,
        )
    except subprocess.CalledProcessError as error:
        return _complain(f"{error} {error.stderr.strip()}")
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        return _complain(str(error))
    if word := read_word(done.stdout, node):
        sys.stdout.write(f"{word}\n")
    return 0


def _node(text: str) -> str:
    if not _NAME.fullmatch(text):
        raise argparse.ArgumentTypeError(
            f"{text!r} is no node of Slurm's; want letters, digits, '.', '_' and '-'"
        )
    return text


def _complain(text: str) -> int:
    sys.stderr.write(f"resilience.agent.slurm_node: {text}\n")
    return 1


if __name__ == "__main__":
    sys.exit(main())
