"""The Job: a resolved recipe, frozen, and the only thing that leaves the launcher.

The same recipe with the same overrides has the same bytes and so the same
digest: no time, no user name and no folder of the submitting machine is in it.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import TypeVar

from pydantic import ValidationError, model_validator

from launcher.errors import RecipeError
from launcher.job.cluster import K8sCluster, SlurmCluster
from launcher.job.content import JobContent, TrainingContent
from launcher.job.rules import broken_rules
from resilience.plain_files import read_plain
from resilience.validation import first_problem


class Job(JobContent):
    """A job whose fields fit each other."""

    @model_validator(mode="after")
    def _check_rules(self) -> Job:
        if problems := broken_rules(self):
            raise ValueError("\n".join(problems))
        return self

    @property
    def k8s(self) -> K8sCluster:
        """Return the settings of the Kubernetes cluster that the job is for."""
        assert isinstance(self.cluster, K8sCluster)
        return self.cluster

    @property
    def slurm(self) -> SlurmCluster:
        """Return the settings of the Slurm cluster that the job is for."""
        assert isinstance(self.cluster, SlurmCluster)
        return self.cluster

    def to_json(self) -> str:
        """Return job.json: sorted keys, two spaces, a newline at the end."""
        content = self.model_dump(mode="json", by_alias=True)
        return json.dumps(content, indent=2, sort_keys=True, ensure_ascii=True) + "\n"

    def digest(self) -> str:
        """Return the SHA-256 of job.json in hex."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()


class TrainingJob(TrainingContent, Job):
    """A job that a trainer of ours trains."""


class JobFileError(RecipeError):
    """A job.json is missing, or it is not what this version writes."""


_Job = TypeVar("_Job", bound=Job)


def read_job(path: Path) -> Job:
    """Read the job.json that the launcher wrote.

    Raises JobFileError.
    """
    return _read(path, Job)


def read_training_job(path: Path) -> TrainingJob:
    """Read the job.json of a job that a trainer of ours trains. Raises JobFileError."""
    return _read(path, TrainingJob)


def _read(path: Path, kind: type[_Job]) -> _Job:
    try:
        return kind.model_validate_json(read_plain(path), strict=True)
    except OSError as error:
        raise JobFileError(f"cannot read the job {path}: {error.strerror or error}") from error
    except ValidationError as error:
        problem = first_problem(error, whole="the whole file")
        raise JobFileError(f"{path} is no job of this version: {problem}") from error
