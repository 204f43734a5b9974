"""The workers' variables: those that follow from a job, and the recipe's own before them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from launcher.errors import RecipeError
from launcher.job.environment import own_variables, worker_environment
from launcher.paths import shipped_folder
from launcher.secrets import held_secrets
from tests.launcher.command import launch, refuse
from tests.launcher.k8s_job import LARGE, TINY, k8s_job
from tests.launcher.shipped import shipped_job, with_values

NETWORK = {
    "FI_EFA_SET_CUDA_SYNC_MEMOPS": "0",
    "FI_PROVIDER": "efa",
    "NCCL_SOCKET_IFNAME": "^lo,docker,veth",
}
GPU = {"OMP_NUM_THREADS": "8", "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
ONE_QUEUE = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}


def follows(changes: Mapping[str, Any], recipe: str = LARGE, kind: str = "job") -> dict[str, str]:
    """Return the variables that follow from a recipe's job with `changes`, be they sound or not."""
    content = with_values(shipped_job(recipe, kind), changes)
    return {each.name: each.value for each in own_variables(content)}


@pytest.mark.parametrize("kind", ["slurm", "job", "hyperpod"])
@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        pytest.param({}, GPU | NETWORK | ONE_QUEUE, id="tensor-parallel-with-efa"),
        pytest.param({"trainer.tensor_parallel": 1}, GPU | NETWORK, id="no-tensor-parallel"),
        pytest.param({"trainer.kind": "torch"}, GPU | NETWORK, id="torch"),
        pytest.param(
            {"instance.num_efa": 0},
            GPU | ONE_QUEUE | {"NCCL_SOCKET_IFNAME": "^lo,docker,veth"},
            id="no-efa",
        ),
        pytest.param(
            {"resources.hugepages_2mi_mib": 0},
            GPU | NETWORK | ONE_QUEUE | {"FI_EFA_USE_HUGE_PAGE": "0"},
            id="no-huge-pages",
        ),
        pytest.param({"trainer.num_nodes": 1}, GPU | ONE_QUEUE, id="one-node"),
        pytest.param({"instance.accelerator": "cpu"}, {"OMP_NUM_THREADS": "8"}, id="cpus"),
    ],
)
def test_variables_follow_from_the_instance_and_the_layout(
    kind: str, changes: dict[str, Any], expected: dict[str, str]
) -> None:
    assert follows(changes, kind=kind) == expected


@pytest.mark.parametrize(
    ("recipe", "key", "none", "some", "names"),
    [
        ("70b_pretrain_checkpointless", "checkpointless.standby_nodes", 0, 1, set(NETWORK)),
        ("tiny_elastic", "elastic.nodes_max", 1, 2, {"NCCL_SOCKET_IFNAME"}),
    ],
)
def test_nodes_that_stand_by_or_may_come_are_nodes_as_well(
    recipe: str, key: str, none: int, some: int, names: set[str]
) -> None:
    alone, several = (
        follows(
            {"trainer.num_nodes": 1, "instance.accelerator": "gpu", f"resilience.{key}": number},
            f"llama/llama3_{recipe}",
        )
        for number in (none, some)
    )

    assert not alone.keys() & NETWORK.keys()
    assert several.items() >= {name: NETWORK[name] for name in names}.items()


def test_recipe_replaces_a_variable_or_leaves_it_out() -> None:
    given = {"FI_PROVIDER": "tcp", "NCCL_SOCKET_IFNAME": None, "MINE": "1", "NOT": None}

    found = worker_environment(k8s_job("job", {"env": given}, LARGE))

    assert found["FI_PROVIDER"] == "tcp"
    assert found["MINE"] == "1"
    assert not found.keys() & {"NCCL_SOCKET_IFNAME", "NOT"}


def test_variable_whose_value_a_secret_gives_is_not_the_launchers() -> None:
    secrets = {"cluster.secrets": {"FI_PROVIDER": {"name": "a", "key": "b"}}}

    assert "FI_PROVIDER" not in worker_environment(k8s_job("job", secrets, LARGE))


def test_workers_on_this_machine_keep_to_its_own_network() -> None:
    on_cpus = worker_environment(shipped_job(TINY, "local"))
    on_gpus = worker_environment(shipped_job(LARGE, "local"))

    assert on_cpus == {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    assert on_gpus == GPU | ONE_QUEUE


def test_explain_says_what_a_variable_follows_from_and_what_it_replaced(tmp_path: Path) -> None:
    recipe = (f"recipe={LARGE}", "cluster=k8s")

    ended = launch("explain", *recipe, "+env.FI_PROVIDER=tcp", "env.FI_PROVIDER",
                   "env.CUDA_DEVICE_MAX_CONNECTIONS", folder=tmp_path)  # fmt: skip

    line = "from recipes/llama/llama3_70b_pretrain.yaml, line 36"
    assert ended.out.splitlines() == [
        "env.FI_PROVIDER: 'tcp'",
        "  from command line, +env.FI_PROVIDER=tcp",
        "  replaced 'efa', from the launcher",
        "env.CUDA_DEVICE_MAX_CONNECTIONS: '1'",
        "  from the launcher",
        "  follows from trainer.kind: 'megatron', from conf/trainer/megatron.yaml, line 4",
        f"  follows from trainer.tensor_parallel: 8, {line}",
    ]
    assert "'env.FI_PROVIDER'" in refuse(tmp_path, "explain", *recipe, "env.FI_PROVDER")


def test_variable_that_is_left_out_holds_no_secret() -> None:
    assert list(held_secrets({"env": {"HF_TOKEN": None}})) == []
    assert len(list(held_secrets({"env": {"HF_TOKEN": "x"}}))) == 1


READ_BY_JOB_SBATCH = sorted(
    {
        *re.findall(
            r"\bSLURMD?_\w+", (shipped_folder() / "templates/slurm/job.sbatch.j2").read_text()
        )
    }
    - {"SLURM_TIME_FORMAT"}
)


@pytest.mark.parametrize("name", READ_BY_JOB_SBATCH)
def test_variable_of_slurm_that_the_script_reads_is_refused(name: str) -> None:
    with pytest.raises(RecipeError, match=rf"^env\.{name} is a variable of the shell, of Slurm"):
        shipped_job(TINY, "slurm", [f"+env.{name}=x"])


@pytest.mark.parametrize("name", ["SLURM_CPU_BIND", "SLURM_HINT", "SLURM_MPI_TYPE", "SLURM_CONF"])
def test_options_of_srun_and_slurms_own_settings_pass_as_variables(name: str) -> None:
    assert shipped_job(TINY, "slurm", [f"+env.{name}=x"]).env[name] == "x"


@pytest.mark.parametrize(("name", "rule"), [
    ("RANK", "is a variable of"), ("OMP_NUM_THREADS", "is set by the manifest itself"),
])  # fmt: skip
def test_variable_that_is_taken_is_found_where_it_is_set(
    tmp_path: Path, name: str, rule: str
) -> None:
    recipe = (f"recipe={TINY}", "cluster=k8s", "cluster.job_kind=job")

    of_env = refuse(tmp_path, *recipe, f"+env.{name}=4")
    of_secrets = refuse(tmp_path, *recipe, f"+cluster.secrets.{name}={{name: a, key: b}}")

    assert of_env.startswith(f"env.{name} {rule}")
    assert f"\n  env.{name} 4: command line" in of_env, of_env
    assert of_secrets.startswith(f"cluster.secrets.{name} {rule}")
    assert f"\n  cluster.secrets.{name}: command line" in of_secrets
