"""The fields of a job, before the rules that join them."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, Field

from launcher import SCHEMA_VERSION, VERSION
from launcher.job.cluster import Cluster, K8sCluster
from launcher.job.fields import Count, DnsLabel, EnvName, EnvValue, OneLine, Section, TimeLimit
from launcher.job.workload import (
    AnyTrainer,
    Data,
    Instance,
    Model,
    Resources,
    ScriptTrainer,
    Trainer,
)
from resilience.settings import ResilienceSettings, TieredSettings

RECIPE_NAME = r"^[a-z0-9_]+(/[a-z0-9_]+)*$"


def _check_schema(value: int) -> int:
    if value > SCHEMA_VERSION:
        raise ValueError(
            f"allowed: {SCHEMA_VERSION}, the newest that launcher {VERSION} knows; this recipe is "
            "for a newer launcher"
        )
    return value


class RecipeInfo(Section):
    """Which recipe this job was resolved from."""

    name: Annotated[str, Field(pattern=RECIPE_NAME)]
    """The recipe's path below recipes/ without .yaml, such as llama/llama3_8b_pretrain."""
    version: Count
    """Whole number that is raised whenever the recipe's results change."""
    schema_version: Annotated[
        int,
        Field(alias="schema", ge=1, json_schema_extra={"maximum": SCHEMA_VERSION}),
        AfterValidator(_check_schema),
    ]
    """Layout of recipe files that this file was written for: 1."""
    description: OneLine
    """One line that tells people what the recipe trains."""


class JobContent(Section):
    """One run of a recipe on one kind of cluster, field by field."""

    recipe: RecipeInfo
    """The recipe's own name, version and description."""
    name: DnsLabel
    """Name of the job on its cluster; run.name, or else the last part of recipe.name with - for
    _."""
    time_limit: TimeLimit | None
    """The run is ended after this long: D-HH:MM:SS or HH:MM:SS, in quotes; null sets no limit."""
    model: Model | None = None
    """Dimensions of the model, and the weights it starts from; /model: NAME under defaults selects
    them. A script has none."""
    trainer: AnyTrainer
    """Nodes, batches, precision, parallelism and optimizer, or the program; /trainer: torch,
    megatron or script under defaults selects the kind."""
    data: Data | None = None
    """Source of the training text, and the length of a sample; /data: KIND under defaults selects
    it. A script has none."""
    instance: Instance
    """Hardware of one node; /instance: TYPE under defaults takes it from conf/instance/, whose
    numbers may not be changed."""
    resources: Resources
    """CPUs, memory, huge pages and /dev/shm that each node of the job asks the cluster for."""
    resilience: ResilienceSettings
    """Features that keep the run going through faults; a feature that is null is off."""
    env: dict[EnvName, EnvValue | None]
    """Environment variables of the workers: {NAME: text}; they replace those that the launcher sets
    by itself, and null leaves one out. Secrets go to cluster.secrets instead."""
    cluster: Cluster
    """Where the job runs: local unless cluster=NAME on the command line, or override /cluster: NAME
    under defaults, selects another."""

    @property
    def training(self) -> TrainingContent | None:
        """Return the job as one that a trainer of ours trains, None for a script."""
        if isinstance(self.trainer, ScriptTrainer):
            return None
        return TrainingContent.model_construct(**{name: getattr(self, name) for name in _FIELDS})

    @property
    def num_nodes_started(self) -> int:
        """Return how many nodes start: those that train and those that stand by."""
        return self.trainer.num_nodes + self.resilience.standby_nodes

    @property
    def num_nodes_max(self) -> int:
        """Return how many nodes the job may have at a time, those that stand by among them."""
        elastic = self.resilience.elastic
        num_nodes = max(self.trainer.num_nodes, elastic.nodes_max if elastic else 0)
        return num_nodes + self.resilience.standby_nodes

    def num_nodes_at(self, size: int) -> int:
        """Return how many nodes there are to be at a size: those that stand by come at the last."""
        elastic = self.resilience.elastic
        is_last = elastic is not None and size == elastic.nodes_max
        return size + (self.resilience.standby_nodes if is_last else 0)

    @property
    def resizes_by_restart(self) -> bool:
        """Return whether another size is another start of all workers, as HyperPod has it.

        What memory holds goes with a pod, and no daemon knows another.
        """
        is_hyperpod = isinstance(self.cluster, K8sCluster) and self.cluster.job_kind == "hyperpod"
        features = self.resilience
        return is_hyperpod and bool(features.elastic) and features.checkpointless is None

    @property
    def memoryd(self) -> TieredSettings | None:
        """Return the settings of a job that starts memoryd on its nodes, None of any other."""
        settings = self.resilience.tiered
        return settings if settings and settings.starts_memoryd else None


class TrainingContent(JobContent):
    """A job that a trainer of ours trains."""

    model: Model
    trainer: Trainer
    data: Data


_FIELDS = tuple(JobContent.model_fields)
