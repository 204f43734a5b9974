"""Which jobs may go on from each other's state, and what is said of what differs. Pure.

A state fits the model's shapes, the optimizer's kind and the tokenizer, and nothing else: what
training makes of it may change on the way, and is said and recorded. What no bit of a run depends
on is not even said.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher.job.content import JobContent

_DEGREES = tuple(
    f"trainer.{each}"
    for each in ("tensor_parallel", "pipeline_parallel", "virtual_pipeline", "expert_parallel")
)
"""How Megatron divides a copy of the state, whatever the number of data-parallel ranks."""
_FIXED = ("model", "trainer.kind", *_DEGREES, "data.tokenizer")
"""What has to be equal, a section with all that it holds."""
CONVERSION = (
    "python -m recipes_training.convert RUN_DIR OUT writes its weights, for model.weights=OUT"
)
"""What there is of a run's state for a job that divides it otherwise."""
_TOLD_IN_FIXED = ("model.weights", "model.init_std", "model.router_aux_loss_coef")
"""What of these may change: how a state began, or what its loss is made of."""
_FREE = (
    "name", "recipe", "time_limit", "resources", "cluster", "instance", "resilience",
    "trainer.log_every_n_steps", "trainer.save_checkpoint", "trainer.max_restarts",
    "trainer.activation_checkpointing",
)  # fmt: skip
_TOLD_IN_FREE = ("instance.accelerator", "instance.type", "cluster.kind", "cluster.image")
"""What no bit of a run depends on, and what of it other sums may come from all the same."""
_NO_TOKENIZER = "bytes"
"""What data without the key has: the bytes themselves."""


@dataclass(frozen=True, slots=True)
class Change:
    """A key whose value is another one."""

    key: str
    before: object
    after: object

    def __str__(self) -> str:
        return f"{self.key}: {json.dumps(self.before)} -> {json.dumps(self.after)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """What differs between two jobs."""

    refused: tuple[Change, ...]
    """No state of the one fits the other."""
    told: tuple[Change, ...]
    """The run goes on otherwise than it did."""


def compare_jobs(before: JobContent, after: JobContent) -> Comparison:
    """Return what differs between a job that has made a state and one that is to go on from it."""
    # An empty mapping that gets its first key is no change besides.
    old, new = (
        {key: value for key, value in _leaves_of(each).items() if value != {}}
        for each in (before, after)
    )
    changes = [
        Change(key, old.get(key), new.get(key))
        for key in sorted(old.keys() | new.keys())
        if old.get(key) != new.get(key) and not _is_free(key)
    ]
    refused = tuple(each for each in changes if _is_fixed(each.key))
    return Comparison(refused=refused, told=tuple(each for each in changes if each not in refused))


def fixed_values(job: JobContent) -> dict[str, Any]:
    """Return what has to be equal for jobs that go on from each other's state, by key."""
    return {key: value for key, value in _leaves_of(job).items() if _is_fixed(key)}


def lineage_digest(job: JobContent) -> str:
    """Return 32 hex digits that jobs with the same `fixed_values` have in common."""
    text = json.dumps(fixed_values(job), sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def name_run(run_dir: Path, *, within: str = "") -> str:
    """Return what tells runs of one recipe apart: 12 hex digits of a run's folder.

    A run that is started again is the same one. `within` is what the folder's path is unique
    in, where that is not everywhere.
    """
    text = f"{within}:{run_dir.resolve()}" if within else str(run_dir.resolve())
    return hashlib.blake2b(text.encode(), digest_size=6).hexdigest()


def checkpoints_namespace(job: JobContent, run_dir: Path, *, within: str = "") -> str:
    """Return the name that a run's checkpoints have in every tier; `within` as in `name_run`."""
    tiered = job.resilience.tiered
    if tiered is not None and tiered.namespace is not None:
        return tiered.namespace
    is_own = tiered is not None and tiered.store is not None and tiered.store.is_in_run
    # Nobody else is in the run's own folder, which stays the same wherever it is moved.
    place = "own" if is_own else name_run(run_dir, within=within)
    return f"run-{lineage_digest(job)[:12]}-{place}"


def differing_values(saved: Mapping[str, Any], own: Mapping[str, Any]) -> list[Change]:
    """Return where a state's `fixed_values` are not the job's."""
    keys = sorted(saved.keys() | own.keys())
    return [
        Change(key, saved.get(key), own.get(key)) for key in keys if saved.get(key) != own.get(key)
    ]


def explain_misfit(saved: Mapping[str, Any], own: Mapping[str, Any]) -> str:
    """Return why a state of these `fixed_values` does not fit the job's; empty where it does."""
    changes = differing_values(saved, own)
    if changes and are_degrees(changes):
        return f"it is divided by {_degrees(saved)}, and the job by {_degrees(own)} ({CONVERSION})"
    return f"it fits another job: {'; '.join(map(str, changes))}" if changes else ""


def are_degrees(changes: Iterable[Change]) -> bool:
    """Return whether nothing differs but how Megatron divides the state."""
    return all(each.key in _DEGREES for each in changes)


def _degrees(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{key} {values[key]}" for key in _DEGREES if values.get(key) is not None)


def changed_horizon(before: JobContent, after: JobContent) -> tuple[int, int] | None:
    """Return both numbers of steps where the learning rates would follow a new one unasked.

    None where the schedule has a length of its own, or stays as long as it was.
    """
    if before.training is None or after.training is None:
        return None
    old, new = before.training.trainer, after.training.trainer
    has_own = old.optimizer.decay_steps is not None or new.optimizer.decay_steps is not None
    if has_own or old.max_steps == new.max_steps:
        return None
    return old.max_steps, new.max_steps


def _is_free(key: str) -> bool:
    return _is_below(key, _FREE) and not _is_below(key, _TOLD_IN_FREE)


def _is_fixed(key: str) -> bool:
    return _is_below(key, _FIXED) and not _is_below(key, _TOLD_IN_FIXED)


def _is_below(key: str, sections: tuple[str, ...]) -> bool:
    return any(key == each or key.startswith(f"{each}.") for each in sections)


def _leaves_of(job: JobContent) -> dict[str, Any]:
    leaves = dict(_leaves("", job.model_dump(mode="json", by_alias=True)))
    leaves.setdefault("data.tokenizer", _NO_TOKENIZER)
    return leaves


def _leaves(where: str, node: object) -> Iterator[tuple[str, object]]:
    if isinstance(node, dict) and node:
        for key, value in node.items():
            yield from _leaves(f"{where}.{key}" if where else str(key), value)
    else:
        yield where, node
