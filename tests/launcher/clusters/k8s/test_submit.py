"""Submission: what kubectl is asked, and whose words an error has."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from launcher.clusters.k8s.kubectl import Kubectl
from launcher.clusters.k8s.objects import taken_text, unix_s
from launcher.clusters.k8s.submit import SINCE, server_problem, submit_k8s
from launcher.clusters.submission import Submission
from launcher.errors import OutsideError
from launcher.job import Job
from tests.launcher.k8s_job import documents, k8s_job, manifest, pod

ROOT = Path(__file__).parents[4]
TIERED = "llama/llama3_tiny_tiered"
CHECKPOINTLESS = "llama/llama3_tiny_checkpointless"

NAMES = {
    "job": "jobs.batch/llama3-tiny-pretrain",
    "hyperpod": "hyperpodpytorchjobs.sagemaker.amazonaws.com/llama3-tiny-pretrain",
}
KUBECTL = """#!/bin/sh
printf '%s\\n' "$*" >> calls
case "$*" in
  *version*) cat version; exit 0 ;;
  *get*--selector=*) exit 0 ;;
  *get*) cat found; exit 0 ;;
  *dry-run*) if [ -s existing ]; then cat existing >&2; exit 1; fi ;;
  *filename=-*) cat > input; cat input >> created; echo >> created
    if grep -q '"kind": "Job"\\|HyperPod\\|"kind": "TrainJob"' input; then cat job; exit 0; fi
    if grep -q '"kind": "TrainingRuntime"' input; then cat runtime; exit 0; fi ;;
esac
echo '{}'
"""
OWN_UID, OTHER_UID, RUNTIME_UID = "1234-5678", "0000-old", "9999-run"


def made(kind: str, name: str, uid: str, *owners: str, **more: Any) -> dict[str, Any]:
    """Return an object as the cluster has it: a Job, or what belongs to one."""
    own = dict.fromkeys(["TrainJob", "TrainingRuntime"], "trainer.kubeflow.org/v1alpha1")
    version = {"Job": "batch/v1", **own}.get(kind, "v1")
    metadata = {
        "name": name, "namespace": "default", "uid": uid, **more.pop("metadata", {}),
        "creationTimestamp": "2026-11-24T10:00:00Z",
        "labels": {"app.kubernetes.io/managed-by": "training-recipes"} | more.pop("labels", {}),
        "ownerReferences": [{"kind": "Job", "name": name, "uid": owner} for owner in owners],
    }  # fmt: skip
    return {"apiVersion": version, "kind": kind, "metadata": metadata, **more}


def submit(folder: Path, job: Job) -> Submission:
    """Submit a job's manifest with the stand-in, which creates jobs of OWN_UID."""
    (folder / "manifest.yaml").write_text(manifest(job))
    kind = "TrainJob" if job.k8s.job_kind == "trainjob" else "Job"
    (folder / "job").write_text(json.dumps(made(kind, job.name, OWN_UID)))
    (folder / "runtime").write_text(json.dumps(made("TrainingRuntime", job.name, RUNTIME_UID)))
    return submit_k8s(folder, job)


def created(folder: Path) -> list[dict[str, Any]]:
    """Return what the stand-in was given to create."""
    return [json.loads(line) for line in (folder / "created").read_text().splitlines()]


@pytest.fixture
def stand_in(tmp_path: Path, kubectl: Callable[[str], None]) -> Path:
    """A kubectl that writes down its words, and refuses with what is in the file `existing`."""
    kubectl(KUBECTL)
    for name in ("existing", "version", "found", "created"):
        (tmp_path / name).touch()
    return tmp_path


def let_it_refuse(folder: Path, kind: str, words: str, condition: str = "true") -> str:
    """Have the stand-in create nothing of that kind while a condition holds; returns its text."""
    case = f"""grep -q '"kind": "{kind}"' input && {condition}"""
    refusal = f"if {case}; then echo {words} >&2; exit 1; fi"
    text = KUBECTL.replace("cat > input;", f"cat > input\n    {refusal}\n   ")
    (folder / "bin/kubectl").write_text(text)
    return text


@pytest.mark.parametrize("kind", ["hyperpod", "job"])
def test_job_is_created_first_when_the_server_would_take_all_of_the_manifest(
    stand_in: Path, kind: str
) -> None:
    """So the name is one submission's alone; what the job brings along goes with it."""
    job = k8s_job(kind, {"cluster.namespace": "train"})

    submission = submit(stand_in, job)

    options = "--namespace=train --request-timeout=30s"
    number = 5 if kind == "job" else 4
    assert (stand_in / "calls").read_text().splitlines() == [
        f"{options} version --output=json",
        f"{options} create --filename=manifest.yaml --dry-run=server",
        *[f"{options} create --filename=- --output=json"] * number,
    ]
    first, *others = created(stand_in)
    assert first["kind"] in ("Job", "HyperPodPyTorchJob")
    name = first["metadata"]["annotations"]["training-recipes/submitted-by"]
    assert name.endswith(f":{stand_in}")
    kinds = ["ConfigMap", "NetworkPolicy", *(["Service"] if kind == "job" else []), "Secret"]
    assert [each["kind"] for each in others] == kinds
    for each in others:
        assert [owner["uid"] for owner in each["metadata"]["ownerReferences"]] == [OWN_UID]
    assert submission.command == ("kubectl", *options.split(), "create", "--filename=manifest.yaml")
    assert (submission.job_id, submission.uid) == (NAMES[kind], OWN_UID)
    assert submission.output == f"{NAMES[kind]} created\n"


def test_trainjob_is_created_behind_its_runtime_which_goes_with_it(stand_in: Path) -> None:
    submission = submit(stand_in, k8s_job("trainjob"))

    options = "--namespace=default --request-timeout=30s"
    create = f"{options} create --filename=- --output=json"
    calls = (stand_in / "calls").read_text().splitlines()
    patch = calls.pop(4)
    assert calls == [
        f"{options} version --output=json",
        f"{options} create --filename=- --dry-run=server",
        *[create] * 5,
    ]
    api = "trainer.kubeflow.org"
    words, _, change = patch.partition(" --patch=")
    assert words == f"{options} patch trainingruntimes.{api}/{NAME} --type=merge"
    owner = {"name": NAME, "uid": OWN_UID, "apiVersion": f"{api}/v1alpha1", "kind": "TrainJob"}
    wanted = {"metadata": {"uid": RUNTIME_UID, "ownerReferences": [owner]}}
    assert json.loads(change) == wanted, "another's runtime that has the name by now stays"
    runtime, job, *others = created(stand_in)
    assert [each["kind"] for each in (runtime, job)] == ["TrainingRuntime", "TrainJob"]
    assert [each["kind"] for each in others] == ["ConfigMap", "NetworkPolicy", "Secret"]
    for each in others:
        assert [owner["uid"] for owner in each["metadata"]["ownerReferences"]] == [OWN_UID]
    assert (submission.job_id, submission.uid) == (f"trainjobs.{api}/{NAME}", OWN_UID)


REFUSED = "echo no >&2; exit 1"


@pytest.mark.parametrize(
    ("refused", "removed"),
    [
        pytest.param("*dry-run*", [], id="rest"),
        pytest.param('"kind": "TrainJob"', [RUNTIME_UID], id="trainjob"),
        pytest.param("*patch*", [OWN_UID, RUNTIME_UID], id="owner"),
        # The runtime is the TrainJob's by then.
        pytest.param('"kind": "ConfigMap"', [OWN_UID], id="config"),
    ],
)
def test_nothing_is_left_of_a_trainjob_that_cannot_be_created(
    stand_in: Path, refused: str, removed: list[str]
) -> None:
    text = KUBECTL.replace("*dry-run*)", f"{refused}) {REFUSED} ;;\n  *dry-run*)")
    if refused.startswith('"'):
        text = KUBECTL.replace(
            "cat > input;", f"cat > input; if grep -q '{refused}' input; then {REFUSED}; fi;"
        )
    text = text.replace(
        "*get*--", "*delete*) cat >> removed; echo >> removed; exit 0 ;;\n  *get*--"
    )
    (stand_in / "bin/kubectl").write_text(text)
    (stand_in / "removed").touch()

    with pytest.raises(OutsideError, match="no"):
        submit(stand_in, k8s_job("trainjob"))

    found = [json.loads(line) for line in (stand_in / "removed").read_text().splitlines()]
    assert [each["preconditions"]["uid"] for each in found] == removed
    # Trainer refuses to take a finalizer off a TrainJob without its runtime.
    of_job = [each for each in found if each["preconditions"]["uid"] == OWN_UID]
    assert all(each["propagationPolicy"] == "Background" for each in of_job)


NAME = "llama3-tiny-pretrain"
COMPLETE = {"conditions": [{"type": "Complete", "status": "True"}]}
BY_ME, BY_BOB = (
    {"annotations": {"training-recipes/submitted-by": by}} for by in ("me@h:/x", "bob@h:/y")
)
OF_HELM = {"app.kubernetes.io/managed-by": "Helm"}


@pytest.mark.parametrize(
    ("taken", "said", "removed"),
    [
        pytest.param([made("Job", NAME, "7", metadata=BY_BOB)],
                     "submitted-by bob@h:/y, managed-by training-recipes, created 1 h 00 min ago, "
                     "has not ended", [], id="of-another-and-alive"),
        pytest.param([made("Job", NAME, "7", status=COMPLETE, metadata=BY_BOB),
                      made("ConfigMap", NAME, "8", "7")], "ended (Complete)", ["7"], id="ended"),
        pytest.param([made("Job", NAME, "7", metadata=BY_ME)], "submitted-by me@h:/x", ["7"],
                     id="of-this-folder"),
        pytest.param([made("TrainingRuntime", NAME, "7", metadata=BY_ME)], "submitted-by me@h:/x",
                     ["7"], id="runtime-of-a-submission-that-was-killed"),
        pytest.param([made("Job", NAME, "7", status=COMPLETE, labels=OF_HELM)],
                     "managed-by Helm", [], id="of-another-program"),
        pytest.param([made("Job", NAME, "7", status=COMPLETE), made("Service", NAME, "8")],
                     f"Service {NAME}: managed-by training-recipes", [], id="strangers-service"),
        pytest.param([made("Job", NAME, "7", status=COMPLETE),
                      made("Job", f"{NAME}-g1", "9", "7")], f"{NAME}-g1: ", [],
                     id="further-nodes-go-on"),
        pytest.param([made("ConfigMap", NAME, "8", "6")], f"of Job {NAME}", [], id="left-alone"),
        pytest.param([made("Job", NAME, "7", metadata={"deletionTimestamp": "2026-11-24"})],
                     "being deleted", [], id="goes"),
        pytest.param([], "set run.name", [], id="gone-by-now"),
    ],
)  # fmt: skip
def test_what_has_the_name_is_told_and_only_a_job_that_is_over_is_offered_for_removal(
    taken: list[dict[str, Any]], said: str, removed: list[str]
) -> None:
    kubectl = Kubectl(k8s_job("job"), Path())

    text = taken_text(taken, "me@h:/x", kubectl.removal_text, unix_s("2026-11-24T11:00:00Z"))

    assert said in text
    assert "nothing was changed; set run.name to a name that is free" in text
    offers = [line for line in text.splitlines() if "kubectl" in line]
    assert [re.findall('"uid": "(.*)"', line) for line in offers] == [[uid] for uid in removed]
    assert "delete job" not in text, "by its name, which another may have by then"


def test_user_who_may_not_create_policies_hears_how_to_do_without(stand_in: Path) -> None:
    words = 'networkpolicies.networking.k8s.io is forbidden: User "me" cannot create resource'
    (stand_in / "existing").write_text(f"Error from server (Forbidden): {words}")

    with pytest.raises(OutsideError, match=r"cluster\.network_policy=false leaves"):
        submit(stand_in, k8s_job("job"))
    assert created(stand_in) == []


def test_what_exists_is_left_as_it_is(stand_in: Path) -> None:
    words = 'Error from server (AlreadyExists): configmaps "llama3-tiny-pretrain" already exists'
    (stand_in / "existing").write_text(words)
    (stand_in / "found").write_text(json.dumps(made("ConfigMap", NAME, "8")))

    with pytest.raises(OutsideError, match="already exists") as error:
        submit(stand_in, k8s_job("job"))

    assert f"ConfigMap {NAME}: managed-by training-recipes, created" in str(error.value)
    assert "set run.name to a name that is free" in str(error.value)
    assert created(stand_in) == []


@pytest.mark.parametrize("recipe", [TIERED, "llama/llama3_tiny_pretrain"])
def test_token_that_no_file_holds_is_made_when_the_job_exists(stand_in: Path, recipe: str) -> None:
    """It belongs to the job and goes with it; arguments and rendered files hold nothing of it."""
    job = k8s_job("job", recipe=recipe)

    submit(stand_in, job)

    secret = created(stand_in)[-1]
    token = secret["stringData"]["token"]
    assert len(token) == 64
    assert secret["metadata"]["ownerReferences"] == [
        {"apiVersion": "batch/v1", "kind": "Job", "name": job.name, "uid": OWN_UID}
    ]
    assert token not in (stand_in / "calls").read_text()
    (mounted,) = (each["projected"] for each in pod(job)["spec"]["volumes"] if "projected" in each)
    assert mounted["defaultMode"] == 0o440
    assert mounted["sources"] == [{"secret": {"name": secret["metadata"]["name"]}}]


@pytest.mark.parametrize("kind", ["ConfigMap", "Secret"])
@pytest.mark.parametrize("is_removed", [True, False])
def test_job_that_lacks_what_it_needs_is_removed_again(
    stand_in: Path, kind: str, is_removed: bool
) -> None:
    text = let_it_refuse(stand_in, kind, "forbidden")
    if not is_removed:
        text = text.replace("  *version*)", "  *delete*) echo away >&2; exit 1 ;;\n  *version*)")
        (stand_in / "bin/kubectl").write_text(text)

    with pytest.raises(OutsideError, match="forbidden") as error:
        submit(stand_in, k8s_job("job", recipe=TIERED))

    path = "/apis/batch/v1/namespaces/default/jobs/llama3-tiny-tiered"
    last = (stand_in / "calls").read_text().splitlines()[-1]
    assert last.endswith(f"delete --raw={path} --filename=-")
    if is_removed:
        assert json.loads((stand_in / "input").read_text())["preconditions"] == {"uid": OWN_UID}
        assert "the job had been created, and was removed again" in str(error.value)
    else:
        assert "could not be removed: kubectl" in str(error.value)
        assert str(error.value).endswith(f"delete --raw={path} --filename=-")


@pytest.mark.parametrize("owners", [[], [OWN_UID]])
def test_token_of_the_user_or_of_this_job_is_kept(stand_in: Path, owners: list[str]) -> None:
    let_it_refuse(stand_in, "Secret", "already exists")
    found = made("Secret", "a", "9", *owners)
    (stand_in / "found").write_text(json.dumps({**found, "data": {"token": "MTIz"}}))

    submit(stand_in, k8s_job("job", recipe=TIERED))

    last = (stand_in / "calls").read_text().splitlines()[-1]
    assert last.endswith("get secret/llama3-tiny-tiered-token --ignore-not-found --output=json")

    if not owners:
        (stand_in / "found").write_text(json.dumps({**found, "data": {"password": "MTIz"}}))
        with pytest.raises(OutsideError, match="token was there before, and has no key 'token'"):
            submit(stand_in, k8s_job("job", recipe=TIERED))


def test_token_of_an_earlier_job_is_waited_for_and_made_anew(
    stand_in: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else Kubernetes would take it away with that job, and the pods would wait for ever."""
    monkeypatch.setattr("launcher.clusters.k8s.submit._PAUSE_S", 0.0)
    (stand_in / "found").write_text(json.dumps(made("Secret", "a", "9", OTHER_UID)))
    text = let_it_refuse(stand_in, "Secret", "already exists", "[ ! -e gone ]")
    (stand_in / "bin/kubectl").write_text(text.replace("*get*) ", "*get*) touch gone; "))

    submit(stand_in, k8s_job("job", recipe=TIERED))

    assert created(stand_in)[-1]["metadata"]["ownerReferences"][0]["uid"] == OWN_UID

    (stand_in / "gone").unlink()
    (stand_in / "bin/kubectl").write_text(text)
    monkeypatch.setattr("launcher.clusters.k8s.submit._OLD_SECRET_S", 0.0)
    with pytest.raises(OutsideError, match="of an earlier job is still there after 0 s"):
        submit(stand_in, k8s_job("job", recipe=TIERED))


def version_of(minor: str, major: str = "1") -> dict[str, str]:
    return {"major": major, "minor": minor, "gitVersion": f"v{major}.{minor}.3"}


@pytest.mark.parametrize(
    ("job", "version", "needed"),
    [
        pytest.param(k8s_job("job"), version_of("20"), "1.26 or newer, for podFailurePolicy",
                     id="any-job"),
        pytest.param(k8s_job("job"), version_of("26+"), "", id="any-job-on-eks"),
        pytest.param(k8s_job("job", recipe=TIERED), version_of("28+"),
                     "1.29 or newer, for restartPolicy of an init container", id="daemon"),
        pytest.param(k8s_job("job", recipe=TIERED), version_of("29"), "", id="daemon-and-new"),
        pytest.param(k8s_job("job", recipe=CHECKPOINTLESS), version_of("28"), "1.29 or newer, for",
                     id="recovery"),
        pytest.param(k8s_job("job", recipe=TIERED), version_of("1", "2"), "", id="later"),
        pytest.param(k8s_job("job", recipe=TIERED), {}, "", id="unknown"),
        pytest.param(k8s_job("hyperpod"), version_of("20"), "", id="operators-own"),
    ],
)  # fmt: skip
def test_server_that_lacks_fields_of_a_job_is_named_with_the_version_that_has_them(
    job: Job, version: dict[str, str], needed: str
) -> None:
    """Some servers drop a field that they lack, without a word."""
    problem = server_problem(documents(job)["job"], version)

    assert needed in problem
    assert bool(problem) == bool(needed)
    assert not problem or f"the cluster has Kubernetes {version['gitVersion']}" in problem


def test_docs_name_the_servers_that_are_needed() -> None:
    text = (ROOT / "docs/clusters.md").read_text()

    assert sorted(set(SINCE.values())) == [26, 29]
    assert "A server that is older than the job needs is refused" in text
    assert "from 1.29, whose pods have the checkpoint daemon" in text
    words = "1.26 (`podFailurePolicy`), or 1.29 for a run that recovers (`backoffLimitPerIndex`)"
    assert words in text


def test_old_server_is_refused_before_anything_is_created(stand_in: Path) -> None:
    (stand_in / "version").write_text(json.dumps({"serverVersion": version_of("20")}))

    with pytest.raises(OutsideError, match=r"Kubernetes v1\.20\.3, and this job needs 1\.26"):
        submit(stand_in, k8s_job("job"))

    assert len((stand_in / "calls").read_text().splitlines()) == 1


def test_a_user_that_could_not_read_the_token_is_refused() -> None:
    with pytest.raises(ValueError, match=r"run_as_user 1000 needs cluster\.security\.fs_group"):
        k8s_job("job", {"cluster.security.fs_group": None}, TIERED)
