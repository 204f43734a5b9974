"""A run's memory on the nodes of a Slurm cluster, removed by a short step on each."""

from __future__ import annotations

import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from launcher.clusters.running.cluster import ASK_TIMEOUT_S, Cleaned, RunFolder
from launcher.clusters.running.memory import batch_folder
from launcher.clusters.submission import run_program
from launcher.errors import OutsideError
from resilience.tiered.arena_folder import read_arenas

_LOG = re.compile(r"slurm-(\d+)\.(\d+)\.(.+)\.log")
_STEP_S = 60.0
_IMMEDIATE_S = 30
"""How long a step waits for its node: one that is down, or another job's alone, is not reached."""
_NUM_AT_ONCE = 8
_TAKES_STEPS = {"allocated", "completing", "idle", "mixed"}
# The lock is that of the daemon, or of those who use the batches: while somebody has it, the folder
# is in use. Only what is this user's own, and no link, is looked at.
_SCRIPT = r"""
remove() { # LOCK FOLDER
  if [ ! -d "$2" ] || [ -L "$2" ] || [ ! -O "$2" ]; then return; fi
  if flock --nonblock "$1" rm --recursive --force --one-file-system -- "$2"; then
    echo "removed $2"
  else
    echo "left $2"
  fi
}
if [ -n "$1" ]; then remove "$1/lock" "$1"; fi
if [ -n "$2" ] && [ -f "$2/batch-cache.json" ]; then remove "$2/alive.lock" "$2"; fi
"""


def clean_nodes(run: RunFolder) -> Cleaned:
    """Remove the run's memory on every node that it had; what is not reached is left."""
    if run.job.memoryd is None and run.job.resilience.batches is None:
        return Cleaned()
    nodes = sorted(newest_logs(run))
    with ThreadPoolExecutor(_NUM_AT_ONCE) as pool:
        answers = list(pool.map(lambda node: _clean_node(run, node), nodes))
    return Cleaned(
        removed=tuple(each for answer in answers for each in answer.removed),
        left=tuple(each for answer in answers for each in answer.left),
    )


def newest_logs(run: RunFolder) -> dict[str, Path]:
    """Return the log of the last start of each node that the run has had, by the node's name."""
    found: dict[str, tuple[int, int, Path]] = {}
    for path in (run.path / "logs").glob("slurm-*.log"):
        if name := _LOG.fullmatch(path.name):
            new = (int(name[1]), int(name[2]), path)
            found[name[3]] = max(found.get(name[3], new), new)
    return {node: path for node, (_, _, path) in found.items()}


def _clean_node(run: RunFolder, node: str) -> Cleaned:
    names = ("partition", "account", "qos", "reservation")
    given = {name: getattr(run.job.slurm, name) for name in names}
    command = (
        *("srun", "--quiet", "--nodes=1", "--ntasks=1", f"--nodelist={node}", "--time=2"),
        *("--input=none", f"--immediate={_IMMEDIATE_S}", f"--job-name=clean-{run.job.name}"),
        *(f"--{name}={value}" for name, value in given.items() if value),
        *("bash", "-c", _SCRIPT, "clean", str(read_arenas(run.path).get(node, ""))),
        str(batch_folder(run) or ""),
    )
    try:
        _check_node(run, node)
        return read_answer(run_program(command, run.path, timeout_s=_STEP_S).splitlines(), node)
    except OutsideError as error:
        words = str(error).splitlines()[-1]
        text = f"{node} was not reached, and may hold memory of the run: {words}"
        return Cleaned(left=(f"{text}; `clean` the run again when the node is back",))


def _check_node(run: RunFolder, node: str) -> None:
    """Raise OutsideError where a node takes no step: srun waits, and then calls it busy."""
    command = ("sinfo", "--noheader", "--Node", f"--nodes={node}", "--format=%T %E")
    lines = run_program(command, run.path, timeout_s=ASK_TIMEOUT_S).splitlines()
    state, _, reason = lines[0].partition(" ") if lines else ("unknown", "", "none")
    if state not in _TAKES_STEPS:
        why = "" if reason == "none" else f", {reason}"
        raise OutsideError(f"Slurm's state of it is {state}{why}")


def read_answer(lines: Sequence[str], node: str) -> Cleaned:
    """Return what a node's step says that it has done."""
    said = [line.partition(" ") for line in lines]
    return Cleaned(
        removed=tuple(f"{path} on {node}" for word, _, path in said if word == "removed"),
        left=tuple(
            f"{path} on {node}, which is in use" for word, _, path in said if word == "left"
        ),
    )
