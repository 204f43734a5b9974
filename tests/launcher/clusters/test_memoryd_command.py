"""What each kind of cluster renders for the daemon, read by the daemon's own parser."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from pathlib import Path

import pytest

from resilience.agent.operator.commands import UpdateBody
from resilience.agent.operator.starts import start_words
from resilience.agent.options import parse_options as parse_agent_options
from resilience.agent.services.memoryd import memoryd_service
from resilience.tiered.memoryd.options import MemorydOptions, parse_options
from resilience.tiered.stores.s3 import S3Settings
from tests.launcher.k8s_job import documents
from tests.launcher.shipped import rendered, shipped_job
from tests.resilience.agent.operator.driver import start_body
from tests.tokens import TOKEN, write_token

TINY = "llama/llama3_tiny_pretrain"
STORE = "resilience.tiered.store.url=s3://bucket/a"
PEERS = {
    "local": {"node-1": "127.0.0.1:9202"},
    "slurm": {"n2": "n2:9201"},
    "job": {
        "llama3-tiny-pretrain-1": "llama3-tiny-pretrain-1.llama3-tiny-pretrain:9201",
    },
    "hyperpod": {"10.0.0.8": "10.0.0.8:9201"},
}


def arguments(cluster: str, overrides: Sequence[str], folder: Path) -> list[str]:
    """Return the daemon's arguments on the first node, as a shell expands them."""
    job = shipped_job(TINY, cluster, overrides)
    files = rendered(job)
    values = {
        "MEMORYD_DIR": "/dev/shm/memoryd-test", "MEMORYD_TOKEN_FILE": str(folder / "token"),
        "SLURMD_NODENAME": "n1", "peer_listen": "0.0.0.0:9201", "switch": "s1",
        "peers_file": str(folder / "peers"), "JOB_COMPLETION_INDEX": "0",
        "LAUNCHER_POD_IP": "10.0.0.7", "LAUNCHER_K8S_NODE": "k1",
        "peer_ports[0]": "9201", "rdzv_endpoint": "n1:1", "attempt": "0", "peer_ports[1]": "9202",
        "run_dir": str(folder), "token_file": str(folder / "token"),
    }  # fmt: skip
    write_token(folder / "token")
    (folder / "peers").write_text("n1=n1:9201\nn2=n2:9201\n")
    if cluster in ("job", "hyperpod"):
        files = documents(job)["ConfigMap"]["data"]
        (folder / "memoryd.peers").write_text(files.get("memoryd.peers", ""))
    (folder / "node.json").write_text(files["node.json"])
    scripts = {"local": "node-0.sh", "slurm": "job.sbatch", "hyperpod": "start.sh"}
    text = files[scripts.get(cluster, "memoryd.sh")]
    text = text.replace("/etc/training-token", str(folder)).replace("/etc/training", str(folder))
    text = text.replace("\\\n", " ")
    line = next(each for each in text.splitlines() if "node.json" in each)
    line = re.sub(
        r"\$\{?([\w\[\]]+)(?::-([^}]*))?\}?",
        lambda found: values.get(found[1], found[2] or ""),
        line,
    )
    words = shlex.split(line)
    if cluster == "job":
        return words[words.index("resilience.tiered.memoryd") + 1 :]
    words = words[words.index("resilience.agent") + 1 :]
    if cluster == "hyperpod":
        # As the operator's /start adds to them.
        body = UpdateBody.model_validate(start_body(0, ["10.0.0.7", "10.0.0.8"]))
        words = ["--operator-link=0,0,0", *start_words(words, parse_agent_options(words), body)]
    agent = parse_agent_options(words)
    config = agent.node_config.memoryd
    return list(memoryd_service(
        config, path=agent.config, node=agent.node_name, run_dir=folder, log=folder,
        more=agent.memoryd, variables=values,
    ).arguments)  # fmt: skip


def options(
    cluster: str, overrides: Sequence[str], folder: Path, group: str = "ram"
) -> MemorydOptions:
    return parse_options(arguments(cluster, [f"resilience/tiered={group}", *overrides], folder))


@pytest.mark.parametrize("cluster", PEERS)
def test_daemon_learns_of_its_node_and_the_others(cluster: str, tmp_path: Path) -> None:
    read = options(cluster, [], tmp_path)

    assert read.folder == Path("/dev/shm/memoryd-test")
    assert read.local.token == TOKEN
    assert read.http is None
    assert read.peers is not None
    assert {each.name: each.address for each in read.peers.peers} == PEERS[cluster]
    assert read.peers.replicas == 1
    own = read.local.own
    assert own.domain == ("k1" if cluster in ("job", "hyperpod") else own.name)
    assert read.peers.own.switch == ("s1" if cluster == "slurm" else "")
    assert (read.kept.settings.keep, read.kept.settings.domains_min) == (1, 2)


@pytest.mark.parametrize("cluster", PEERS)
def test_store_arrives_with_all_that_is_said_of_it(cluster: str, tmp_path: Path) -> None:
    url = 'resilience.tiered.store.url="s3://bucket/it\'s"'
    overrides = [url, *(f"resilience.tiered.store.{each}" for each in (
        "every_n_steps=20", "keep=4", "waiting_max=3", "deadline_s=7.5", "part_size_mib=32",
        "endpoint=http://127.0.0.1:8333", "region=eu-west-1", "path_style=true", "attempts=2",
    ))]  # fmt: skip

    read = options(cluster, overrides, tmp_path, "ram_s3")

    store, lower = read.kept.store, read.kept.settings.lower["s3"]
    assert isinstance(store, S3Settings)
    assert (store.bucket, store.prefix, store.region) == ("bucket", "it's", "eu-west-1")
    assert (store.deadline_s, store.attempts, store.part_size_mib) == (7.5, 2, 32)
    assert (store.endpoint, store.force_path_style) == ("http://127.0.0.1:8333", True)
    assert (lower.keep, lower.waiting_max, lower.cadence.every_n_steps) == (4, 3, 20)


def test_one_node_has_no_door_for_others(tmp_path: Path) -> None:
    alone = ["trainer.num_nodes=1", "resilience.tiered.ram.replicas=0",
             "resilience.tiered.ram.domains_min=1", "resilience.tiered.http_port=9200"]  # fmt: skip

    read = options("local", alone, tmp_path)

    assert read.peers is None
    assert read.http == ("127.0.0.1", 9200)
    # AWS's library sends none.
    assert read.http_open


def test_peers_that_hold_instead_are_told_so(tmp_path: Path) -> None:
    overrides = ["resilience/tiered=ram", "resilience.tiered.ram.peers_hold=instead",
                 "resilience.tiered.ram.domains_min=1"]  # fmt: skip

    told = options("slurm", overrides[1:], tmp_path).peers
    untold = options("slurm", [], tmp_path).peers

    assert told is not None
    assert told.holds_instead
    assert untold is not None
    assert not untold.holds_instead


@pytest.mark.parametrize("cluster", ["hyperpod", "job"])
def test_library_of_aws_gets_no_daemon(cluster: str) -> None:
    text = rendered(shipped_job(TINY, cluster, ["resilience/tiered=aws", STORE]))["manifest.yaml"]

    assert "MEMORYD_DIR" not in text
    assert "resilience.tiered.memoryd" not in text


def test_daemon_on_kubernetes_has_time_for_the_store_at_its_end(tmp_path: Path) -> None:
    assert options("job", [STORE], tmp_path, "ram_s3").kept.drain_s == 60
    assert options("slurm", [STORE], tmp_path, "ram_s3").kept.drain_s == 20


@pytest.mark.parametrize("cluster", PEERS)
def test_daemon_that_an_agent_starts_has_a_lease(cluster: str, tmp_path: Path) -> None:
    """And no other one, which a cluster or a person looks after."""
    is_ours = cluster != "job"

    read = options(cluster, ["resilience.tiered.lease_s=7.5"], tmp_path)

    assert read.lease_s == (7.5 if is_ours else None)
