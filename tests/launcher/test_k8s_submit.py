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
from tests.launcher.k8s_job import KINDS, k8s_job

NAMES = {
    "job": "jobs.batch/llama3-tiny-pretrain",
    "hyperpod": "hyperpodpytorchjobs.sagemaker.amazonaws.com/llama3-tiny-pretrain",
}
KUBECTL = """#!/bin/sh
printf '%s\\n' "$*" >> calls
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
    assert (stand_in / "calls").read_text().splitlines() == [
        f"{options} create --filename=manifest.yaml --dry-run=server",
        f"{options} create --filename=manifest.yaml",
    ]
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
