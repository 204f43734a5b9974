"""Runs whose nodes have a memoryd each, and what came of their checkpoints."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher.job import Job
from resilience.events import Event
from resilience.tiered.client import TieredClient
from resilience.tiered.loader import whole_steps
from tests.recipes_training.workers import Outcome
from tests.resilience.tiered.cluster import make_cluster
from tests.resilience.tiered.daemons import Daemon
from tests.scenarios.recovery.runs import make_fault_job, shipped_settings

BUDGET_MIB = 64


def folder_store(path: Path | str, **values: Any) -> dict[str, Any]:
    """Return the settings of a store in a folder."""
    return {**shipped_settings("tiered/_store")["store"], "url": f"folder:{path}", **values}


def tiered(
    *, every_n_steps: int | None = 5, every_s: float | None = None, **values: Any
) -> dict[str, Any]:
    """Return the settings of checkpoints in tiers; what daemons are told stands elsewhere."""
    settings = shipped_settings("tiered/_settings")
    settings["ram"] |= {"every_n_steps": every_n_steps, "every_s": every_s, "keep": 2}
    return {**settings, **values}


@dataclass
class Nodes:
    """A daemon for each node, by the node's name."""

    folder: Path
    daemons: dict[str, Daemon]

    def __getitem__(self, node: str) -> Daemon:
        return self.daemons[node]

    def variables(self, node: str) -> dict[str, str]:
        """Return what tells a node's workers of its daemon."""
        return {"MEMORYD_DIR": str(self.daemons[node].folder)}

    def lose_memory(self, *names: str) -> None:
        """Kill these daemons or all, remove what they held, and start them again."""
        lost = [self.daemons[each] for each in names or self.daemons]
        for each in lost:
            each.kill()
            shutil.rmtree(each.folder)
        for each in lost:
            each.start()


@contextmanager
def start_nodes(
    folder: Path, names: Sequence[str] = ("n0",), *, options: Sequence[str] = ()
) -> Iterator[Nodes]:
    """Start a daemon for each name; more than one know each other, a failure domain each."""
    folder.mkdir(parents=True, exist_ok=True)
    with make_cluster(folder, names, budget_mib=BUDGET_MIB, options=options) as cluster:
        cluster.start()
        yield Nodes(folder, cluster.nodes)


def make_tiered_job(trainer: str, *, tiers: dict[str, Any] | None = None, **parts: Any) -> Job:
    """Return a job under agents that takes a checkpoint every five steps."""
    return add_tiers(make_fault_job(trainer, **parts), tiers)


def add_tiers(job: Job, tiers: dict[str, Any] | None = None) -> Job:
    """Return the job with checkpoints, every five steps where nothing else is said."""
    content = job.model_dump(mode="json", by_alias=True)
    content["resilience"]["tiered"] = tiers or tiered()
    return Job.model_validate(content)


def open_only(daemon: Daemon) -> TieredClient:
    """Return a client of the only namespace that a daemon has."""
    (namespace,) = daemon.client(None).status()["namespaces"]
    known = json.loads((daemon.folder / "jobs.json").read_text())[namespace]
    return daemon.client(namespace, job=known["job"])


def read_shards(daemon: Daemon) -> dict[tuple[int, str], Any]:
    """Return by step and shard what makes a run's state: checksums, and the rest of it."""
    client = open_only(daemon)
    found = {}
    for offer in whole_steps(client):
        for shard in offer.shards:
            with client.read(step=offer.step, generation=offer.generation, shard=shard) as loan:
                rest = loan.meta.rest
                assert (offer.step, shard) not in found
                found[offer.step, shard] = (
                    loan.meta.checksums,
                    rest["view"],
                    rest["recovery"]["last"],
                )
    return found


def saved_steps(outcome: Outcome) -> list[int | None]:
    """Return the steps that rank 0 has saved, in the order of their ends."""
    return [each.step for each in outcome.named("checkpoint_saved")]


def loads(outcome: Outcome) -> list[tuple[int | None, int | None, str]]:
    """Return rank, step and source of each load."""
    found = outcome.named("checkpoint_loaded")
    return sorted((each.rank or 0, each.step, each.fields["source"]) for each in found)


def is_saved(step: int) -> Any:
    """Return what tells the event of a checkpoint of this step or a later one."""

    def is_it(event: Event) -> bool:
        return event.event == "checkpoint_saved" and (event.step or 0) >= step

    return is_it
