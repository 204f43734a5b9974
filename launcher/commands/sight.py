"""Find the run that a person means, and see how it stands."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import reduce
from pathlib import Path

from launcher.clusters.running.cluster import Cluster, RunFolder, read_run_folder
from launcher.clusters.running.kubernetes import EVENTS_COPY
from launcher.clusters.running.requests import read_request
from launcher.composition.choice import nearest
from launcher.errors import RecipeError
from launcher.monitor.phases import PHASES
from launcher.monitor.runstate import LAUNCHER_NODE, RunState, next_state, start_state
from launcher.monitor.standing import JobStatus, Phase, Standing, decide_standing
from launcher.rundir import EVENTS_FILE, JOB_FILE, SUBMITTED_FILE
from resilience.event_files import event_files
from resilience.events import EventReader

RUNS_FOLDER = "runs"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sight:
    """A run as it is seen at one moment."""

    run: RunFolder
    standing: Standing
    state: RunState
    time: float
    """Unix seconds of the moment."""
    last_event: float | None
    """Unix seconds; None where no event can be read."""
    left_out: tuple[str, ...] = ()
    """Lines on parts of the events that could not be read."""


def see_run(run: RunFolder, cluster: Cluster) -> Sight:
    """Ask the cluster and read the events."""
    return sight_of(run, cluster, cluster.status(run))


def sight_of(run: RunFolder, cluster: Cluster, said: JobStatus) -> Sight:
    """Return what is seen of a run of which its cluster has said something."""
    # Behind the status: what the run has said of its end is then there.
    path = run.path / EVENTS_COPY
    # A cluster that gives no answer is not asked again, which takes as long each time.
    if said.phase is not Phase.UNREACHABLE or not event_files(path):
        path = cluster.events(run)
    reader = EventReader(path)
    events = reader.read_new()
    nodes = dict.fromkeys(event.node for event in events if event.node != LAUNCHER_NODE)
    state = reduce(next_state, events, start_state(run.job, tuple(nodes)))
    now = time.time()
    is_cut = path.name == EVENTS_COPY and state.phase != PHASES[-1]
    standing = decide_standing(said, state, read_request(run), now, is_cut=is_cut)
    left_out = reader.left_out(is_over=standing.phase.has_ended)
    if is_cut and standing.phase.has_ended and events:
        left_out.append("later events, since no pod runs that has them")
    return Sight(
        run=run,
        standing=standing,
        state=state,
        time=now,
        last_event=max((event.time for event in events), default=None),
        left_out=tuple(left_out),
    )


def find_run(word: str, start: Path) -> RunFolder:
    """Return the run of a folder, or of a name below ./runs.

    Raises RecipeError that names the runs whose names are near.
    """
    for folder in (start / word, start / RUNS_FOLDER / word):
        if word and (folder / JOB_FILE).is_file():
            return read_run_folder(folder.absolute())
    names = [
        str(path.relative_to(start / RUNS_FOLDER)) for path in run_folders(start / RUNS_FOLDER)
    ]
    if not names:
        raise RecipeError(
            f"no run {word!r}, and none below {start / RUNS_FOLDER}; allowed: a run's folder, or "
            "its name below ./runs"
        )
    raise RecipeError(f"no run {word!r}; {nearest(word, names)}")


def run_folders(parent: Path) -> Iterator[Path]:
    """Yield the folders of runs that were started below a folder, by name; none within a run."""
    for place, folders, files in os.walk(parent):
        folders.sort()
        if JOB_FILE in files:
            folders.clear()
            if SUBMITTED_FILE in files or event_files(Path(place, EVENTS_FILE)):
                yield Path(place)
