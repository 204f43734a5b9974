"""Check a rendered manifest as the cluster would, before anything is written.

The text is parsed again, so that it does not matter which template it came
from. Reads nothing but the text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Hashable, Iterator, Sequence
from typing import Any, ClassVar

import yaml

from launcher.clusters.k8s.forms import problem
from launcher.clusters.k8s.schema import definitions_of_kinds, schema_problems
from launcher.errors import RecipeError
from launcher.job.cluster_rules import REPLICATED_JOB

_Document = dict[str, Any]

KUBERNETES_JOB = "batch/v1 Job"
HYPERPOD_JOB = "sagemaker.amazonaws.com/v1 HyperPodPyTorchJob"
TRAIN_JOB = "trainer.kubeflow.org/v1alpha1 TrainJob"
TRAINING_RUNTIME = "trainer.kubeflow.org/v1alpha1 TrainingRuntime"
_JOBS = (KUBERNETES_JOB, HYPERPOD_JOB, TRAIN_JOB)

SHORT_BOOLEANS = ("tag:yaml.org,2002:bool", re.compile("[yYnN]$"), ["y", "Y", "n", "N"])
"""Booleans to kubectl, and not to PyYAML: arguments of add_implicit_resolver."""
_METADATA = {"$ref": "ObjectMeta", "required": ["name"]}
_INSTANCE_LABEL = "node.kubernetes.io/instance-type"


def check_manifest(text: str) -> None:
    """Accept a manifest that a cluster will take.

    Raises RecipeError with a line for each field that is wrong: its path, its
    value, and what is allowed.
    """
    documents = read_documents(text)
    problems = [line for document in documents for line in _document_problems(document)]
    if not problems:
        problems = [*_joint_problems(documents)]
    if problems:
        raise RecipeError("\n".join(f"manifest: {line}" for line in dict.fromkeys(problems)))


def check_jobs(text: str) -> None:
    """Accept further Jobs beside those of a manifest. Raises RecipeError as `check_manifest`."""
    documents = read_documents(text)
    problems = [line for document in documents for line in _document_problems(document)]
    if problems:
        raise RecipeError("\n".join(f"further Jobs: {line}" for line in problems))


def read_job(text: str) -> _Document:
    """Return the Indexed Job of a manifest that was checked."""
    return indexed_job(read_documents(text))


def indexed_job(documents: Sequence[_Document]) -> _Document:
    """Return the Indexed Job among documents, or the one that JobSet makes of a TrainJob.

    Raises KeyError where there is none.
    """
    found = {_kind(document): document for document in documents}
    if plain := found.get(KUBERNETES_JOB):
        return plain
    metadata = found[TRAIN_JOB]["metadata"]
    parts = found[TRAINING_RUNTIME]["spec"]["template"]["spec"]["replicatedJobs"]
    spec = {each["name"]: each for each in parts}[REPLICATED_JOB]["template"]["spec"]
    own = {**metadata, "name": f"{metadata['name']}-{REPLICATED_JOB}-0"}
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": own, "spec": spec}


def read_documents(text: str) -> list[_Document]:
    """Return the documents of a manifest. Raises RecipeError where it is no YAML."""
    try:
        parsed = list(yaml.load_all(text, _Loader))
    except yaml.YAMLError as error:
        raise RecipeError(f"manifest: no YAML: {error}") from error
    documents = [document for document in parsed if document is not None]
    for document in documents:
        if not isinstance(document, dict):
            raise RecipeError(f"manifest: {problem('a document', document, 'allowed: a mapping')}")
    return documents


class _Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """A safe loader that refuses a key given twice, where others keep the last.

    As to kubectl, an unquoted y or n is true or false.
    """

    bool_values: ClassVar = {**yaml.SafeLoader.bool_values, "y": True, "n": False}


def _construct_mapping(loader: Any, node: yaml.MappingNode) -> dict[Hashable, Any]:
    loader.flatten_mapping(node)
    found: dict[Hashable, Any] = {}
    for key_node, value_node in node.value:
        key = loader.construct_object(key_node, deep=True)
        if not isinstance(key, str):
            raise yaml.constructor.ConstructorError(
                None, None, f"key {key!r} is no text", key_node.start_mark
            )
        if key in found:
            raise yaml.constructor.ConstructorError(
                None, None, f"key {key!r} stands there twice", key_node.start_mark
            )
        found[key] = loader.construct_object(value_node, deep=True)
    return found


_Loader.add_implicit_resolver(*SHORT_BOOLEANS)
_Loader.add_constructor("tag:yaml.org,2002:map", _construct_mapping)


def _kind(document: _Document) -> str:
    return f"{document.get('apiVersion')} {document.get('kind')}"


def _document_problems(document: _Document) -> Iterator[str]:
    where = str(document.get("kind"))
    for field in ("apiVersion", "kind"):
        if not isinstance(document.get(field), str):
            yield problem(f"{where}.{field}", document.get(field), "allowed: text")
            return
    kinds = definitions_of_kinds()
    versions = [name.split()[0] for name in kinds if name.endswith(f" {where}")]
    if _kind(document) in kinds:
        yield from schema_problems(document, where, {"$ref": kinds[_kind(document)]})
    elif versions:
        allowed = f"allowed: {', '.join(versions)}"
        yield problem(f"{where}.apiVersion", document["apiVersion"], allowed)
    else:  # a team's template may bring further kinds
        yield from schema_problems(document.get("metadata"), f"{where}.metadata", _METADATA)


def _joint_problems(documents: Sequence[_Document]) -> Iterator[str]:
    jobs = [document for document in documents if _kind(document) in _JOBS]
    if len(jobs) != 1:
        names = [_name(document) for document in jobs]
        yield problem("the jobs", names, f"allowed: one {', '.join(_JOBS[:-1])} or {_JOBS[-1]}")
        return
    yield from _repeated(documents)
    yield from _namespaces(documents)
    if problems := [*_runtime(documents, jobs[0])]:
        yield from problems
        return
    template, where = _pod_template(documents, jobs[0])
    yield from _service(documents, template, where)
    yield from _config_maps(documents, template, where)
    yield from _instance(documents, template, where)


def _name(document: _Document) -> str:
    return f"{document['kind']} {document['metadata']['name']}"


def _repeated(documents: Sequence[_Document]) -> Iterator[str]:
    names = [_name(document) for document in documents]
    for name in sorted({name for name in names if names.count(name) > 1}):
        yield f"{name} stands there {names.count(name)} times; allowed: once"


def _namespaces(documents: Sequence[_Document]) -> Iterator[str]:
    names = {str(document["metadata"].get("namespace")) for document in documents}
    if len(names) > 1:
        yield problem("the namespaces", sorted(names), "allowed: the same for every document")


def _runtime(documents: Sequence[_Document], job: _Document) -> Iterator[str]:
    """Hold a TrainJob against the runtime that it names, whose pods are the run's."""
    if _kind(job) != TRAIN_JOB:
        return
    names = [each["metadata"]["name"] for each in documents if _kind(each) == TRAINING_RUNTIME]
    if names != [name := job["spec"]["runtimeRef"]["name"]]:
        allowed = f"allowed: the manifest's one {TRAINING_RUNTIME}: {', '.join(names) or 'none'}"
        yield problem("TrainJob.spec.runtimeRef.name", name, allowed)
        return
    try:
        indexed_job(documents)
    except KeyError:
        yield f"TrainingRuntime has no replicated job {REPLICATED_JOB!r}, whose pods are the run's"


def _pod_template(documents: Sequence[_Document], job: _Document) -> tuple[_Document, str]:
    if _kind(job) == HYPERPOD_JOB:
        path = "HyperPodPyTorchJob.spec.replicaSpecs[0].template"
        return job["spec"]["replicaSpecs"][0]["template"], path
    return indexed_job(documents)["spec"]["template"], "Job.spec.template"


def _service(documents: Sequence[_Document], template: _Document, where: str) -> Iterator[str]:
    """Hold the pods' subdomain against the Service that gives it an address."""
    subdomain = template["spec"].get("subdomain")
    services = [
        document["metadata"]["name"]
        for document in documents
        if document["kind"] == "Service" and document["spec"].get("clusterIP") == "None"
    ]
    # JobSet makes one of its own name.
    services += [each["metadata"]["name"] for each in documents if _kind(each) == TRAIN_JOB]
    if subdomain is not None and subdomain not in services:
        allowed = f"allowed: a headless Service of the manifest: {', '.join(services) or 'none'}"
        yield problem(f"{where}.spec.subdomain", subdomain, allowed)


def _config_maps(documents: Sequence[_Document], template: _Document, where: str) -> Iterator[str]:
    """Hold what our own ConfigMap, which has the job, is mounted as against its name."""
    maps = [each for each in documents if each["kind"] == "ConfigMap"]
    own = [each["metadata"]["name"] for each in maps if "job.json" in (each.get("data") or {})]
    mounted = [
        volume["configMap"]["name"]
        for volume in template["spec"].get("volumes") or ()
        if volume.get("configMap")
    ]
    for name in own:
        if name not in mounted:
            yield problem(f"{where}.spec.volumes configMap", mounted, f"allowed: with {name!r}")


def _instance(documents: Sequence[_Document], template: _Document, where: str) -> Iterator[str]:
    """Hold the pods' node and devices against the instance that the job names."""
    instance = _job_instance(documents)
    if instance is None:
        return
    selected = (template["spec"].get("nodeSelector") or {}).get(_INSTANCE_LABEL)
    if selected is not None and selected != instance["type"]:
        allowed = f"allowed: the job's instance.type, {instance['type']!r}"
        yield problem(f"{where}.spec.nodeSelector[{_INSTANCE_LABEL!r}]", selected, allowed)
    gpus = instance["num_devices"] if instance["accelerator"] == "gpu" else 0
    most = {"nvidia.com/gpu": gpus, "vpc.amazonaws.com/efa": instance["num_efa"]}
    for name, number in most.items():
        limits = [
            int((container.get("resources") or {}).get("limits", {}).get(name, 0))
            for container in template["spec"]["containers"]
        ]
        if sum(limits) > number:
            allowed = f"allowed: the {number} of instance {instance['type']!r}"
            yield problem(f"{where}.spec.containers limits[{name!r}]", sum(limits), allowed)


def _job_instance(documents: Sequence[_Document]) -> _Document | None:
    """Return the instance of the job that a ConfigMap holds, None where none does."""
    for document in documents:
        if document["kind"] == "ConfigMap" and "job.json" in (document.get("data") or {}):
            found: _Document = json.loads(document["data"]["job.json"])["instance"]
            return found
    return None
