"""Submission: what kubectl is asked, and whose words an error has."""

from __future__ import annotations

import json
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from launcher.clusters.k8s import submit_k8s
from launcher.errors import OutsideError
from tests.launcher.k8s_job import KINDS, k8s_job

NAMES = {
    "job": "jobs.batch/llama3-tiny-pretrain",
    "hyperpod": "hyperpodpytorchjobs.sagemaker.amazonaws.com/llama3-tiny-pretrain",
}
KUBECTL = """#!/bin/sh
printf '%s\\n' "$*" >> calls
case "$*" in
*" get "*) cat existing ;;
*" apply "*) echo created ;;
esac
"""


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A kubectl that writes down its words and knows what is in the file `existing`."""
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
def test_manifest_is_applied_where_no_such_job_exists(stand_in: Path, kind: str) -> None:
    submission = submit_k8s(stand_in, k8s_job(kind, {"cluster.namespace": "train"}))

    options = "--namespace=train --request-timeout=30s"
    assert (stand_in / "calls").read_text().splitlines() == [
        f"{options} get {NAMES[kind]} --ignore-not-found --output=name",
        f"{options} apply --filename=manifest.yaml",
    ]
    assert submission.command == ("kubectl", *options.split(), "apply", "--filename=manifest.yaml")
    assert submission.job_id == NAMES[kind]
    assert submission.output == "created\n"


@pytest.mark.parametrize("kind", KINDS)
def test_job_that_exists_is_left_as_it_is(stand_in: Path, kind: str) -> None:
    (stand_in / "existing").write_text(f"{NAMES[kind]}\n")

    with pytest.raises(OutsideError, match="exists in namespace 'default' and was left as it is"):
        submit_k8s(stand_in, k8s_job(kind))

    assert "apply" not in (stand_in / "calls").read_text()


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
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "config"))

    for name in ("HTTPS_PROXY", "https_proxy"):
        monkeypatch.delenv(name, raising=False)

    with pytest.raises(OutsideError, match=f"{unused_address}.*refused") as error:
        submit_k8s(tmp_path, k8s_job("job"))

    assert str(error.value).startswith("kubectl --namespace=default")
