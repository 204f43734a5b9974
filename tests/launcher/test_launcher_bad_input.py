"""What a person may get wrong: one message that says what to do, status 2, nothing written."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from launcher.composition.compose import resolve
from launcher.errors import RecipeError
from resilience.comm.messages import Open
from resilience.inprocess.handles import AGENT_PID
from resilience.inprocess.variables import RUN_ID, rank_variables
from resilience.state.layout import make_layout
from tests.launcher.command import launch, refuse
from tests.launcher.shipped import ASKED_FOR, CLUSTERS, shipped_job

LARGE = "llama/llama3_70b_pretrain_checkpointless"
TINY = "llama/llama3_tiny_pretrain"
FAULTY = "llama/llama3_tiny_checkpointless"


# The rows that AWS's launcher accepts, each with what ours says.
ACCEPTED_ELSEWHERE = [
    (["trainer.tensor_parallel=7"],
     ("world size 128 (trainer.num_nodes 16 x trainer.num_devices 8) does not divide by "
      "tensor_parallel 7 x pipeline_parallel 4 x context_parallel 1 = 28; set trainer.num_nodes "
      "to a multiple of 7")),
    (["trainer.global_batch_size=13"],
     ("trainer.global_batch_size 13 is no multiple of trainer.micro_batch_size 1 x data-parallel "
      "size 4 = 4")),
    (["trainer.num_devices=16"],
     "trainer.num_devices 16 is more than the 8 devices of instance 'ml.p5.48xlarge'"),
    (["cluster=k8s", "cluster.image=null"], "cluster.image null: allowed: text"),
    (["run.name=Bad_Name_UPPER"], "run.name 'Bad_Name_UPPER': allowed: an RFC 1123 label"),
]  # fmt: skip

MISTYPED = [
    (["trainer.max_stpes=5"], "no key 'trainer.max_stpes'; closest: 'max_steps'"),
    (["+trainer.max_stpes=5"], "no key 'trainer.max_stpes'; closest: 'max_steps'"),
    (["+cluter.x=1"], "no key 'cluter'; closest: 'cluster'"),
    (["action=submti"], "action 'submti': allowed: 'render', 'run' or 'submit'; closest: 'submit'"),
    (["cluster=slrum"], "no cluster 'slrum'; closest: 'slurm'"),
    (["env.NCCL_DEBUG=INFO"],
     "no entry 'env.NCCL_DEBUG' yet; to add it write +env.NCCL_DEBUG=VALUE"),
    (["trainer.num_nodes=0"], "trainer.num_nodes 0: allowed: at least 1"),
    (["trainer.optimizer.lr='3e-4'"], "trainer.optimizer.lr '3e-4': allowed: a number"),
    (["trainer.max_steps=1.5"], "trainer.max_steps 1.5: allowed: a whole number"),
    (["time_limit='5 days'"], "time_limit '5 days': allowed: D-HH:MM:SS or HH:MM:SS"),
    (["run=3"], "run 3: allowed: a mapping of keys to values"),
    (["run.dri=x"], "no key 'run.dri'; closest: 'dir'"),
    (["trainer=null"],
     "a group takes the name of one of its options; leave a feature out as resilience.mmap=null"),
    (["trainer..seed=3"], "'trainer..seed' is no key; a key is names with dots"),
    (["+env.A=a,b"],
     ("override '+env.A=(not shown)' names several values; for one text quote it: "
      "\"+env.A='VALUE'\"")),
    (["trainer.optimizer=[1]"],
     ("override 'trainer.optimizer=[1]': a list and a mapping do not merge; to replace what the "
      "recipe has write '~trainer.optimizer' '+trainer.optimizer=[1]'")),
    (["cluster=slurm", "cluster.node_selector.a.b=c"], "no key 'cluster.node_selector.a.b'; "),
    (["--cfg", "job", "--resolve", "--package"], "--package has no value"),
    (["~trainer"], "no value for 'trainer.kind'; choose one with trainer=NAME"),
    (["+env.A=${nosuch}"], "env.A: Interpolation key 'nosuch' not found"),
    (["trainer.max_steps=1,2"],
     ("override 'trainer.max_steps=1,2' names several values; for one text quote it: "
      "\"trainer.max_steps='1,2'\", for a list write 'trainer.max_steps=[1,2]', and for a job "
      "for each add --multirun")),
    (["+resilience/elastic=default"], "write resilience/elastic=default without a +"),
    (["env={A: 1}"], "env takes new entries with a +, as +env.NAME=VALUE"),
    (["cluster=slurm", "cluster.container.image=a"], "cluster.container is null; give it whole"),
    (["trainer.max_steps=["],
     ("override 'trainer.max_steps=[' cannot be read; quote a value that holds more than a word: "
      "\"trainer.max_steps='['\"")),
    (["cluster=k8s", "+cluster.annotations.karpenter.sh/do-not-disrupt=true"],
     "'+cluster.annotations={karpenter.sh/do-not-disrupt: \"true\"}'"),
    (["cluster=k8s", "+cluster.labels.example.com=a"],
     ("cluster.labels.example {'com': 'a'}: allowed: text; an entry whose name has . or / is "
      "written '+cluster.labels={example.com: \"a\"}'")),
    (["+env.A=" + "[" * 400 + "]" * 400], "too deep within each other"),
    (["trainer.max_steps"], "'trainer.max_steps' says no value; write trainer.max_steps=VALUE"),
    (["--trainer.max_steps=5"],
     "'--trainer.max_steps=5': a key has no dashes before it; write trainer.max_steps=5"),
    (["--cfgg"], "no option '--cfgg'; closest: '--cfg'"),
    (["--experimental-rerun", "x.pickle"], "no option '--experimental-rerun"),
    (["--cfg", "jbo"], "--cfg 'jbo': allowed: job, hydra, all"),
    ([f"recipe={TINY}"], f"recipe= is given twice, as '{TINY}' and '{LARGE}'"),
    (["hydra.searchpath=[file:///no/such/folder]"],
     "hydra.searchpath names '/no/such/folder', which is no folder"),
]  # fmt: skip

INCONSISTENT = [
    (["cluster=k8s", "resilience/elastic=default"],
     "resilience.elastic allows 15 nodes, and there world size 120"),
    (["cluster=k8s", "+env.NNODES=3"], "env.NNODES is a variable"),
    (["cluster=slurm", "+env.run_dir=/x"], "env.run_dir is a variable"),
    (["cluster=k8s", "cluster.termination_grace_s=99999999999"],
     "cluster.termination_grace_s 99999999999: allowed: at most 2147483647"),
    (["cluster=k8s", "cluster.image='a b'"], "cluster.image 'a b': allowed: a container image"),
    (["cluster=k8s", "cluster.volume_claims=[{claim_name: a, mount_path: /}]"],
     "cluster mounts '/'"),
    (["cluster=k8s", "cluster.volume_claims=[{claim_name: a, mount_path: /data/}]"],
     "allowed: an absolute path without"),
    (["+env.A=${now:%H}"], "env.A takes its value from ${now:...}"),
    (["+env.A=${oc.env:HOME}"], "env.A takes its value from ${oc.env:...}"),
    (["trainer.num_replicas=1"], "trainer.num_replicas 1 is too few for resilience.checkpointless"),
    (["trainer.num_replicas=3"], "data-parallel size 4 does not divide by trainer.num_replicas 3"),
    (["trainer.pipeline_parallel=16", "trainer.tensor_parallel=1",
      "model.num_layers=40"], "40 does not divide by trainer.pipeline_parallel 16"),
    (["trainer.expert_parallel=2"],
     "trainer.expert_parallel 2 does not fit model.architecture 'llama'"),
    (["data.seq_length=2050", "trainer.context_parallel=2", "trainer.num_nodes=32"],
     "data.seq_length 2050 does not divide by 2 x trainer.context_parallel 2 = 4"),
    (["data.seq_length=2044"],
     ("data.seq_length 2044 / trainer.context_parallel 1 does not divide by "
      "trainer.tensor_parallel 8")),
    (["data.tokenizer=bytes", "model.vocab_size=256"],
     "256 is too few for text as bytes; allowed: at least 257"),
    (["data.seq_length=16384"], "data.seq_length 16384 is more than model.context_length 8192"),
    (["instance=ml.p6e-gb200.36xlarge", "trainer.num_devices=4",
      "trainer.num_nodes=32", "resources.memory_gib=null", "+env.FI_PROVIDER=efa"],
     "env.FI_PROVIDER 'efa' needs EFA devices, and instance 'ml.p6e-gb200.36xlarge' has none"),
    (["resources.shm_gib=1", "resilience.checkpointless.transfer_buffer_mib=256"],
     "resources.shm_gib 1 is less than the 2 GiB that 8 workers with checkpointless, tiered need"),
    (["resources.memory_gib=70"],
     ("resources.memory_gib 70 is less than resources.shm_gib 64 and 1 GiB for each of 8 workers "
      "and 1 spares = 73")),
    (["trainer.max_restarts=2"],
     "trainer.max_restarts 2 and resilience.checkpointless.process_restarts_max 10 both say"),
    (["resilience/elastic=default", "resilience.elastic.nodes_min=16"],
     "trainer.kind 'megatron' does not fit resilience.elastic with resilience.checkpointless"),
    ([*CLUSTERS["hyperpod"], "resilience.checkpointless.standby_nodes=1"],
     "resilience.checkpointless.standby_nodes 1 needs cluster.job_kind 'job'"),
    ([f"run.name={'a' * 62}", "cluster=k8s"], "characters; allowed: 63"),
    (["cluster=k8s", "cluster.num_spares=1"],
     "cluster.num_spares needs cluster.job_kind 'hyperpod'"),
    (["cluster=k8s", "cluster.operator_from=[10.0.0.0/8]"],
     "cluster.operator_from needs cluster.job_kind 'hyperpod'"),
    (["cluster=slurm", "+cluster.extra_options={nodes: '3'}"],
     "cluster.extra_options.nodes is written by the template"),
    (["trainer.optimizer.decay_steps=2000"],
     "trainer.optimizer.warmup_steps 2000 is not less than trainer.optimizer.decay_steps 2000"),
]  # fmt: skip


@pytest.mark.parametrize(("overrides", "message"), ACCEPTED_ELSEWHERE + INCONSISTENT)
def test_a_job_that_could_not_run_is_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(RecipeError, match=re.escape(message)):
        resolve(LARGE, overrides)


@pytest.mark.parametrize(("overrides", "message"), [
    (["resources.memory_gib=4096"], "is more than the 2048 GiB of"),
    (["instance.type=ml.foo.2xlarge"], "instance.type 'ml.foo.2xlarge' is no known instance"),
    (["instance.num_efa=4"], "instance.num_efa 4 is not that of 'ml.p5.48xlarge', 32"),
    (["action=run", "trainer.virtual_pipeline=2"], "virtual_pipeline 2"),
    (["action=run", "cluster=slurm"], "action 'run' needs cluster=local, not cluster=slurm"),
    (["action=submit"], "action 'submit' needs cluster=slurm or cluster=k8s"),
])  # fmt: skip
def test_a_job_that_could_not_run_writes_nothing(
    tmp_path: Path, overrides: list[str], message: str
) -> None:
    assert message in refuse(tmp_path, f"recipe={LARGE}", *overrides)


# A generation of two nodes with a worker each: what its agent tells a worker of its rank.
OPENING = Open(
    generation=0, rank=1, local_rank=0, layout=make_layout(nodes=("a", "b"), num_local_ranks=1),
    head="a:1",
)  # fmt: skip
SET_BY_THE_AGENT = sorted({*rank_variables(OPENING), AGENT_PID, RUN_ID})


@pytest.mark.parametrize("name", SET_BY_THE_AGENT)
def test_a_variable_that_the_agent_sets_for_a_worker_is_refused(name: str) -> None:
    with pytest.raises(RecipeError, match=f"env.{name} is a variable"):
        shipped_job(TINY, "local", [f"+env.{name}=1"])


NOT_INJECTABLE = [
    ("kind: explode, rank: 1",
     "resilience.faults.injected[0].kind 'explode': allowed: 'exception'"),
    ("step: -1, rank: 1", "resilience.faults.injected[0].step -1: allowed: at least 0"),
    ("step: 200, rank: 1",
     ("resilience.faults.injected[0].step 200 is no step of the run; allowed: less than "
      "trainer.max_steps 200")),
    ("rank: 4",
     ("resilience.faults.injected[0].rank 4 is no rank of the run; allowed: less than its world "
      "size 4")),
    ("node: 2",
     ("resilience.faults.injected[0].node 2 is no node of the run; allowed: less than "
      "trainer.num_nodes 2")),
    ("step: 3",
     "resilience.faults.injected[0] has rank null and node null; allowed: exactly one of them"),
    ("rank: 1, node: 1",
     "resilience.faults.injected[0] has rank 1 and node 1; allowed: exactly one of them"),
    ("kind: corrupt, rank: 1",
     ("resilience.faults.injected[0].tensor null does not fit kind 'corrupt'; allowed: "
      "'parameter' or 'moment'")),
    ("tensor: moment, rank: 1",
     "resilience.faults.injected[0].tensor 'moment' does not fit kind 'exit'; allowed: null"),
    ("kind: slow, rank: 1",
     ("resilience.faults.injected[0].seconds null does not fit kind 'slow'; allowed: a number of "
      "seconds")),
    ("kind: slow, rank: 1, seconds: 0",
     "resilience.faults.injected[0].seconds 0: allowed: more than 0"),
    ("kind: corrupt, place: within_update, tensor: moment, rank: 1",
     "resilience.faults.injected[0].place 'within_update' does not fit kind 'corrupt'"),
    ("kind: corrupt, tensor: moment, rank: 1",
     ("resilience.checkpointless.self_check_every_n_steps null would not find the faults "
      "'corrupt' of resilience.faults before they spread; allowed with them: 1")),
    ("place: recovery, rank: 1",
     ("resilience.faults.injected[0].place 'recovery' needs another fault that begins a recovery "
      "at step 3 or later")),
]  # fmt: skip


@pytest.mark.parametrize(("fault", "message"), NOT_INJECTABLE)
def test_a_fault_that_could_not_strike_is_refused(fault: str, message: str) -> None:
    whole = {"kind": "exit", "place": "gate", "step": "3"}
    whole |= dict(item.split(": ") for item in fault.split(", "))
    text = ", ".join(f"{key}: {value}" for key, value in whole.items())

    with pytest.raises(RecipeError, match=re.escape(message)):
        shipped_job(FAULTY, "local", [f"resilience.faults.injected=[{{{text}}}]"])


@pytest.mark.parametrize(
    "other",
    [
        pytest.param("kind: exit, place: gate, step: 4", id="too-early"),
        pytest.param("kind: slow, seconds: 1, place: gate, step: 9", id="begins-none"),
    ],
)
def test_a_fault_in_a_recovery_that_no_other_begins_is_refused(other: str) -> None:
    text = f"{{kind: exit, place: recovery, step: 5, rank: 1}}, {{{other}, rank: 1}}"
    message = r"injected\[0\].place 'recovery' needs another fault that begins a recovery at step 5"

    with pytest.raises(RecipeError, match=message):
        shipped_job(FAULTY, "local", [f"resilience.faults.injected=[{text}]"])


RANDOM = "resilience.faults.random={seed: 1, mean_steps_between"


@pytest.mark.parametrize(("override", "message"), [
    (f"{RANDOM}: 0, kinds: [exit], places: [gate]}}",
     "resilience.faults.random.mean_steps_between 0: allowed: at least 1"),
    (f"{RANDOM}: 9, kinds: [], places: [gate]}}",
     "resilience.faults.random.kinds []: allowed: at least 1 entries"),
    (f"{RANDOM}: 9, kinds: [exit], places: [recovery]}}",
     "resilience.faults.random.kinds ['exit'] have no fault in"),
    (f"{RANDOM}: 9, kinds: [corrupt], places: [gate]}}",
     "self_check_every_n_steps null would not find"),
    ("resilience.checkpointless=null", "resilience.faults needs resilience.checkpointless"),
    ("resilience.checkpointless.hang_deadline_s=0",
     "resilience.checkpointless.hang_deadline_s 0: allowed: more than 0"),
    ("resilience.checkpointless.partition_patience_s=2", "partition_patience_s 2 is less than"),
    ("resilience.checkpointless.spares_per_node=-1",
     "resilience.checkpointless.spares_per_node -1: allowed: at least 0"),
    ("resilience.checkpointless.self_check_every_n_steps=0",
     "resilience.checkpointless.self_check_every_n_steps 0: allowed: at least 1"),
])  # fmt: skip
def test_a_recovery_that_could_not_work_is_refused(override: str, message: str) -> None:
    with pytest.raises(RecipeError, match=re.escape(message)):
        shipped_job(FAULTY, "local", [override])


@pytest.mark.parametrize(("overrides", "message"), MISTYPED)
def test_what_was_mistyped_is_named_with_what_is_near(
    tmp_path: Path, overrides: list[str], message: str
) -> None:
    assert message in refuse(tmp_path, *overrides, f"recipe={LARGE}")


def test_heads_that_hugging_face_cannot_divide_are_refused(tmp_path: Path) -> None:
    said = refuse(tmp_path, "recipe=llama/llama3_8b_pretrain", "model.num_heads=24")

    assert "model.hidden_size 4096 is no multiple of model.num_heads 24" in said


def test_a_value_that_aws_drops_reaches_the_manifest(tmp_path: Path) -> None:
    """AWS's launcher accepts these for a checkpointless recipe, and forgets them."""
    ended = launch(f"recipe={LARGE}", "cluster=k8s", "+env.NCCL_DEBUG=INFO", *ASKED_FOR[LARGE],
                   "cluster.host_network=true", "run.dir=out", folder=tmp_path)  # fmt: skip

    manifest = (tmp_path / "out" / "manifest.yaml").read_text()
    assert ended.status == 0
    assert "NCCL_DEBUG" in manifest
    assert "hostNetwork: true" in manifest
    assert "null" not in manifest.split("\nkind: Job\n")[1]


def test_without_a_recipe_the_person_is_told_how_to_name_one(tmp_path: Path) -> None:
    assert "no recipe; name one with recipe=NAME" in refuse(tmp_path, "cluster=k8s")


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        ("../../etc/passwd", "is outside the folders of recipes"),
        ("/etc/passwd", "is outside the folders of recipes"),
        ("../nosuch.yaml", "no recipe file '../nosuch.yaml'"),
        ("llama/../llama/llama3_tiny_pretrain", "is outside the folders of recipes"),
        ("", "recipe= names none; `list` shows them"),
    ],
)
def test_a_recipe_outside_the_search_path_is_refused(
    tmp_path: Path, recipe: str, message: str
) -> None:
    assert message in refuse(tmp_path, f"recipe={recipe}")


def test_a_missing_folder_for_the_run_ends_with_status_1(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    ended = launch(f"recipe={TINY}", "run.dir=file/out", folder=tmp_path)

    assert ended.status == 1
    assert ended.err == (
        f"cannot write to {tmp_path}/file/out: Not a directory; set run.dir to a folder that can "
        "be written\n"
    )
