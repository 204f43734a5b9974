"""Every key of every shipped recipe does something.

Each key is changed, and something has to change with it that is no mere copy
of the recipe: a rendered text, what Megatron is told, or what a real training
run computes. A key that only bounds the others has to turn the job down.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from launcher.job import Job
from launcher.job.workload import MegatronTrainer, TorchTrainer
from recipes_training.megatron.plan import plan_megatron
from recipes_training.plan import plan_mesh, plan_schedule, plan_split
from tests.cases import slow
from tests.launcher.shipped import CLUSTERS, TRAINED, rendered, shipped_job, untiered_job
from tests.recipes_training.workers import Workers


def content(job: Job) -> dict[str, Any]:
    plain: dict[str, Any] = job.model_dump(mode="json", by_alias=True)
    return plain


SECTIONS: dict[str, Any] = content(shipped_job("llama/llama3_tiny_everything", "local"))[
    "resilience"
]
"""A value for each section of resilience that a recipe may leave out."""
STORE = {**SECTIONS["tiered"]["store"], "url": "s3://bucket/runs", "every_n_steps": 20}
_OF_ONE_NODE = {"replicas": 0, "domains_min": 1}
TIERED = {
    **SECTIONS["tiered"],
    "ram": {**SECTIONS["tiered"]["ram"], **_OF_ONE_NODE},
    "store": None,
}
OTHER: dict[str, Any] = {
    "time_limit": "1-00:00:00",
    "env": {"OTHER": "1"},
    "env.FI_PROVIDER": "tcp",
    "model.weights": "/nowhere",
    "model.rope_scaling": None,
    "model.head_dim": 64,
    "model.num_heads": 8,
    "trainer.num_devices": {8: 4, 2: 1},
    "model.vocab_size": 512,
    "trainer.precision": {"bf16": "fp32", "fp32": "bf16"},
    "trainer.sharding": {"none": "full", "hybrid": "full"},
    "trainer.num_replicas": {2: 4, 1: 2, None: 2},
    "trainer.order_of_sums": {"size": "fixed"},
    "trainer.kind": None,
    "trainer.non_finite": {"fail": "skip"},
    "trainer.sequence_parallel": False,
    "trainer.optimizer.decay_steps": 5000,
    "trainer.optimizer.warmup_steps": 1,
    "trainer.virtual_pipeline": 2,
    "trainer.context_parallel": 2,
    "trainer.tensor_parallel": 4,
    "trainer.pipeline_parallel": 2,
    "trainer.expert_parallel": 2,
    "data.path": "/nowhere.jsonl",
    "data.text_key": "other",
    "data.tokenizer": "/nowhere",
    "instance.type": "ml.other",
    "instance.accelerator": {"gpu": "cpu", "cpu": "gpu"},
    "instance.num_devices": 1,
    "instance.num_efa": {32: 0, 0: 4},
    "instance.num_vcpus": 1,
    "instance.memory_gib": 1,
    "resources.num_cpus": 4,
    "resources.memory_gib": 512,
    "resources.hugepages_2mi_mib": 1024,
    "resources.shm_gib": 70,
    "resilience.checkpointless.standby_nodes": 1,
    "resilience.checkpointless.self_check_every_n_steps": 1,
    "resilience.checkpointless": SECTIONS["checkpointless"],
    "resilience.faults": {"injected": [], "random": None},
    "resilience.faults.injected": [],
    "resilience.faults.random": {
        "seed": 1,
        "mean_steps_between": 50,
        "kinds": ["exception"],
        "places": ["forward"],
    },
    "resilience.mmap": SECTIONS["mmap"],
    "resilience.mmap.budget_mib": 32,
    "resilience.mmap.encryption": {
        **dict.fromkeys(["kms_key_id", "endpoint", "region"]),
        "kind": "file",
        "key_file": "/etc/key",
    },
    "resilience.mmap.checkpoint_frequency": 5,
    "resilience.mmap.folder": "/dev/shm/other",
    "resilience.tiered": TIERED,
    "resilience.tiered.backend": "aws",
    "resilience.tiered.store": STORE,
    "resilience.tiered.store.url": "s3://other/place",
    "resilience.tiered.store.attempts": 3,
    "resilience.tiered.store.keep": {None: 2, 2: 3},
    "resilience.tiered.store.part_size_mib": 32,
    "resilience.tiered.store.endpoint": "http://127.0.0.1:8333",
    "resilience.tiered.store.every_s": 60.0,
    "resilience.tiered.store.every_n_steps": {None: 20, 100: 200, 500: 1000},
    "resilience.tiered.ram.every_s": 60.0,
    "resilience.tiered.ram.every_n_steps": 5,
    "resilience.tiered.ram.budget_mib": 900_000,
    "resilience.tiered.ram.peers_hold": "instead",
    "resilience.tiered.ram.replicas": {1: 0, 0: 1},
    "resilience.tiered.ram.domains_min": {2: 1, 1: 2},
    "resilience.tiered.copy_while": "waiting",
    "resilience.tiered.token_file": "/etc/other",
    "resilience.tiered.peer_port": 12345,
    "resilience.tiered.http_port": 12346,
    "resilience.elastic.nodes_step": 1,
    "resilience.elastic.nodes_allowed": [1, 3],
    "resilience.elastic.faulty_scale_down_timeout_s": 7,
    "resilience.elastic": {**SECTIONS["elastic"], "may_lose_steps": True},
    "cluster.image_pull_policy": "Always",
    "cluster.job_kind": {"hyperpod": "job", "job": "hyperpod"},
    "cluster.run_policy.clean_pod_policy": "OnlyComplete",
    "cluster.run_policy.restart_policy": {
        "eval_period_s": 60,
        "full_job_restarts_max": 1,
        "restarts_before_full_job": 1,
        "repeat_offenders_to_avoid_max": None,
        "scale_up_snooze_s": None,
    },
    "cluster.run_policy.log_monitoring": [{"name": "hang", "pattern": "step"}],
    "cluster.affinity.required": {"zone": ["a"]},
    "cluster.affinity.preferred": [{"weight": 1, "labels": {"zone": ["a"]}}],
    "cluster.affinity.same_topology": "topology.k8s.aws/network-node-layer-1",
    "cluster.labels": {"team": "a"},
    "cluster.annotations": {"team": "a"},
    "cluster.node_selector": {"team": "a"},
    "cluster.tolerations": [{"key": "nvidia.com/gpu"}],
    "cluster.operator_from": ["10.1.0.0/16"],
    "cluster.network_policy_from": [{"cidr": "10.0.0.0/8"}],
    "cluster.volume_claims": [{"claim_name": "fsx", "mount_path": "/data"}],
    "cluster.host_paths": [{"path": "/opt", "mount_path": "/opt/x"}],
    "cluster.image_pull_secrets": ["other"],
    "cluster.secrets_from": ["other"],
    "cluster.secrets": {"k8s": {"A": {"name": "b", "key": "c"}}, "": {"A": {}}},
    "cluster.security.capabilities": ["SYS_PTRACE"],
    "cluster.probes.startup": {"command": ["true"]},
    "cluster.probes.liveness": {"command": ["true"]},
    "cluster.probes.readiness": {"command": ["true"]},
    "cluster.container": {"image": "a.sqsh", "mounts": [], "mount_home": False},
    "cluster.modules": ["cuda"],
    "cluster.extra_options": {"switches": "1"},
    "cluster.python": "python9",
    "cluster.run_path": "/other",
    "cluster.pre_script": "true",
    "cluster.rdzv_port": 12345,
    "cluster.requeue_at_limit": {"store": False, "": True},
    "cluster.security.run_as_user": 0,
    "cluster.security.run_as_group": 7,
    "cluster.security.fs_group": 7,
    "cluster.security.run_as_non_root": False,
    "cluster.security.seccomp_profile": "Unconfined",
    "cluster.security.dropped_capabilities": ["KILL"],
    "cluster.security.memory_limit_gib": 4096,
    "cluster.run_policy.retries_max": 7,
    "cluster.run_policy.fault_deadline_s": 7,
    "cluster.run_policy.startup_deadline_s": 7,
    "cluster.run_policy.ttl_s": 7,
    "resilience.elastic.graceful_shutdown_timeout_s": 7,
}
# These say which member of a union a section is; another one has other keys.
TIMES = {"duration_s", "data_wait_s", "blocked_s"}
"""Of a step event: other in each run."""
TAGS = {"model.architecture", "trainer.kind", "data.kind", "cluster.kind", "recipe.schema",
        # A rule reads it, of runs that no tier keeps.
        "resilience.elastic.may_lose_steps"}  # fmt: skip
# These bound what the others may be: where nothing changes with them, the job is turned down.
BOUNDS = {
    "cluster.growth_priority_class", "cluster.python",
    "cluster.rdzv_port",
    "cluster.requeue_at_limit",
    "cluster.security.capabilities", "cluster.security.memory_limit_gib",
    "cluster.security.privileged",
    "instance.accelerator", "instance.memory_gib", "instance.num_devices", "instance.num_efa",
    "instance.num_vcpus",
    "model.tie_embeddings",
    "resilience.checkpointless",
    "resilience.checkpointless.standby_nodes",
    "resilience.elastic",
    "resilience.faults",
    "resilience.tiered.backend",
    "resilience.tiered.ram.domains_min",
    "resilience.tiered.ram.every_s",
    "resilience.tiered.ram.peers_hold",
    "resilience.tiered.store.every_n_steps",
    "resilience.tiered.store.every_s",
    "trainer.expert_parallel",
    "trainer.max_restarts",
    "trainer.num_devices",
    "trainer.num_replicas",
    "trainer.order_of_sums",
    "trainer.sharding",
}  # fmt: skip
# Read by the loop that Megatron's trainer will share with the torch trainer, where they are tested.
SHARED_LOOP = {"trainer.log_every_n_steps", "trainer.save_checkpoint", "trainer.non_finite",
               "data.path", "data.text_key", "data.tokenizer"}  # fmt: skip
# Read at run time by workers that have a daemon beside them, and tested there.
OF_S3 = {
    f"resilience.tiered.store.{name}"
    for name in ("endpoint", "region", "path_style", "part_size_mib", "attempts")
}
"""Refused beside a folder; the recipes of real sizes have them beside a bucket."""
TIERED_LOOP = {"resilience.tiered.copy_while", "resilience.tiered.namespace",
               "resilience.tiered.ram.every_n_steps"}  # fmt: skip
# Read at run time by workers that an agent started: tests/scenarios/recovery and
# tests/resilience/faults test them, and that faults and checks change no bit.
AGENT_LOOP = {"resilience.faults", "resilience.faults.injected", "resilience.faults.random",
              "resilience.checkpointless.self_check_every_n_steps"}  # fmt: skip
# Read at run time by workers and by who makes their batches, tested in tests/resilience/data, and
# that they change no bit in tests/scenarios/mmap.
MMAP_LOOP = {"resilience.mmap", *(f"resilience.mmap.{name}" for name in SECTIONS["mmap"])}
LOOPS = SHARED_LOOP | AGENT_LOOP | TIERED_LOOP | MMAP_LOOP
# Without an effect on the bits of one CPU worker: the first saves memory, the second needs a GPU,
# the third a step that is not finite, the fourth several micro batches.
TESTED_ALONE = {
    "trainer.activation_checkpointing",
    "trainer.precision",
    "trainer.non_finite",
    "trainer.order_of_sums",
}
SMALL = ("trainer.num_nodes=1", "trainer.num_devices=1", "trainer.max_steps=5",
         "trainer.optimizer.warmup_steps=2", "model.num_layers=2", "model.hidden_size=32",
         "trainer.global_batch_size=4", "trainer.micro_batch_size=2", "data.seq_length=48",
         "data.max_bytes=300000")  # fmt: skip


def leaves(node: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(node, dict) and node:
        for key, value in node.items():
            yield from leaves(value, f"{path}.{key}" if path else key)
    else:
        yield path, node


def changed(job: Job, path: str, value: Any) -> dict[str, Any]:
    plain = content(job)
    *sections, last = path.split(".")
    node = plain
    for section in sections:
        node = node[section]
    node[last] = value
    if path == "resilience.elastic":
        # The one size that every job is sure to have room for.
        nodes = plain["trainer"]["num_nodes"]
        node[last] = {**value, "nodes_min": nodes, "nodes_max": nodes}
    return plain


def other_value(path: str, value: Any, cluster_kind: str, tiers: str = "") -> Any:
    if path in OTHER:
        other = OTHER[path]
        if path == "cluster.requeue_at_limit":
            return other[tiers]
        if isinstance(other, dict) and path == "cluster.secrets":
            return other.get(cluster_kind, other[""])
        if isinstance(other, dict) and not isinstance(value, dict) and value in other:
            return other[value]
        return other
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value * 2 if value else 1
    if isinstance(value, float):
        return value / 2 if value else 1e-9
    return "other"


def valid(plain: dict[str, Any]) -> Job:
    return Job.model_validate_json(json.dumps(plain), strict=True)


def texts(plain: dict[str, Any]) -> dict[str, Any]:
    """Return what is rendered, without the copies of the recipe in it."""
    job = valid(plain)
    files: dict[str, Any] = {
        name: text.replace(job.digest(), "") for name, text in rendered(job).items()
    }
    del files["job.json"]
    if "manifest.yaml" in files:
        documents = list(yaml.load_all(files["manifest.yaml"], Loader=yaml.CSafeLoader))
        for document in documents:
            document.get("data", {}).pop("job.json", None)
        files["manifest.yaml"] = documents
    return files


def plans(plain: dict[str, Any]) -> Any:
    job = valid(plain)
    if isinstance(job.trainer, MegatronTrainer):
        split = plan_split(job, job.trainer.data_parallel_size)
        return plan_megatron(job, job.trainer), plan_schedule(job), split, job.model.weights
    assert isinstance(job.trainer, TorchTrainer)
    return plan_mesh(job.trainer, job.trainer.world_size)


class Trained:
    """What real runs of one worker came to, by the job that they were given."""

    def __init__(self, workers: Workers, folder: Path) -> None:
        self._workers, self._folder, self._number = workers, folder, 0

    def run(self, plain: dict[str, Any]) -> Any:
        self._number += 1
        job = valid(plain)
        folder = self._folder / str(self._number)
        outcome = self._workers.run(job, folder, is_success_expected=False)
        if any(outcome.statuses):
            return outcome.statuses, outcome.log()[-300:]
        steps = [{k: v for k, v in step.items() if k not in TIMES} for step in outcome.steps]
        sizes = [event.fields for event in outcome.named("model_ready")]
        config = folder / "checkpoint" / "config.json"
        return steps, sizes, outcome.weights(), config.read_text() if config.exists() else None


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return Trained(Workers(), tmp_path_factory.mktemp("trained"))


def outcome(plain: dict[str, Any]) -> tuple[Any, Any]:
    return texts(plain), plans(plain)


def has_effect(job: Job, path: str, value: Any, before: tuple[Any, Any]) -> bool:
    """Say whether another value of the key changes a rendered text or a plan."""
    try:
        return outcome(changed(job, path, value)) != before
    except ValueError:
        return path in BOUNDS


@cache
def silent_keys(recipe: str, *clusters: str) -> dict[str, Any]:
    """Return the keys that change no text and no plan, with the value that was tried.

    Without names of clusters every kind of them is tried.
    """
    silent: dict[str, Any] = {}
    heard: set[str] = set()
    # The tiers of all recipes are asked about in those that have others: they hide what else a
    # model's size changes.
    make = untiered_job if "tiny_pretrain" in recipe else shipped_job
    for cluster in clusters or CLUSTERS:
        job = make(recipe, cluster, ["resources.num_cpus=8", "resources.shm_gib=64"])
        before = outcome(content(job))
        for path, value in leaves(content(job)):
            if path in TAGS or path in heard:
                continue
            settings = job.resilience.tiered
            tiers = "store" if settings and settings.store else ""
            other = other_value(path, value, job.cluster.kind, tiers)
            if has_effect(job, path, other, before):
                heard.add(path)
                silent.pop(path, None)
            else:
                silent[path] = other
    return silent


def _one_fast(pattern: str, fast: str) -> list[Any]:
    """Return the recipes that match; all but one, which has the keys of all, take their time."""
    return [each if fast in each else slow(each) for each in TRAINED if re.search(pattern, each)]


@pytest.mark.parametrize("recipe", _one_fast("70b", "70b_pretrain_checkpointless"))
def test_every_key_of_a_megatron_recipe_changes_a_text_or_what_megatron_is_told(
    recipe: str,
) -> None:
    assert set(silent_keys(recipe)) - LOOPS == set()


RECOVERS = "tiny_(checkpointless|tiered|elastic|everything)"


@pytest.mark.parametrize("recipe", _one_fast(RECOVERS, "tiny_everything"))
def test_every_key_of_a_recipe_with_recovery_changes_a_text_or_is_its_beginnings(
    recipe: str,
) -> None:
    """What changes no text here changes none in the recipe it begins with, and training there."""
    begins_with = re.sub("checkpointless(_mmap)?|tiered|elastic|everything", "pretrain", recipe)

    # It bounds trainer.num_devices, and is seen where a recipe has as many.
    silent = set(silent_keys(recipe)) - LOOPS - OF_S3 - {"instance.num_devices"}

    assert silent <= set(silent_keys(begins_with))


@pytest.mark.parametrize(
    "recipe",
    [
        slow(name) if "8b" in name or "gpt_oss" in name else name
        for name in TRAINED
        if not re.search(f"70b|120b|{RECOVERS}|megatron", name)
    ],
)
def test_every_key_of_a_torch_recipe_changes_a_text_or_the_training(
    recipe: str, trained: Trained
) -> None:
    tiny = recipe.replace("8b", "tiny")
    small = content(untiered_job(tiny, "local", SMALL))
    before = trained.run(small)
    assert isinstance(before, tuple), before

    asked = set(silent_keys(recipe)) - TESTED_ALONE - MMAP_LOOP
    silent = [
        path
        for path, value in leaves(small)
        if path in asked
        and trained.run(changed(valid(small), path, other_value(path, value, "local"))) == before
    ]

    assert silent == []


@pytest.mark.parametrize("clusters", [["slurm"], ["hyperpod", "job"], ["hyperpod"], ["local"]])
def test_every_key_of_a_clusters_own_changes_a_text(clusters: list[str]) -> None:
    silent = silent_keys("llama/llama3_tiny_pretrain", *clusters)

    assert [path for path in silent if path.startswith("cluster.")] == []


def test_the_sources_of_data_read_every_key(trained: Trained, tmp_path: Path) -> None:
    lines = [json.dumps({"text": f"line {n} " * 40, "other": f"row {n} " * 40}) for n in range(99)]
    (tmp_path / "data.jsonl").write_text("\n".join(lines))
    small = content(
        untiered_job("llama/llama3_tiny_pretrain", "local", [
            *[key for key in SMALL if "max_bytes" not in key], "data=jsonl",
            f"data.path={tmp_path}/data.jsonl", "data.tokenizer=bytes",
        ])
    )  # fmt: skip
    before = trained.run(small)
    assert isinstance(before, tuple), before

    for path in ("data.path", "data.text_key", "data.tokenizer", "data.seq_length"):
        value = 24 if path == "data.seq_length" else OTHER[path]
        assert trained.run(changed(valid(small), path, value)) != before, path
