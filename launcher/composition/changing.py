"""Change keys of a job that a run has begun with, so that it goes on. Pure.

The job is the run's own, as it was resolved at its start: what recipes and groups have become
since makes no difference, so keys can be set and groups cannot be chosen.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from launcher.composition.choice import nearest
from launcher.composition.messages import OPEN_MAPPINGS, first_line, validation_problems
from launcher.errors import RecipeError
from launcher.job import Job
from launcher.job.lineage import CONVERSION, Change, are_degrees, changed_horizon, compare_jobs
from launcher.written.overrides import check_given_twice, keep_text

SCHEDULE = "trainer.schedule"
"""What becomes of learning rates that span the run, where the run becomes longer or shorter."""
_KEEP, _STRETCH = "keep", "stretch"
_OURS = ("recipe", "name")


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangedJob:
    """The job with which a run goes on."""

    job: Job
    told: tuple[Change, ...]
    """What training makes otherwise of the state from now on."""


def change_job(before: Job, overrides: Sequence[str], *, hint: str) -> ChangedJob:
    """Return the job of a run with other values for some of its keys.

    `hint` is what to do where no state of the run fits the job. Raises RecipeError that names each
    key that may not change, or whose value is wrong.
    """
    content = before.model_dump(mode="json", by_alias=True)
    # A job without it leaves it out.
    content["cluster"].setdefault("tls", False)
    schedule: object = None
    for key, value in parse_overrides(overrides):
        if key == SCHEDULE:
            schedule = value
        else:
            _set(content, key, value)
    after = _with_schedule(before, _validate(content), schedule)
    found = compare_jobs(before, after)
    stretched = (Change(SCHEDULE, None, _STRETCH),) if schedule == _STRETCH else ()
    if found.refused:
        lines = [f"{each}: no state of the run fits that" for each in found.refused]
        if are_degrees(found.refused):
            hint = f"{hint}; {CONVERSION}"
        raise RecipeError("\n".join([*lines, f"  {hint}"]))
    return ChangedJob(job=after, told=(*found.told, *stretched))


def rename_job(job: Job, name: str) -> Job:
    """Return the job under another name; raises RecipeError where no run may have it."""
    return _validate({**job.model_dump(mode="json", by_alias=True), "name": name})


def _with_schedule(before: Job, after: Job, schedule: object) -> Job:
    """Return the job with learning rates of the length that was asked for."""
    if schedule not in (None, _KEEP, _STRETCH):
        raise RecipeError(f"{SCHEDULE} {schedule!r}: allowed: {_KEEP}, {_STRETCH}")
    horizon = changed_horizon(before, after)
    if horizon is None:
        if schedule is not None:
            raise RecipeError(
                f"{SCHEDULE} {schedule!r} has no use: the learning rates do not span the run, or "
                "trainer.max_steps is as it was; leave it out"
            )
        return after
    if schedule is None:
        raise RecipeError(
            f"trainer.max_steps {horizon[0]} -> {horizon[1]}: the learning rates decay over the "
            f"whole run; add {SCHEDULE}={_KEEP} to end their decay at step {horizon[0]} as before, "
            f"or {SCHEDULE}={_STRETCH} to have it span {horizon[1]} steps from now on"
        )
    if schedule == _STRETCH:
        return after
    content = after.model_dump(mode="json", by_alias=True)
    content["trainer"]["optimizer"]["decay_steps"] = horizon[0]
    return _validate(content)


def _validate(content: dict[str, Any]) -> Job:
    try:
        return Job.model_validate_json(json.dumps(content), strict=True)
    except ValidationError as error:
        raise RecipeError("\n".join(validation_problems(error, Job))) from error


def parse_overrides(overrides: Sequence[str]) -> Iterator[tuple[str, object]]:
    """Yield key and value of each override, in Hydra's grammar. Raises RecipeError."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    check_given_twice(overrides)
    parser = OverridesParser.create()
    for text in overrides:
        try:
            parsed = parser.parse_override(keep_text(text))
            if parsed.is_delete() or parsed.is_sweep_override() or parsed.package is not None:
                raise RecipeError(f"{text!r}: write KEY=VALUE")
            yield parsed.key_or_group, parsed.value()
        except HydraException as error:
            raise RecipeError(f"{text!r}: {first_line(error)}") from error


def _set(content: dict[str, Any], key: str, value: object) -> None:
    *sections, last = key.split(".")
    node: Any = content
    for section in sections:
        node = node.get(section) if isinstance(node, dict) else None
    is_open = any(f"{key}.".startswith(each) for each in OPEN_MAPPINGS)
    if not isinstance(node, dict) or (last not in node and not is_open):
        known = [each for each in _keys(content) if not each.startswith(_OURS)]
        raise RecipeError(f"no key {key!r} in the run's job; {nearest(key, known)}")
    if isinstance(node.get(last), dict) and not isinstance(value, dict):
        raise RecipeError(f"{key}: is a section, and no group can be chosen; set the keys in it")
    if key.partition(".")[0] in _OURS:
        raise RecipeError(f"{key}: the run keeps its own")
    node[last] = value


def _keys(node: object, where: str = "") -> Iterator[str]:
    if isinstance(node, dict):
        for key, value in node.items():
            path = f"{where}.{key}" if where else str(key)
            yield path
            yield from _keys(value, path)
