"""The fields of a job, before the rules that join them."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from launcher.job.cluster import Cluster
from launcher.job.fields import Count, DnsLabel, EnvName, EnvValue, OneLine, Section, TimeLimit
from launcher.job.workload import Data, Instance, Model, Resources, Trainer
from resilience.settings import ResilienceSettings

SCHEMA_VERSION = 1


class RecipeInfo(Section):
    """Which recipe this job was resolved from."""

    name: Annotated[str, Field(pattern=r"^[a-z0-9_]+(/[a-z0-9_]+)*$")]
    version: Count
    """Raised whenever the recipe's results change."""
    schema_version: Annotated[int, Field(alias="schema", ge=SCHEMA_VERSION, le=SCHEMA_VERSION)]
    description: OneLine


class JobContent(Section):
    """One run of a recipe on one kind of cluster, field by field."""

    recipe: RecipeInfo
    name: DnsLabel
    time_limit: TimeLimit | None
    """The cluster ends the run after this long; null sets no limit."""
    model: Model
    trainer: Trainer
    data: Data
    instance: Instance
    resources: Resources
    resilience: ResilienceSettings
    env: dict[EnvName, EnvValue]
    cluster: Cluster

    @property
    def num_nodes_started(self) -> int:
        """Return how many nodes start: those that train and those that stand by."""
        return self.trainer.num_nodes + self.resilience.standby_nodes
