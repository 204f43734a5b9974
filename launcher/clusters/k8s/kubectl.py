"""kubectl, the program by which a Kubernetes cluster is asked."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher.clusters.k8s.objects import Found, read_found, removal
from launcher.clusters.submission import run_program
from launcher.errors import OutsideError
from launcher.job import Job
from launcher.job.cluster_rules import pods_name

_RESOURCES = {
    "job": "jobs.batch",
    "hyperpod": "hyperpodpytorchjobs.sagemaker.amazonaws.com",
    "trainjob": "trainjobs.trainer.kubeflow.org",
}


@dataclass(frozen=True, slots=True)
class Kubectl:
    """kubectl in a job's namespace; its calls raise OutsideError with its words."""

    job: Job
    folder: Path
    timeout_s: float = 120.0

    @property
    def command(self) -> tuple[str, ...]:
        """Return how kubectl is called: it gives up by itself."""
        return ("kubectl", f"--namespace={self.job.k8s.namespace}", "--request-timeout=30s")

    def ask(self, *words: str, text: str = "") -> str:
        """Return what kubectl prints."""
        return run_program((*self.command, *words), self.folder, text, self.timeout_s)

    def find(self, *words: str) -> list[dict[str, Any]]:
        """Return those objects that there are."""
        return read_found(self.ask("get", *words, "--ignore-not-found", "--output=json"))

    def create(self, found: Found) -> str:
        """Create an object, or those of a List."""
        # By standard input: arguments and files may be read by others.
        return self.ask("create", "--filename=-", "--output=json", text=json.dumps(found))

    @property
    def job_names(self) -> tuple[str, ...]:
        """Return the names of the run's job and of what controllers make of it; its Job is last."""
        cluster, name = self.job.k8s, self.job.name
        first = f"{_RESOURCES[cluster.job_kind]}/{name}"
        if cluster.job_kind != "trainjob":
            return (first,)
        inner = f"jobs.batch/{pods_name(self.job, cluster)}"
        return (first, f"jobsets.jobset.x-k8s.io/{name}", inner)

    def give(self, found: Found, owner: Mapping[str, str]) -> None:
        """Have this very object go with its owner."""
        metadata = found["metadata"]
        change = {"metadata": {"uid": metadata["uid"], "ownerReferences": [dict(owner)]}}
        kind = f"{found['kind'].lower()}s.{found['apiVersion'].partition('/')[0]}"
        words = (f"{kind}/{metadata['name']}", "--type=merge", f"--patch={json.dumps(change)}")
        self.ask("patch", *words)

    def remove(self, found: Found) -> None:
        """Ask for an object's removal; one that is gone, or whose name another has, is no error."""
        words, options = removal(found)
        try:
            self.ask(*words, text=options)
        except OutsideError as error:
            if not any(reason in str(error) for reason in ("(NotFound)", "(Conflict)")):
                raise

    def removal_text(self, found: Found) -> str:
        """Return what a person types to remove this very object."""
        words, options = removal(found)
        return f"echo {shlex.quote(options)} | {shlex.join((*self.command, *words))}"
