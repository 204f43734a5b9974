"""How long a node that is asked to leave has, on each kind of cluster."""

from __future__ import annotations

import re

import pytest

from launcher.clusters.local_run import GRACE_S, node_grace_s
from launcher.errors import RecipeError
from launcher.job.grace import workers_grace_s
from tests.launcher.shipped import shipped_job

RECIPE = "llama/llama3_tiny_elastic"
DEADLINE = "resilience.elastic.graceful_shutdown_timeout_s"
POD, WARNING = "cluster.termination_grace_s", "cluster.signal_before_end_s"
NO_DAEMON = "resilience.tiered=null"
ALONE = "resilience.elastic.may_lose_steps=true"


@pytest.mark.parametrize(
    ("cluster", "overrides", "grace_s"),
    [
        pytest.param("job", [], 55, id="pods"),
        pytest.param("job", [f"{POD}=15"], 10, id="less-than-agents-take"),
        pytest.param("job", [f"{DEADLINE}=55"], 55, id="all-of-a-pods"),
        pytest.param("job", [f"{DEADLINE}=5"], 5, id="its-own"),
        pytest.param("slurm", [], 65, id="slurm"),
        pytest.param("slurm", [f"{DEADLINE}=65"], 65, id="all-of-slurms"),
        pytest.param("slurm", [NO_DAEMON, ALONE, f"{WARNING}=15"], 10, id="without-a-daemon"),
        pytest.param("slurm", [f"{WARNING}=null"], None, id="no-warning"),
        pytest.param("local", [], None, id="local"),
        pytest.param("local", [f"{DEADLINE}=100"], 100, id="local-has-no-limit"),
    ],
)
def test_a_node_has_what_the_recipe_says_or_what_the_cluster_gives(
    cluster: str, overrides: list[str], grace_s: float | None
) -> None:
    assert workers_grace_s(shipped_job(RECIPE, cluster, overrides)) == grace_s


@pytest.mark.parametrize(
    ("cluster", "overrides", "message"),
    [
        ("job", [f"{DEADLINE}=56"],
         (f"{DEADLINE} 56 is more than the 55 s that {POD} 60 leaves the workers; allowed: at "
          f"most 55, or {POD} of at least 61")),
        ("job", [f"{POD}=5"],
         (f"{POD} 5 is too short for resilience.elastic: a node that is asked to leave needs 5 s "
          "for its own end; allowed: at least 6")),
        ("slurm", [f"{DEADLINE}=66"],
         (f"{DEADLINE} 66 is more than the 65 s that {WARNING} 120 leaves the workers; allowed: "
          f"at most 65, or {WARNING} of at least 121")),
        ("slurm", [f"{DEADLINE}=30", f"{WARNING}=null"],
         f"{DEADLINE} 30 needs {WARNING}, which is null; set it to at least 85"),
        ("slurm", [f"{DEADLINE}=30", f"{WARNING}=55"],
         (f"{WARNING} 55 is too short for resilience.elastic: a node that is asked to leave "
          "needs 55 s for its own end; allowed: at least 85")),
    ],
)  # fmt: skip
def test_a_deadline_beyond_the_clusters_is_refused(
    cluster: str, overrides: list[str], message: str
) -> None:
    with pytest.raises(RecipeError, match=re.escape(message)):
        shipped_job(RECIPE, cluster, overrides)


def test_hyperpods_operator_is_told_any_deadline() -> None:
    shipped_job(RECIPE, "hyperpod", [f"{DEADLINE}=600", f"{POD}=5"])


def test_a_node_of_this_machine_lives_for_as_long_as_its_workers_may() -> None:
    own, usual = shipped_job(RECIPE, "local", [f"{DEADLINE}=100"]), shipped_job(RECIPE, "local")

    assert node_grace_s(own) > 100
    assert node_grace_s(usual) == GRACE_S
