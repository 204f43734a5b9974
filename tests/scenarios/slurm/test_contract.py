"""A real Slurm holds the contract of clusters."""

from __future__ import annotations

import dataclasses
import itertools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from launcher.clusters.running.cluster import RunFolder, read_run_folder
from launcher.clusters.running.slurm import SlurmRuns
from launcher.rundir import write_files, write_submission
from tests.launcher.clusters.running.cluster_suite import ClusterContract
from tests.launcher.shipped import rendered
from tests.scenarios.slurm.jobs import Slurm, slurm_job, stand_in


class SlurmWorld:
    cluster = SlurmRuns()
    has_queue = True
    remembers_deleted = True
    has_logs = True

    def __init__(self, slurm: Slurm, folder: Path) -> None:
        self._slurm = slurm
        self._folder = folder
        self._numbers = itertools.count()

    def start(self, *, is_held: bool = False) -> RunFolder:
        held = {"extra_options": {"hold": "true"}} if is_held else {}
        job = slurm_job(
            {
                "cluster": {"python": stand_in(self._folder), **held},
                "env": {"STAND_IN": "as told"},
            }
        )
        path = self._folder / f"a run's folder {next(self._numbers)}"
        write_files(path, rendered(job))
        submission = self.cluster.submit(RunFolder(path=path, job=job))
        write_submission(path, dataclasses.asdict(submission))
        return read_run_folder(path)

    def begin(self, run: RunFolder) -> None:
        self._slurm.run("scontrol", "release", run.job_id)
        # Its agents are there, so that what ends them is answered.
        self._slurm.wait_until(
            lambda: len(list(run.path.glob("seen-*.json"))) == run.job.trainer.num_nodes, "agents"
        )

    def end(self, run: RunFolder, status: int) -> None:
        (run.path / "told.new").write_text(str(status))
        (run.path / "told.new").rename(run.path / "told")

    def end_from_outside(self, run: RunFolder) -> None:
        self._slurm.ask("scancel", run.job_id)

    def forget(self, run: RunFolder) -> RunFolder:
        """Name a job that the controller has never had: it says the same of one that it had."""
        self._slurm.ask("scancel", run.job_id)
        return dataclasses.replace(run, submitted={**run.submitted, "job_id": "999999"})

    @contextmanager
    def cut(self) -> Iterator[None]:
        """Have the commands look for the controller where nobody listens."""
        text = Path(os.environ["SLURM_CONF"]).read_text()
        path = self._folder / "cut.conf"
        text = text.replace("SlurmctldPort=", "SlurmctldPort=1#")
        path.write_text(text.replace("MessageTimeout=10", "MessageTimeout=2"))
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("SLURM_CONF", str(path))
            yield


class TestSlurm(ClusterContract):
    @pytest.fixture
    def world(self, slurm: Slurm, tmp_path: Path) -> SlurmWorld:
        return SlurmWorld(slurm, tmp_path)
