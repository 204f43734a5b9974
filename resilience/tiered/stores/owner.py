"""Whose a namespace of a store is: of one run, from its first start to its last.

There are no locks: a run writes that it wants the namespace, and then looks whether it is alone.
Of two that come at once at least one sees the other. The one whose id is the later gives way, and
the other one waits until it has; only who was alone writes that the namespace is its own. A run
that was killed in between owns nothing, and what it has left counts for ten minutes, by the store's
own clock.

    <namespace>/owner/<run>.wants.json
    <namespace>/owner/<run>.json
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from resilience.tiered.errors import TierError
from resilience.tiered.paths import check_namespace
from resilience.tiered.stores.objects import Objects, Stored

_WANTS = ".wants"
_BYTES_MAX = 1 << 16
_DEAD_S = 600.0
"""A run takes less from the one to the other: each of its calls has a deadline."""
_LOOK_S, _NUM_LOOKS = 0.25, 20
"""How often, and how many times, a run looks whether those that come after it have given way."""


Lives = Callable[["NamespaceOwner"], bool]
"""Returns whether a run is seen to live."""


class NamespaceOwner(BaseModel):
    """A run, as the store knows it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    run: Annotated[str, Field(pattern=r"^[A-Za-z0-9-]{1,64}$")]
    """Its id."""
    name: str
    """By what a person knows it: a run's is "RECIPE in FOLDER"."""

    @property
    def folder(self) -> Path:
        """Return the folder of the run; a path that is not absolute where the name has none."""
        return Path(self.name.partition(" in ")[2])

    def describe(self, sign: str | None = "") -> str:
        """Return who it is, and where a sign shows that it lives, what to do about that."""
        text, place = f"{self.name} (run {self.run[:12]})", shlex.quote(str(self.folder))
        advice = (
            f"`launcher status {place}` shows it, and `launcher cancel {place}` ends it; a daemon "
            "that a killed agent has left ends by itself"
        )
        return f"{text}, which lives: {sign}. {advice}" if sign else text


def claim_namespace(
    objects: Objects,
    namespace: str,
    owner: NamespaceOwner,
    *,
    takes_over: bool,
    lives: Lives = lambda _: False,
    pause: Callable[[float], None] = time.sleep,
) -> tuple[NamespaceOwner, ...]:
    """Have a namespace be a run's own; returns whose it is instead, nothing where that came about.

    Idempotent. A run that `takes_over` ends the claim of the owner before, unless that one `lives`
    or another run comes at the same time. Raises TierError; called again, it goes on from there.
    """
    prefix = f"{check_namespace(namespace)}/owner/"
    own, wants = f"{prefix}{owner.run}.json", f"{prefix}{owner.run}{_WANTS}.json"
    found = objects.find_all(prefix)
    owners = [each for each in found if _is_owner(each) and each.name != own]
    if any(each.name == own for each in found):
        return _read_all(objects, owners)
    if owners and not takes_over:
        return _read_all(objects, owners)
    content = owner.model_dump_json().encode()
    objects.write(wants, len(content), [memoryview(content)])
    for look in range(_NUM_LOOKS):
        if look:
            pause(_LOOK_S)
        found = objects.find_all(prefix)
        since_s = max((each.changed_s for each in found if each.name == wants), default=0.0)
        wanting = [each for each in found if not _is_owner(each) and each.name != wants]
        dead = [each for each in wanting if each.changed_s < since_s - _DEAD_S]
        rivals = [each for each in wanting if each not in dead]
        owners = [each for each in found if _is_owner(each) and each.name != own]
        is_refused = bool(owners) and not takes_over
        if is_refused or not rivals or min(rivals).name < wants:
            break
    others = _read_all(objects, [*rivals, *owners])
    if not is_refused and not rivals:
        # Alone: no other run takes the namespace meanwhile, so that the owner stays this one.
        others = tuple(filter(lives, others))
    if others:
        objects.delete([wants])
        return others
    # Whoever comes from now on sees that this run wants the namespace, and gives way.
    objects.delete([each.name for each in (*owners, *dead)])
    objects.write(own, len(content), [memoryview(content)])
    objects.delete([wants])
    return ()


def find_owners(objects: Objects, namespace: str) -> tuple[NamespaceOwner, ...]:
    """Return whose a namespace is. Raises TierError."""
    found = objects.find_all(f"{check_namespace(namespace)}/owner/")
    return _read_all(objects, [each for each in found if _is_owner(each)])


def _is_owner(entry: Stored) -> bool:
    return not entry.name.endswith(f"{_WANTS}.json")


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
