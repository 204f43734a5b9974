"""Where a run's store is, and which steps are whole there as far as this machine can see it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from launcher.clusters.k8s.start import run_path
from launcher.clusters.running.cluster import RunFolder
from launcher.errors import OutsideError
from launcher.job.cluster import K8sCluster, LocalCluster
from launcher.job.lineage import checkpoints_namespace
from resilience.settings import StoreTier

LOOK_DEADLINE_S = 10.0
"""How long a file server may take for each look into the store."""


def run_place(run: RunFolder) -> tuple[Path, str]:
    """Return the run's folder as its nodes call it, and what tells the like of it apart there."""
    if isinstance(run.job.cluster, K8sCluster):
        return Path(run_path(run.job, run.job.cluster)), run.job.cluster.namespace
    return run.path, ""


def store_url(run: RunFolder, store: StoreTier) -> str:
    """Return the URL of a run's store, with the whole path of one in the run's own folder."""
    assert store.url is not None
    place, _ = run_place(run)
    return f"folder:{place / store.url.removeprefix('folder:')}" if store.is_in_run else store.url


@dataclass(frozen=True, slots=True)
class StoredSteps:
    """The steps in a run's store."""

    whole: tuple[int, ...]
    """Newest first."""
    damaged: Mapping[int, str]
    """Faults of damaged descriptions, by step."""


def stored_steps(run: RunFolder) -> StoredSteps | None:
    """Return the steps that are whole in a run's store; None where it cannot be seen.

    Those that the store knows to be of an older history are none. A folder is looked at where the
    run is of this machine: elsewhere the same path may be another one. S3 is not asked: its
    credentials are the nodes'. Raises OutsideError where the folder does not answer.
    """
    tiered = run.job.resilience.tiered
    store = tiered.store if tiered is not None and tiered.starts_memoryd else None
    is_local = isinstance(run.job.cluster, LocalCluster)
    if store is None or store.url is None or not is_local or not store.url.startswith("folder:"):
        return None
    if find_spec("xxhash") is None:
        return None  # of a machine that trains nothing itself
    url = store_url(run, store)
    from resilience.tiered.catalog import StepAt, find_stale
    from resilience.tiered.errors import TierError
    from resilience.tiered.stores.choice import open_as
    from resilience.tiered.stores.reader import StoreReader

    namespace = checkpoints_namespace(run.job, run.path)
    quick = store.model_copy(update={"deadline_s": LOOK_DEADLINE_S})
    try:
        reader = StoreReader(open_as(url, quick), namespace, source="folder")
        found = reader.steps(reads_all=True)
    except TierError as error:
        raise OutsideError(f"{url}: {error}") from error
    places = {StepAt(step=each.step, generation=each.generation): each for each in found}
    stale = find_stale(places)
    whole = {
        at.step
        for at, each in places.items()
        if at not in stale and len(each.shards) == each.num_shards
    }
    damaged = {step: why for (step, _), why in reader.left_out.items() if step not in whole}
    return StoredSteps(tuple(sorted(whole, reverse=True)), damaged)
