"""The schemas that ship with the launcher, made again of what publishes them.

python -m tests.launcher.clusters.k8s.published    write them: kubectl's cluster, and .venv-aws
"""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from launcher.clusters.k8s.schema import FOLDER

ROOT = Path(__file__).parents[4]
JUDGE = Path(__file__).with_name("aws_judge.py")
AWS_PYTHON = ROOT / ".venv-aws/bin/python"
AWS_PACKAGE = "sagemaker-hyperpod 3.12.0"
KUBEFLOW_SOURCE = "Kubeflow Trainer 2.3.0, its CustomResourceDefinitions"
GROUPS = ("api/v1", "apis/batch/v1", "apis/networking.k8s.io/v1")
KINDS = ("ConfigMap", "Job", "NetworkPolicy", "Secret", "Service")
HYPERPOD_KIND = "HyperPodPyTorchJob"
ANY_OBJECT = {"type": "object"}
ANY_OBJECTS = {"type": "array", "items": ANY_OBJECT}
KUBEFLOW_KINDS = {"TrainJob": "trainjobs", "TrainingRuntime": "trainingruntimes"}
KEPT = ("type", "enum", "required", "x-kubernetes-list-map-keys")
OF_KIND = "x-kubernetes-group-version-kind"
# Kept as objects of any fields: volumes that drivers have taken over, and what no pod of ours has.
AS_OBJECTS = {
    "AWSElasticBlockStoreVolumeSource", "AzureDiskVolumeSource", "AzureFileVolumeSource",
    "CephFSVolumeSource", "CinderVolumeSource", "EphemeralContainer", "FCVolumeSource",
    "FlexVolumeSource", "FlockerVolumeSource", "GCEPersistentDiskVolumeSource",
    "GitRepoVolumeSource", "GlusterfsVolumeSource", "ISCSIVolumeSource",
    "PhotonPersistentDiskVolumeSource", "PortworxVolumeSource", "QuobyteVolumeSource",
    "RBDVolumeSource", "ScaleIOVolumeSource", "StorageOSVolumeSource",
    "VsphereVirtualDiskVolumeSource", "Lifecycle",
}  # fmt: skip


def of_kubernetes(get_raw: Callable[[str], str]) -> dict[str, Any]:
    """Return the trimmed schemas of an API server, of which `get_raw` reads a path."""
    everything: dict[str, Any] = {}
    for group in GROUPS:
        found = json.loads(get_raw(f"/openapi/v3/{group}"))["components"]["schemas"]
        everything |= {name.rpartition(".")[2]: each for name, each in found.items()}
    kinds = {}
    for kind in KINDS:
        (each,) = everything[kind][OF_KIND]
        kinds[f"{each['group']}/{each['version']} {kind}".lstrip("/")] = kind
        everything[kind]["properties"].pop("status", None)
    del everything["ObjectMeta"]["properties"]["managedFields"]
    version = json.loads(get_raw("/version"))["gitVersion"]
    source = f"Kubernetes {version}, /openapi/v3 of its API server"
    return {"source": source, "kinds": kinds, "definitions": _trimmed_all(everything, *KINDS)}


def of_aws(model: Mapping[str, Any]) -> dict[str, Any]:
    """Return the trimmed schema of AWS's model, whose pods are those of Kubernetes."""
    everything = dict(model["$defs"])
    template = {"$ref": "PodTemplateSpec"}
    everything["ReplicaSpec"]["properties"]["template"] = template
    everything["PodTemplateSpec"] = {}
    fields = model["properties"].items()
    own = {name: each for name, each in fields if name not in {"metadata", "status"}}
    everything["HyperPodSpec"] = {"type": "object", "properties": own}
    definitions = _trimmed_all(everything, "HyperPodSpec")
    del definitions["PodTemplateSpec"]
    own = {"apiVersion": {"type": "string"}, "kind": {"type": "string"}}
    own |= {"metadata": {"$ref": "ObjectMeta"}, "spec": {"$ref": "HyperPodSpec"}}
    definitions[HYPERPOD_KIND] = {"type": "object", "properties": own}
    return {
        "source": f"{AWS_PACKAGE}, its model HyperPodPytorchJob",
        "kinds": {f"sagemaker.amazonaws.com/v1 {HYPERPOD_KIND}": HYPERPOD_KIND},
        "definitions": dict(sorted(definitions.items())),
    }


def of_kubeflow(get_definition: Callable[[str], Mapping[str, Any]]) -> dict[str, Any]:
    """Return the trimmed schemas of Kubeflow's Trainer, whose pods are those of Kubernetes."""
    definitions, kinds = {}, {}
    for kind, plural in KUBEFLOW_KINDS.items():
        (version,) = get_definition(f"{plural}.trainer.kubeflow.org")["spec"]["versions"]
        kinds[f"trainer.kubeflow.org/{version['name']} {kind}"] = kind
        found = version["schema"]["openAPIV3Schema"]
        found["properties"].pop("status", None)
        found["properties"]["metadata"] = {"$ref": "ObjectMeta"}
        spec = found["properties"]["spec"]["properties"]
        # Kept as objects of any fields: no job of ours has these.
        if kind == "TrainJob":
            spec |= {"initializer": ANY_OBJECT, "trainer": ANY_OBJECT}
            spec["runtimePatches"] = ANY_OBJECTS
        else:
            jobset = spec["template"]["properties"]["spec"]["properties"]
            jobset["volumeClaimPolicies"] = ANY_OBJECTS
            template = jobset["replicatedJobs"]["items"]["properties"]["template"]["properties"]
            template |= {"metadata": {"$ref": "ObjectMeta"}, "spec": {"$ref": "JobSpec"}}
        definitions[kind] = _trimmed(found)
    return {"source": KUBEFLOW_SOURCE, "kinds": kinds, "definitions": definitions}


def _trimmed_all(everything: Mapping[str, Any], *roots: str) -> dict[str, Any]:
    """Return the trimmed definitions that the roots need."""
    found: dict[str, Any] = {}
    waiting = [*roots]
    while waiting:
        name = waiting.pop()
        if name not in found:
            found[name] = {"type": "object"} if name in AS_OBJECTS else _trimmed(everything[name])
            waiting += re.findall(r'"\$ref": "(\w+)"', json.dumps(found[name]))
    return dict(sorted(found.items()))


def _trimmed(schema: Mapping[str, Any]) -> dict[str, Any]:
    if choices := schema.get("allOf") or schema.get("anyOf"):
        (schema,) = (each for each in choices if each.get("type") != "null")
    if "$ref" in schema:
        return {"$ref": re.split(r"[./]", schema["$ref"])[-1]}
    if "oneOf" in schema:
        return {"type": [each["type"] for each in schema["oneOf"]]}
    found = {name: schema[name] for name in KEPT if schema.get(name)}
    # Two fields together name what may stand once: the server's to judge.
    if len(found.get("x-kubernetes-list-map-keys", ())) > 1:
        del found["x-kubernetes-list-map-keys"]
    for name in ("items", "additionalProperties"):
        if isinstance(schema.get(name), dict):
            found[name] = _trimmed(schema[name])
    if "properties" in schema:
        own = sorted(schema["properties"].items())
        found["properties"] = {name: _trimmed(each) for name, each in own}
    return found


def text_of(schemas: Mapping[str, Any]) -> str:
    """Return schemas as they are in their file: a line for each definition."""
    lines = [
        f"  {json.dumps(name)}: {json.dumps(each, separators=(',', ':'))}"
        for name, each in schemas["definitions"].items()
    ]
    head = "".join(
        f"{json.dumps(name)}: {json.dumps(schemas[name])},\n" for name in ("source", "kinds")
    )
    return f'{{{head}"definitions": {{\n' + ",\n".join(lines) + "\n}}\n"


def ask_aws(documents: list[dict[str, Any]]) -> dict[str, Any]:
    """Return what AWS's model says of documents (`verdicts`), and its schema (`schema`)."""
    done = subprocess.run(
        [AWS_PYTHON, JUDGE], input=json.dumps(documents), capture_output=True, text=True,
        timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def _ask_kubectl(path: str) -> str:
    return subprocess.check_output(["kubectl", "get", "--raw", path], text=True)


def _definition(name: str) -> Any:
    words = ("kubectl", "get", f"customresourcedefinition/{name}", "--output=json")
    return json.loads(subprocess.check_output(words))


if __name__ == "__main__":
    (FOLDER / "kubernetes.json").write_text(text_of(of_kubernetes(_ask_kubectl)))
    (FOLDER / "kubeflow.json").write_text(text_of(of_kubeflow(_definition)))
    (FOLDER / "hyperpod.json").write_text(text_of(of_aws(ask_aws([])["schema"])))
