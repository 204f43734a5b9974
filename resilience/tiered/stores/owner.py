"""Whose a namespace of a store is: of one run, from its first start to its last.

There are no locks: a run writes that it wants the namespace, and then looks whether it is alone.
Of two that come at once at least one sees the other and gives way; only who was alone writes that
the namespace is its own. So a run that was killed in between owns nothing.

    <namespace>/owner/<run>.wants.json
    <namespace>/owner/<run>.json
"""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from resilience.tiered.errors import TierError
from resilience.tiered.paths import check_namespace
from resilience.tiered.stores.objects import Objects, Stored

_WANTS = ".wants"
_BYTES_MAX = 1 << 16


class NamespaceOwner(BaseModel):
    """A run, as the store knows it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    run: Annotated[str, Field(pattern=r"^[A-Za-z0-9-]{1,64}$")]
    """Its id."""
    name: str
    """By what a person knows it."""


def claim_namespace(
    objects: Objects, namespace: str, owner: NamespaceOwner, *, takes_over: bool
) -> tuple[NamespaceOwner, ...]:
    """Have a namespace be a run's own; returns whose it is instead, nothing where that came about.

    Idempotent. A run that `takes_over` ends the claims of others; what they were is returned by a
    call before. Raises TierError.
    """
    prefix = f"{check_namespace(namespace)}/owner/"
    own, wants = f"{prefix}{owner.run}.json", f"{prefix}{owner.run}{_WANTS}.json"
    found = objects.find_all(prefix)
    if any(each.name == own for each in found):
        return ()
    content = owner.model_dump_json().encode()
    if not takes_over:
        if others := [each for each in found if each.name != wants]:
            return _read_all(objects, others)
        objects.write(wants, len(content), [memoryview(content)])
        if others := _others(objects, prefix, own, wants):
            objects.delete([wants])
            return _read_all(objects, others)
        objects.write(own, len(content), [memoryview(content)])
        objects.delete([wants])
        return ()
    objects.delete([each.name for each in found])
    objects.write(own, len(content), [memoryview(content)])
    if others := _others(objects, prefix, own, wants):
        # Another run takes it over at the same time.
        objects.delete([own])
        return _read_all(objects, others)
    return ()


def _others(objects: Objects, prefix: str, own: str, wants: str) -> list[Stored]:
    return [each for each in objects.find_all(prefix) if each.name not in (own, wants)]


def _read_all(objects: Objects, entries: list[Stored]) -> tuple[NamespaceOwner, ...]:
    return tuple(_read(objects, each) for each in sorted(entries))


def _read(objects: Objects, entry: Stored) -> NamespaceOwner:
    content = bytearray(min(entry.num_bytes, _BYTES_MAX))
    try:
        objects.read(entry.name, entry.num_bytes, 0, memoryview(content))
        return NamespaceOwner.model_validate_json(bytes(content))
    except ValidationError:
        return NamespaceOwner(run="unknown", name=entry.name)
    except TierError:
        if objects.find(entry.name) is not None:
            raise
        return NamespaceOwner(run="unknown", name="a run that came at the same time")
