"""What a local run may use of this machine, and which jobs it is too small for."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import pytest

from launcher.errors import RecipeError
from launcher.job import Job
from launcher.job.tiered_memory import state_bytes
from launcher.machine import PROCESSES_PER_CORE, Machine, check_machine, overload, read_machine
from tests.launcher.command import launch
from tests.launcher.local_world import prepare
from tests.launcher.shipped import ASKED_FOR, RECIPES, shipped_job

TINY, FAULTY = "llama/llama3_tiny_pretrain", "llama/llama3_tiny_checkpointless"
LARGE = "llama/llama3_8b_pretrain"
MIB, GIB = 2**20, 2**30
SMALL = Machine(num_cores=2, memory_bytes=4 * GIB, num_gpus=0)
LAPTOP = Machine(num_cores=8, memory_bytes=16 * GIB, num_gpus=0)
# What version 1 says where nothing limits a group's memory.
NO_LIMIT_V1 = str(2**63 - 4096)
ONE_NODE = ("trainer.num_nodes=1", "trainer.num_devices=1", "trainer.global_batch_size=4")


@cache
def job_of(recipe: str, *overrides: str) -> Job:
    return shipped_job(recipe, "local", overrides)


def machine(**values: float) -> Machine:
    """Return a machine that has plenty of what is not given."""
    plenty = Machine(num_cores=4096, memory_bytes=sys.maxsize, num_gpus=4096)
    return dataclasses.replace(plenty, **values)  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def _plain_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)), raising=False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in {
        "proc/meminfo": f"MemTotal: {32 * MIB} kB\nMemFree: 1 kB\n",
        **files,
    }.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"{text}\n")
    return root


V2, OWN_V2 = {"proc/self/cgroup": "0::/user.slice/job.scope"}, "sys/fs/cgroup/user.slice/job.scope"
V1 = {
    "proc/self/cgroup": "5:memory:/docker/a1\n4:cpu,cpuacct:/docker/a1\n1:name=systemd:/docker/a1"
}
CPU_V1, MEMORY_V1 = "sys/fs/cgroup/cpu", "sys/fs/cgroup/memory"


@pytest.mark.parametrize(("files", "num_cores"), [
    pytest.param({}, 16, id="no-cgroup"),
    pytest.param(V2, 16, id="v2-without-files"),
    pytest.param({**V2, f"{OWN_V2}/cpu.max": "max 100000"}, 16, id="v2-max"),
    pytest.param({**V2, f"{OWN_V2}/cpu.max": "150000 100000"}, 1.5, id="v2-own"),
    pytest.param({**V2, f"{OWN_V2}/cpu.max": "9900000 100000"}, 16, id="v2-more-than-affinity"),
    pytest.param({**V2, f"{OWN_V2}/cpu.max": "max 100000",
                  "sys/fs/cgroup/user.slice/cpu.max": "400000 100000"}, 4, id="v2-ancestor"),
    pytest.param({**V2, f"{OWN_V2}/cpu.max": "800000 100000",
                  "sys/fs/cgroup/user.slice/cpu.max": "50000 100000"}, 0.5, id="v2-least"),
    pytest.param({"proc/self/cgroup": "0::/", "sys/fs/cgroup/cpu.max": "200000 100000"}, 2,
                 id="v2-container"),
    pytest.param({"proc/self/cgroup": "0::/../other", "sys/fs/cgroup/cpu.max": "200000 100000"}, 2,
                 id="v2-outside-of-the-namespace"),
    pytest.param({**V2, "sys/fs/cgroup/other.slice/cpu.max": "100000 100000"}, 16,
                 id="v2-not-ours"),
    pytest.param({**V2, f"{OWN_V2}/cpu.max": "many"}, 16, id="v2-not-understood"),
    pytest.param({**V1, f"{CPU_V1}/docker/a1/cpu.cfs_quota_us": "250000",
                  f"{CPU_V1}/docker/a1/cpu.cfs_period_us": "100000"}, 2.5, id="v1-own"),
    pytest.param({**V1, f"{CPU_V1}/cpu.cfs_quota_us": "100000",
                  f"{CPU_V1}/cpu.cfs_period_us": "50000"}, 2, id="v1-path-of-the-host"),
    pytest.param({**V1, f"{CPU_V1}/docker/a1/cpu.cfs_quota_us": "-1",
                  f"{CPU_V1}/docker/a1/cpu.cfs_period_us": "100000"}, 16, id="v1-minus-1"),
    pytest.param({**V1, f"{CPU_V1}/docker/a1/cpu.cfs_quota_us": "100000"}, 16, id="v1-no-period"),
    pytest.param({"proc/self/cgroup": "nothing known"}, 16, id="broken"),
])  # fmt: skip
def test_cores_are_the_least_of_affinity_and_quotas(
    tmp_path: Path, files: dict[str, str], num_cores: float
) -> None:
    assert read_machine(tree(tmp_path, files)).num_cores == num_cores


@pytest.mark.parametrize(("files", "memory_bytes"), [
    pytest.param({}, 32 * GIB, id="no-cgroup"),
    pytest.param({**V2, f"{OWN_V2}/memory.max": "max"}, 32 * GIB, id="v2-max"),
    pytest.param({**V2, f"{OWN_V2}/memory.max": str(4 * GIB)}, 4 * GIB, id="v2-own"),
    pytest.param({**V2, f"{OWN_V2}/memory.max": str(64 * GIB)}, 32 * GIB, id="v2-more-than-all"),
    pytest.param({**V2, f"{OWN_V2}/memory.max": "max",
                  "sys/fs/cgroup/user.slice/memory.max": str(8 * GIB)}, 8 * GIB, id="v2-ancestor"),
    pytest.param({**V1, f"{MEMORY_V1}/docker/a1/memory.limit_in_bytes": str(2 * GIB)}, 2 * GIB,
                 id="v1-own"),
    pytest.param({**V1, f"{MEMORY_V1}/docker/a1/memory.limit_in_bytes": NO_LIMIT_V1,
                  f"{MEMORY_V1}/memory.limit_in_bytes": str(3 * GIB)}, 3 * GIB, id="v1-ancestor"),
    pytest.param({**V1, f"{MEMORY_V1}/docker/a1/memory.limit_in_bytes": NO_LIMIT_V1}, 32 * GIB,
                 id="v1-no-limit"),
    pytest.param({"proc/meminfo": "MemTotal: much"}, sys.maxsize, id="broken"),
    pytest.param({**V2, "proc/meminfo": "", f"{OWN_V2}/memory.max": str(GIB)}, GIB,
                 id="limit-alone"),
])  # fmt: skip
def test_memory_is_the_least_of_what_is_installed_and_limits(
    tmp_path: Path, files: dict[str, str], memory_bytes: int
) -> None:
    assert read_machine(tree(tmp_path, files)).memory_bytes == memory_bytes


@pytest.mark.parametrize(("visible", "num_gpus"), [
    pytest.param(None, 3, id="unset"),
    pytest.param("", 0, id="empty"),
    pytest.param("-1", 0, id="minus-1"),
    pytest.param("0", 1, id="one"),
    pytest.param("0, 2", 2, id="two"),
    pytest.param("GPU-8932f937,MIG-b7b8", 2, id="names"),
    pytest.param("0,1,2,3,4,5,6,7", 3, id="more-than-there-are"),
])  # fmt: skip
def test_gpus_are_the_device_files_that_cuda_may_see(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, visible: str | None, num_gpus: int
) -> None:
    others = ("nvidiactl", "nvidia-uvm", "nvidia0p1", "nvidia-caps/nvidia-cap1", "null")
    files = {f"dev/{name}": "" for name in ("nvidia0", "nvidia3", "nvidia12", *others)}
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)

    assert read_machine(tree(tmp_path, files)).num_gpus == num_gpus


def test_machine_without_affinity_and_files_has_all_its_cores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: 10)

    assert read_machine(tmp_path) == Machine(num_cores=10, memory_bytes=sys.maxsize, num_gpus=0)


def test_unreadable_limits_are_no_limits(tmp_path: Path) -> None:
    root = tree(tmp_path, V2)
    for name in ("cpu.max", "memory.max"):
        (root / OWN_V2 / name).mkdir(parents=True)

    assert read_machine(root) == Machine(num_cores=16, memory_bytes=32 * GIB, num_gpus=0)


def test_this_machine_can_be_read() -> None:
    found = read_machine()

    assert 0 < found.num_cores <= 16
    assert 0 < found.memory_bytes <= sys.maxsize


@pytest.mark.parametrize(("recipe", "overrides", "few", "line"), [
    pytest.param(
        LARGE, [], {"num_gpus": 127},
        "trainer.num_nodes 16 x trainer.num_devices 8 on instance.type 'ml.p5.48xlarge' need "
        "128 GPUs, and this machine has 127", id="gpus-of-all-nodes"),
    pytest.param(
        TINY, [*ONE_NODE, "instance=ml.g5.xlarge"], {"num_gpus": 0},
        "trainer.num_nodes 1 x trainer.num_devices 1 on instance.type 'ml.g5.xlarge' need "
        "1 GPU, and this machine has 0", id="one-gpu"),
    pytest.param(
        LARGE, [], {"num_cores": 2},
        "trainer.num_nodes 16 x trainer.num_devices 8 = 128 workers are more than 8 for each of "
        "this machine's 2 cores = 16", id="workers"),
    pytest.param(
        LARGE, ["resilience/checkpointless=default"], {"num_cores": 2},
        "trainer.num_nodes 16 x trainer.num_devices 8 = 128 workers, and 16 spares, are more than "
        "8 for each of this machine's 2 cores = 16", id="spares"),
    pytest.param(
        FAULTY, ["resilience.checkpointless.standby_nodes=1"], {"num_cores": 1},
        "(trainer.num_nodes 2 + resilience.checkpointless.standby_nodes 1) x trainer.num_devices 2 "
        "= 6 workers, and 3 spares, are more than 8 for each of this machine's 1 core = 8",
        id="standby-nodes"),
    pytest.param(
        TINY, ["trainer.num_devices=8", "trainer.global_batch_size=64"], {"num_cores": 1.5},
        "trainer.num_nodes 2 x trainer.num_devices 8 = 16 workers are more than 8 for each of "
        "this machine's 1.5 cores = 12", id="quota-of-a-core-and-a-half"),
    pytest.param(
        TINY, [], {"memory_bytes": 20 * MIB},
        "trainer.num_nodes 2 x trainer.num_devices 2 hold the model's training state 4 times, "
        "31 MiB, and this machine has 20 MiB", id="memory"),
])  # fmt: skip
def test_line_names_the_fields_and_what_the_machine_has(
    recipe: str, overrides: Sequence[str], few: dict[str, float], line: str
) -> None:
    assert overload(job_of(recipe, *overrides), machine(**few)) == [line]


@pytest.mark.parametrize(("recipe", "enough"), [
    pytest.param(LARGE, {"num_gpus": 128}, id="a-gpu-a-rank"),
    pytest.param(LARGE, {"num_cores": 128 / PROCESSES_PER_CORE}, id="eight-workers-a-core"),
    pytest.param(FAULTY, {"num_cores": 6 / PROCESSES_PER_CORE}, id="workers-and-spares"),
    pytest.param(TINY, {"memory_bytes": 4 * state_bytes(job_of(TINY))}, id="all-of-the-memory"),
])  # fmt: skip
def test_machine_of_exactly_the_size_needed_is_enough(
    recipe: str, enough: dict[str, float]
) -> None:
    less = {name: value - (1 if isinstance(value, int) else 0.01) for name, value in enough.items()}

    assert overload(job_of(recipe), machine(**enough)) == []
    assert len(overload(job_of(recipe), machine(**less))) == 1


def test_devices_hold_the_state_where_there_are_any() -> None:
    assert overload(job_of(LARGE), machine(memory_bytes=GIB)) == []


@pytest.mark.parametrize("recipe", [each for each in RECIPES if "_tiny_" in each])
def test_tiny_recipes_run_on_a_small_machine(recipe: str) -> None:
    check_machine(job_of(recipe), SMALL)
    check_machine(job_of(recipe), dataclasses.replace(SMALL, num_cores=1))


def test_recipe_of_a_cluster_is_refused_on_a_laptop() -> None:
    with pytest.raises(RecipeError) as refused:
        check_machine(job_of(LARGE), LAPTOP)

    assert str(refused.value) == (
        "action 'run': this machine cannot hold the job:\n"
        "  trainer.num_nodes 16 x trainer.num_devices 8 on instance.type 'ml.p5.48xlarge' need "
        "128 GPUs, and this machine has 0\n"
        "  trainer.num_nodes 16 x trainer.num_devices 8 = 128 workers are more than 8 for each of "
        "this machine's 8 cores = 64\n"
        "use a smaller recipe, action=submit with a cluster, or oversubscribe=true to start it "
        "anyway"
    )


RUN = (f"recipe={LARGE}", "action=run", *ASKED_FOR[LARGE])


def test_a_run_that_this_machine_cannot_hold_is_refused_before_anything_is_written(
    tmp_path: Path,
) -> None:
    ended = launch(*RUN, folder=tmp_path)

    assert (ended.status, ended.out) == (2, "")
    assert ended.err.startswith("action 'run': this machine cannot hold the job:\n")
    assert "need 128 GPUs, and this machine has " in ended.err
    assert ended.err.endswith("or oversubscribe=true to start it anyway\n")
    assert list(tmp_path.iterdir()) == []


def test_oversubscribing_starts_it_and_leaves_the_job_as_it_is(tmp_path: Path) -> None:
    """A team's template stands in for what 128 workers would do."""
    prepare(tmp_path, "#!/bin/sh\n: {{ node }}\n")

    (tmp_path / "lines.jsonl").touch()
    data = (f"data.path={tmp_path}/lines.jsonl", "data.tokenizer=bytes")

    ended = launch(*RUN, *data, "oversubscribe=true", "run.dir=out", folder=tmp_path)

    assert ended.status == 0, ended.err
    assert "all nodes succeeded" in (tmp_path / "out" / "events.jsonl").read_text()
    assert (tmp_path / "out" / "job.json").read_text() == job_of(LARGE, *data).to_json()


def test_oversubscribing_is_said_as_true_or_false(tmp_path: Path) -> None:
    ended = launch(*RUN, "oversubscribe=maybe", folder=tmp_path)

    assert ended.status == 2
    assert ended.err.startswith("oversubscribe 'maybe': allowed: true or false\n")
