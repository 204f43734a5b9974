"""What checkpoints in tiers cannot be, and how much memory they take."""

from __future__ import annotations

import itertools
import re

import pytest
import yaml
from pydantic import ValidationError

from launcher.composition.messages import validation_problems
from launcher.errors import RecipeError
from launcher.job import Job
from launcher.job.tiered_memory import budget_mib, num_writers, own_bytes, state_bytes
from launcher.support import check_runnable
from resilience.state.layout import make_layout
from resilience.tiered.paths import check_namespace
from tests.launcher.shipped import changed_job, rendered, shipped_job, untiered_job

TINY, LARGE = "llama/llama3_tiny_pretrain", "llama/llama3_70b_pretrain_tiered"
STORE = "resilience.tiered.store.url=s3://bucket/runs"
FOLDER = "resilience.tiered.store.url=folder:/mnt/runs"


def changed(cluster: str, group: str, *changes: str) -> Job:
    """Return a sound job with changes, those that begin with a dot below resilience.tiered."""
    store = {"ram": [], "folder": [FOLDER]}.get(group, [STORE])
    values = {}
    for change in changes:
        path, _, value = change.partition("=")
        values[f"resilience.tiered{path}" if path[0] == "." else path] = yaml.safe_load(value)
    return changed_job(shipped_job(TINY, cluster, [f"resilience/tiered={group}", *store]), values)


def refusal(cluster: str, group: str, *changes: str) -> str:
    """Return what a person is told."""
    with pytest.raises(ValidationError) as refused:
        changed(cluster, group, *changes)
    return "\n".join(validation_problems(refused.value, Job))


REFUSED = [
    ("ram", [".ram.every_n_steps=null"],
     ("resilience.tiered.ram.every_n_steps null and resilience.tiered.ram.every_s null; allowed: "
      "one of them, the other null")),
    ("ram", [".ram.every_s=3"],
     "ram.every_n_steps 10 and resilience.tiered.ram.every_s 3.0; allowed: one of them"),
    ("ram_s3", [".store.every_s=3"],
     "store.every_n_steps 500 and resilience.tiered.store.every_s 3.0; allowed: one"),
    ("s3", [".store.url=https://bucket"],
     "store.url 'https://bucket': allowed: s3://BUCKET/PREFIX, folder:/PATH or folder"),
    ("folder", [".store.url=folder:over/there"],
     "store.url 'folder:over/there': allowed: s3://BUCKET/PREFIX, folder:/PATH or fold"),
    ("folder", [".store.region=eu-west-1", ".store.path_style=true"],
     ("store.region 'eu-west-1' does not fit resilience.tiered.store.url 'folder:/mnt/runs'; "
      "allowed with a folder: null")),
    ("s3", [".store.endpoint='http://me:word@host'"], "store.endpoint"),
    ("ram_s3", [".store.every_n_steps=15"],
     ("store.every_n_steps 15 is no multiple of resilience.tiered.ram.every_n_steps 10, and the "
      "store gets only steps that memory has")),
    ("ram_s3", [".ram.every_n_steps=null", ".ram.every_s=5"],
     "store.every_n_steps 500 does not fit resilience.tiered.ram.every_s 5"),
    ("ram", [".ram.replicas=2"],
     "ram.replicas 2 is more than the 1 other nodes of trainer.num_nodes 2"),
    ("ram", [".ram.domains_min=3"],
     ("ram.domains_min 3 is more than the 2 nodes that have a shard with "
      "resilience.tiered.ram.replicas 1")),
    ("ram", [".ram.peers_hold=instead"],
     ("ram.domains_min 2 is more than the 1 nodes that have a shard with "
      "resilience.tiered.ram.replicas 1")),
    ("s3", [".ram.peers_hold=instead"],
     "ram.peers_hold 'instead' needs resilience.tiered.ram.replicas of at least 1"),
    ("ram", [".ram.budget_mib=10"],
     ("ram.budget_mib 10 is less than the 16 MiB that 1 steps and one being written take with 1 "
      "replicas")),
    ("ram", [".ram.budget_mib=4194304"],
     ("ram.budget_mib 4194304 for a node's part of the training state, 7 MiB, with 1024 MiB for "
      "memoryd and resources.shm_gib 0 are more than the 4096 GiB of instance 'cpu'")),
    ("ram", [".namespace=../other"], "namespace '../other': allowed: 1 to 200 letters"),
    ("ram", [".http_port=9200"],
     "http_port 9200 would be opened by each of the 2 nodes of this machine"),
    ("ram", [".peer_port=80"], "peer_port 80: allowed: at least 1024"),
]  # fmt: skip


@pytest.mark.parametrize(("group", "overrides", "message"), REFUSED)
def test_settings_that_do_not_fit_are_refused(
    group: str, overrides: list[str], message: str
) -> None:
    assert message in refusal("local", group, *overrides)


@pytest.mark.parametrize(
    "name", ["a", "A-1.b_c", "_", "-", "..", ".a", "a/b", "", "a" * 201, "a b"]
)
def test_namespace_is_what_the_daemons_take(name: str) -> None:
    def is_taken() -> bool:
        try:
            check_namespace(name)
        except ValueError:
            return False
        return True

    override = f".namespace='{name}'"
    if is_taken():
        assert changed("local", "ram", override)
    else:
        assert "namespace" in refusal("local", "ram", override)


def test_memory_that_a_slurm_job_asked_for_has_to_hold_the_budget() -> None:
    message = refusal("slurm", "ram", "resources.memory_gib=3", "resources.shm_gib=1",
                      ".ram.budget_mib=1100")  # fmt: skip

    assert "is more than resources.memory_gib 3 leaves beside resources.shm_gib 1: 2048" in message


@pytest.mark.parametrize("override", [
    ".ram.keep=1", ".ram.replicas=1", ".ram.budget_mib=100", ".token_file=/etc/token",
    ".http_port=9200", ".store.endpoint=http://s3.example", ".store.keep=2", ".store.deadline_s=5",
    ".store.path_style=true",
])  # fmt: skip
def test_what_the_library_of_aws_cannot_be_told_is_refused(override: str) -> None:
    name = re.escape(f"resilience.tiered{override.partition('=')[0]}")

    message = refusal("hyperpod", "aws", override)

    assert re.search(f"{name} .*is nothing that AWS's library can be told; allowed", message)


def test_library_of_aws_needs_its_cluster() -> None:
    assert "resilience.tiered.backend 'aws' needs cluster.kind 'k8s'" in refusal(
        "slurm", "s3", ".backend=aws"
    )
    assert changed("hyperpod", "aws")
    assert changed("job", "aws", ".store=null")


def test_state_of_a_known_model_has_the_bytes_that_its_trainer_keeps() -> None:
    """70,553,706,496 parameters: in bfloat16 with a copy and two moments in 32 bits."""
    assert state_bytes(shipped_job(LARGE, "slurm")) == 70_553_706_496 * 14


def test_nodes_part_of_the_state_is_each_different_shard_once() -> None:
    """2 replicas over 16 nodes of 8 ranks: a node has 8 of the 64 shards, another has them too."""
    job = shipped_job(LARGE, "slurm")

    assert own_bytes(job) == state_bytes(job) // 8
    assert num_writers(job.trainer) == 2
    everywhere = shipped_job(TINY, "local")
    assert own_bytes(everywhere) == state_bytes(everywhere)
    assert num_writers(everywhere.trainer) == 2


def test_copies_on_one_node_are_one_failure_domain() -> None:
    """Each of two pipeline stages has the ranks of one node, and both copies with them."""
    overrides = ["trainer.num_nodes=2", "trainer.tensor_parallel=4", "trainer.pipeline_parallel=2",
                 "trainer.global_batch_size=64", "resilience.tiered.ram.replicas=0"]  # fmt: skip

    with pytest.raises(RecipeError, match=r"domains_min 2 is more than the 1 nodes that have a sh"):
        shipped_job(LARGE, "slurm", [*overrides, "model=llama3_8b"])


@pytest.mark.parametrize("num_devices", [1, 2, 3, 4, 8])
def test_copies_are_counted_where_the_layout_has_them(num_devices: int) -> None:
    """Over all divisions of worlds of up to 8 nodes into copies and stages."""
    trainer = shipped_job(LARGE, "slurm").trainer
    for num_nodes, stages, replicas in itertools.product(range(1, 9), (1, 2, 3, 4), (1, 2, 3, 4)):
        if (world := num_nodes * num_devices) % (stages * replicas):
            continue
        layout = make_layout(
            nodes=[str(node) for node in range(num_nodes)], num_local_ranks=num_devices,
            num_shards=world // replicas, is_sharded=True, num_stages=stages,
        )  # fmt: skip
        nodes: dict[str, set[int]] = {}
        for seat in map(layout.seat, range(world)):
            nodes.setdefault(seat.shard, set()).add(seat.node_index)
        changes = {"num_nodes": num_nodes, "num_devices": num_devices,
                   "num_replicas": replicas, "pipeline_parallel": stages}  # fmt: skip

        assert num_writers(trainer.model_copy(update=changes)) == min(map(len, nodes.values()))


@pytest.mark.parametrize(("overrides", "num_held"), [
    pytest.param([], 3 * 2, id="kept-written-and-waiting-each-with-a-peers"),
    pytest.param([".ram.keep=2"], 4 * 2, id="two-steps"),
    pytest.param([".ram.replicas=0", ".ram.domains_min=1"], 3, id="no-copies"),
    pytest.param([".store=null"], 2 * 2, id="no-store-to-wait-for"),
    pytest.param([".ram.peers_hold=instead", ".ram.domains_min=1"], 1 + 3, id="peers-hold-it"),
])  # fmt: skip
def test_budget_follows_from_the_model(overrides: list[str], num_held: int) -> None:
    full = [f"resilience.tiered{each}" for each in overrides]
    job = shipped_job(LARGE, "local", full)
    settings = job.resilience.tiered
    assert settings is not None

    ideal = num_held * own_bytes(job) * 1.05 / 2**20

    assert ideal <= budget_mib(job, settings) <= ideal + 32


def test_folder_of_a_store_that_goes_with_the_pods_is_not_submitted() -> None:
    claim = "cluster.volume_claims=[{claim_name: fsx, mount_path: /fsx}]"
    tiered = ["resilience/tiered=folder", claim, "cluster.run_path=/fsx/runs"]
    lost = shipped_job(TINY, "job", [*tiered, FOLDER])

    with pytest.raises(RecipeError, match="checkpoints would be lost with the pods"):
        check_runnable(lost, "submit")

    kept = shipped_job(TINY, "job", [*tiered, "resilience.tiered.store.url=folder:/fsx/store"])
    check_runnable(kept, "submit")


@pytest.mark.parametrize("action", ["run", "submit"])
@pytest.mark.parametrize("group", ["ram_s3", "s3", "folder", "store"])
def test_job_whose_store_nobody_has_named_is_rendered_and_does_not_start(
    group: str, action: str
) -> None:
    cluster = "local" if action == "run" else "slurm"
    job = shipped_job(TINY, cluster, [f"resilience/tiered={group}"])

    assert rendered(job)
    with pytest.raises(RecipeError) as refused:
        check_runnable(job, action)
    assert str(refused.value).splitlines()[0] == (
        f"action {action!r}: resilience.tiered.store.url null, where the checkpoints of this job "
        "go; set resilience.tiered.store.url=s3://BUCKET/PREFIX or folder:/PATH that every node "
        "has, or cluster.checkpoint_store_url in the cluster's profile; resilience/tiered=ram "
        "needs none"
    )


@pytest.mark.parametrize("recipe", ["llama/llama3_8b_pretrain", LARGE])
@pytest.mark.parametrize(
    ("given", "url"),
    [
        pytest.param([], "s3://site/runs", id="the-profiles"),
        pytest.param(["resilience.tiered.store.url=folder:/fsx"], "folder:/fsx", id="its-own"),
    ],
)
def test_recipe_of_a_real_size_takes_its_store_from_the_profile(
    recipe: str, given: list[str], url: str
) -> None:
    profile = "cluster.checkpoint_store_url=s3://site/runs"

    settings = shipped_job(recipe, "slurm", [profile, *given]).resilience.tiered

    assert settings
    assert settings.store
    assert settings.store.url == url


def test_profile_that_names_no_store_is_told_what_one_is() -> None:
    with pytest.raises(RecipeError, match=r"^cluster\.checkpoint_store_url 'here': allowed: s3://"):
        shipped_job(TINY, "slurm", ["cluster.checkpoint_store_url=here"])


@pytest.mark.parametrize(("kind", "words", "others"), [
    ("job", ["cluster.rdzv_port=9201"], "peer_port and cluster.rdzv_port both mean port 9201"),
    ("job", ["resilience.tiered.peer_port=29500"],
     "peer_port and cluster.rdzv_port both mean port 29500"),
    ("job", ["resilience.tiered.http_port=9201"],
     "peer_port and resilience.tiered.http_port both mean port 9201"),
    ("hyperpod", ["resilience.tiered.peer_port=8080"],
     "peer_port and HyperPod's operator both mean port 8080"),
    ("hyperpod", ["resilience.tiered.http_port=8080"],
     "http_port and HyperPod's operator both mean port 8080"),
    ("slurm", ["resilience.tiered.peer_port=9300", "cluster.rdzv_port=9300"],
     "peer_port and cluster.rdzv_port both mean port 9300"),
])  # fmt: skip
def test_ports_that_one_node_would_open_twice_are_refused(
    kind: str, words: list[str], others: str
) -> None:
    with pytest.raises(RecipeError, match=f"^resilience.tiered.{others}; choose two ports"):
        shipped_job("llama/llama3_tiny_tiered", kind, words)


def test_port_of_a_daemon_is_free_for_the_agent_of_a_job_without_one() -> None:
    job = untiered_job("llama/llama3_tiny_pretrain", "job", ["cluster.rdzv_port=9201"])

    assert job.memoryd is None
