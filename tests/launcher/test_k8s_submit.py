"""Submission: what kubectl is asked, and whose words an error has."""

from __future__ import annotations

import json
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from launcher.clusters.k8s.submit import submit_k8s
from launcher.errors import OutsideError
from tests.launcher.k8s_job import KINDS, k8s_job, pod

TIERED = "llama/llama3_tiny_tiered"

NAMES = {
    "job": "jobs.batch/llama3-tiny-pretrain",
    "hyperpod": "hyperpodpytorchjobs.sagemaker.amazonaws.com/llama3-tiny-pretrain",
}
KUBECTL = """#!/bin/sh
printf '%s\\n' "$*" >> calls
case "$*" in
  *jsonpath*) printf 'batch/v1\\nJob\\nllama3-tiny-tiered\\n1234-5678'; exit 0 ;;
  *filename=-) cat > secret ;;
esac
if [ -s existing ]; then cat existing >&2; exit 1; fi
echo created
"""


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A kubectl that writes down its words, and fails with what is in the file `existing`."""
    program = tmp_path / "bin/kubectl"
    program.parent.mkdir()
    program.write_text(KUBECTL)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:/usr/bin:/bin")
    (tmp_path / "existing").touch()
    return tmp_path


@pytest.fixture
def unused_address() -> Iterator[str]:
    """An address that nobody listens on, and nobody else can take meanwhile."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{taken.getsockname()[1]}"


@pytest.mark.parametrize("kind", KINDS)
def test_manifest_is_created_when_the_server_would_take_all_of_it(
    stand_in: Path, kind: str
) -> None:
    submission = submit_k8s(stand_in, k8s_job(kind, {"cluster.namespace": "train"}))

    options = "--namespace=train --request-timeout=30s"
    assert (stand_in / "calls").read_text().splitlines()[:2] == [
        f"{options} create --filename=manifest.yaml --dry-run=server",
        f"{options} create --filename=manifest.yaml",
    ]
    assert (stand_in / "secret").exists() == (kind == "job"), "HyperPod's agents know no token"
    assert submission.command == ("kubectl", *options.split(), "create", "--filename=manifest.yaml")
    assert submission.job_id == NAMES[kind]
    assert submission.output == "created\n"


def test_what_exists_is_left_as_it_is_and_the_remedy_named(stand_in: Path) -> None:
    words = 'Error from server (AlreadyExists): configmaps "llama3-tiny-pretrain" already exists'
    (stand_in / "existing").write_text(words)

    with pytest.raises(OutsideError, match="already exists") as error:
        submit_k8s(stand_in, k8s_job("job"))

    assert "set run.name, or remove it first: kubectl --namespace=default delete" in str(
        error.value
    )
    assert len((stand_in / "calls").read_text().splitlines()) == 1, "nothing was created"


@pytest.mark.parametrize("recipe", [TIERED, "llama/llama3_tiny_pretrain"])
def test_token_that_no_file_holds_is_made_when_the_job_exists(stand_in: Path, recipe: str) -> None:
    """It belongs to the job and goes with it; arguments and rendered files hold nothing of it."""
    job = k8s_job("job", recipe=recipe)

    submit_k8s(stand_in, job)

    secret = json.loads((stand_in / "secret").read_text())
    token = secret["stringData"]["token"]
    calls = (stand_in / "calls").read_text()
    assert len(token) == 64
    assert secret["metadata"]["ownerReferences"] == [
        {"apiVersion": "batch/v1", "kind": "Job", "name": "llama3-tiny-tiered", "uid": "1234-5678"}
    ]
    assert calls.splitlines()[-2].endswith("create --filename=-")
    assert token not in calls
    (mounted,) = (each["projected"] for each in pod(job)["spec"]["volumes"] if "projected" in each)
    assert mounted["defaultMode"] == 0o400
    assert mounted["sources"] == [{"secret": {"name": secret["metadata"]["name"]}}]


@pytest.mark.parametrize("kind", KINDS)
def test_what_the_job_brings_along_goes_with_it(stand_in: Path, kind: str) -> None:
    """A job whose time to live is over would leave them, in the way of the next of its name."""
    submit_k8s(stand_in, k8s_job(kind))

    patch = next(
        line for line in (stand_in / "calls").read_text().splitlines() if " patch " in line
    )
    name = "llama3-tiny-pretrain"
    names = [f"configmap/{name}", *([f"service/{name}"] if kind == "job" else [])]
    assert f" patch {' '.join(names)} --type=merge --patch=" in patch
    owners = json.loads(patch.partition("--patch=")[2])["metadata"]["ownerReferences"]
    assert [owner["uid"] for owner in owners] == ["1234-5678"]


def test_job_that_runs_is_told_what_would_stay_of_it(stand_in: Path) -> None:
    program = stand_in / "bin/kubectl"
    program.write_text(
        KUBECTL.replace("*jsonpath*)", "*patch*) echo no >&2; exit 1 ;;\n  *jsonpath*)")
    )

    submission = submit_k8s(stand_in, k8s_job("job"))

    assert submission.uid == "1234-5678"
    assert "what belongs to jobs.batch/llama3-tiny-pretrain stays when it is deleted: kubectl" in (
        submission.warning
    )
    assert submission.warning.endswith("no")


def test_token_that_cannot_be_made_leaves_a_remedy(stand_in: Path) -> None:
    program = stand_in / "bin/kubectl"
    program.write_text(KUBECTL.replace("cat > secret", "echo forbidden >&2; exit 1"))

    with pytest.raises(OutsideError, match="its pods wait for a token") as error:
        submit_k8s(stand_in, k8s_job("job", recipe=TIERED))

    assert "forbidden" in str(error.value)
    assert "remove it: kubectl --namespace=default delete jobs.batch/llama3-tiny-tiered" in str(
        error.value
    )


@pytest.mark.parametrize("owners", ["", " 1234-5678"])
def test_token_of_the_user_or_of_this_job_is_kept(stand_in: Path, owners: str) -> None:
    secret = f"*secret/*) printf 'there{owners}'; exit 0 ;;"
    taken = "*filename=-) echo 'Error: secrets already exists' >&2; exit 1 ;;"
    program = stand_in / "bin/kubectl"
    program.write_text(KUBECTL.replace("*jsonpath*)", f"{secret}\n  {taken}\n  *jsonpath*)"))

    submit_k8s(stand_in, k8s_job("job", recipe=TIERED))

    assert "--ignore-not-found" in (stand_in / "calls").read_text().splitlines()[-2]


def test_token_of_an_earlier_job_is_waited_for_and_made_anew(
    stand_in: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else Kubernetes would take it away with that job, and the pods would wait for ever."""
    monkeypatch.setattr("launcher.clusters.k8s.submit._PAUSE_S", 0.0)
    secret = "*secret/*) touch gone; printf 'there 0000-old'; exit 0 ;;"
    taken = (
        "*filename=-) if [ ! -e gone ]; then echo already exists >&2; exit 1; fi; cat > secret ;;"
    )
    program = stand_in / "bin/kubectl"
    program.write_text(KUBECTL.replace("*jsonpath*)", f"{secret}\n  {taken}\n  *jsonpath*)"))

    submit_k8s(stand_in, k8s_job("job", recipe=TIERED))

    made = json.loads((stand_in / "secret").read_text())
    assert made["metadata"]["ownerReferences"][0]["uid"] == "1234-5678"

    (stand_in / "gone").unlink()
    program.write_text(program.read_text().replace("touch gone; ", ""))
    monkeypatch.setattr("launcher.clusters.k8s.submit._OLD_SECRET_S", 0.0)
    with pytest.raises(OutsideError, match="of an earlier job is still there after 0 s"):
        submit_k8s(stand_in, k8s_job("job", recipe=TIERED))


@pytest.mark.parametrize(("user", "group"), [(None, None), (0, None), (1000, 2000)])
def test_token_can_be_read_by_the_pods_user_alone(user: int | None, group: int | None) -> None:
    """Kubernetes adds the right of an fs_group to read."""
    security = {"cluster.security.run_as_user": user, "cluster.security.fs_group": group}

    volumes = pod(k8s_job("job", security, TIERED))["spec"]["volumes"]

    assert [each["projected"]["defaultMode"] for each in volumes if "projected" in each] == [0o400]


def test_a_user_that_could_not_read_the_token_is_refused() -> None:
    with pytest.raises(ValueError, match=r"run_as_user 1000 needs cluster\.security\.fs_group"):
        k8s_job("job", {"cluster.security.run_as_user": 1000}, TIERED)


def test_missing_kubectl_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))

    with pytest.raises(OutsideError, match="no program 'kubectl' on this machine's PATH"):
        submit_k8s(tmp_path, k8s_job("job"))


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="no kubectl on this machine")
def test_unreachable_cluster_is_told_in_the_words_of_kubectl(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unused_address: str
) -> None:
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "gone", "cluster": {"server": f"https://{unused_address}"}}],
        "contexts": [{"name": "gone", "context": {"cluster": "gone", "user": "me"}}],
        "users": [{"name": "me", "user": {"token": "none"}}],
        "current-context": "gone",
    }
    (tmp_path / "config").write_text(json.dumps(config))
    (tmp_path / "manifest.yaml").write_text("apiVersion: v1\nkind: Service\nmetadata: {name: a}\n")
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "config"))

    for name in ("HTTPS_PROXY", "https_proxy"):
        monkeypatch.delenv(name, raising=False)

    with pytest.raises(OutsideError, match=f"{unused_address}.*refused") as error:
        submit_k8s(tmp_path, k8s_job("job"))

    assert str(error.value).startswith("kubectl --namespace=default")
