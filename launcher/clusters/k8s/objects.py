"""Objects of a cluster as kubectl prints them: whose, in what state, and their removal. Pure.

An object is known by its uid. Its name may be that of another run's object by now.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, TypeAlias

from launcher.errors import OutsideError
from launcher.monitor.duration import format_seconds

Found: TypeAlias = Mapping[str, Any]

SUBMITTED_BY = "training-recipes/submitted-by"
"""Annotation of a job: who submitted it, on which machine, from which folder."""
SUCCEEDED = {"Complete", "Completed", "Succeeded"}
FAILED = {"Failed"}
"""Conditions that end a job, by the names of Jobs and of HyperPod's operator."""
_MANAGED_BY = "app.kubernetes.io/managed-by"
_TOLD = (SUBMITTED_BY, _MANAGED_BY, "training-recipes/recipe")
"""Labels and annotations that say whose an object is."""
JOBS = {"Job", "HyperPodPyTorchJob", "TrainJob"}
"""Kinds that a run is one of."""
RUNTIME = "TrainingRuntime"
"""Kind of what a TrainJob's pods are made of."""


def read_found(text: str) -> list[dict[str, Any]]:
    """Return the objects of a text of kubectl: none, one, or a list of them.

    Raises OutsideError where it is no JSON.
    """
    try:
        content = json.loads(text) if text.strip() else {}
    except ValueError as error:
        raise OutsideError(f"kubectl printed no JSON but {text.strip()[:200]!r}") from error
    items: list[dict[str, Any]] = content.get("items", [content] if content else [])
    return items


def uids_of(found: Found) -> set[str]:
    """Return the uid of an object, and those of its owners."""
    metadata = found["metadata"]
    owners = metadata.get("ownerReferences") or ()
    return {str(metadata.get("uid")), *(owner["uid"] for owner in owners)}


def owner_of(found: Found) -> dict[str, str]:
    """Return what objects name that go with this one."""
    named = found["metadata"]
    own = {"name": str(named["name"]), "uid": str(named["uid"])}
    return {"apiVersion": str(found["apiVersion"]), "kind": str(found["kind"]), **own}


def belonging(found: Sequence[dict[str, Any]], uid: str) -> list[dict[str, Any]]:
    """Return the object of a uid, and what belongs to it or to what does; owners stand before."""
    uids, own = {uid}, []
    for each in found:
        if uids_of(each) & uids:
            uids.add(str(each["metadata"]["uid"]))
            own.append(each)
    return own


def is_controlled(found: Found) -> bool:
    """Return whether a controller has made an object, and makes it anew."""
    return any(each.get("controller") for each in found["metadata"].get("ownerReferences") or ())


def list_of(items: Sequence[Found]) -> dict[str, Any]:
    """Return some objects as one."""
    return {"apiVersion": "v1", "kind": "List", "items": items}


def true_conditions(found: Found) -> dict[str, Found]:
    """Return the conditions of an object that hold, by their type."""
    conditions = found.get("status", {}).get("conditions") or ()
    return {each["type"]: each for each in conditions if each.get("status") == "True"}


def unix_s(text: str) -> float:
    """Return a time that a cluster has written, in unix seconds."""
    return datetime.fromisoformat(text.replace("Z", "+00:00")).timestamp()


def taken_text(
    taken: Sequence[Found], own: str, removal_text: Callable[[Found], str], now: float
) -> str:
    """Say what has the names that a submission wants, and what to do about it.

    `own` is what this submission has for SUBMITTED_BY, `removal_text` returns what a person types.
    Removal is offered only of a job of this launcher that has ended, or is of this folder, and
    where all else that is named goes with it.
    """
    over = {each["metadata"]["uid"] for each in taken if _may_go(each, own)}
    words = [f"  {_description(each, now)}" for each in taken]
    words.append("nothing was changed; set run.name to a name that is free")
    # Further nodes go on where their run's job has failed.
    goes_on = (each["kind"] in JOBS and not _may_go(each, own) for each in taken)
    if over and not any(goes_on) and all(uids_of(each) & over for each in taken):
        firsts = [each for each in taken if not uids_of(each) - {each["metadata"]["uid"]}]
        words[-1] += ", or remove what is there:"
        words += [f"  {removal_text(each)}" for each in firsts]
    return "\n".join(words)


def _may_go(found: Found, own: str) -> bool:
    metadata, has_ended = found["metadata"], (SUCCEEDED | FAILED) & true_conditions(found).keys()
    is_own = (metadata.get("annotations") or {}).get(SUBMITTED_BY) == own
    is_ours = (metadata.get("labels") or {}).get(_MANAGED_BY) == "training-recipes"
    return found["kind"] in {*JOBS, RUNTIME} and is_ours and bool(has_ended or is_own)


def _description(found: Found, now: float) -> str:
    metadata = found["metadata"]
    own = {**(metadata.get("labels") or {}), **(metadata.get("annotations") or {})}
    ends = sorted((SUCCEEDED | FAILED) & true_conditions(found).keys())
    state = f"ended ({ends[0]})" if ends else "has not ended" if found["kind"] in JOBS else ""
    if metadata.get("deletionTimestamp"):
        state = "being deleted"
    told = [f"{key.partition('/')[2]} {' '.join(own[key].split())}" for key in _TOLD if key in own]
    owners = [f"of {each['kind']} {each['name']}" for each in metadata.get("ownerReferences") or ()]
    age = format_seconds(max(0.0, now - unix_s(metadata["creationTimestamp"])))
    words = [*told, *owners, f"created {age} ago", state]
    return f"{found['kind']} {metadata['name']}: {', '.join(filter(None, words))}"


def removal(found: Found) -> tuple[tuple[str, ...], str]:
    """Return kubectl's words that remove an object of this uid alone, and their input.

    Dependents go before the object. Those of a TrainJob go after it: Trainer refuses each change of
    one whose runtime is gone, and so its finalizer would stay.
    """
    metadata, version = found["metadata"], found["apiVersion"]
    root = "api/v1" if version == "v1" else f"apis/{version}"
    kind = f"{found['kind'].lower()}s"
    path = f"/{root}/namespaces/{metadata['namespace']}/{kind}/{metadata['name']}"
    policy = "Background" if found["kind"] == "TrainJob" else "Foreground"
    own = {"propagationPolicy": policy, "preconditions": {"uid": metadata["uid"]}}
    options = json.dumps({"apiVersion": "v1", "kind": "DeleteOptions", **own})
    return ("delete", f"--raw={path}", "--filename=-"), options
