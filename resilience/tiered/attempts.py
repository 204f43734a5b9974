"""Which attempt a save is, and whose a held shard is. Pure.

A step that was begun and never finished leaves shards behind, on any node. Who saves that step
again gives it a generation above all that were seen: the shards of both attempts are never taken
for one step, and what is left of the older attempt goes. A number for it is agreed by all ranks,
out of what each one's node knows.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

from resilience.tiered.errors import HeldError, StaleError


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class KnownStep:
    """One history of one step, as a node knows it."""

    step: int
    generation: int
    is_whole: bool = False
    """All its shards are somewhere, and no newer history has gone over it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BegunRun:
    """Where a run said that it goes on."""

    first_generation: int
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownSteps:
    """What a node knows of a namespace: its newest run, and every step that was ever begun."""

    run: BegunRun | None = None
    steps: tuple[KnownStep, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldShard:
    """What a node has of one shard."""

    digest: str | None = None
    """Of its content; None where it is not held."""
    is_being_written: bool = False


def join_known(known: Iterable[KnownSteps]) -> KnownSteps:
    """Return what several nodes know together.

    The newest run counts for all of them, also where its node alone has heard of it: later steps
    of older generations are no longer whole then.
    """
    everything = list(known)
    runs = [each.run for each in everything if each.run is not None]
    run = max(runs, key=lambda each: each.first_generation, default=None)
    whole: dict[tuple[int, int], bool] = {}
    for each in (step for one in everything for step in one.steps):
        is_over = run and each.generation < run.first_generation and each.step > run.step
        at = each.step, each.generation
        whole[at] = whole.get(at, False) or (each.is_whole and not is_over)
    steps = [
        KnownStep(step=step, generation=generation, is_whole=is_whole)
        for (step, generation), is_whole in sorted(whole.items())
    ]
    return KnownSteps(run=run, steps=tuple(steps))


def narrow_known(known: KnownSteps, step: int) -> KnownSteps:
    """Return what counts for a save of a step: later ones, and the newest generation."""
    newest = max((each.generation for each in known.steps), default=None)
    steps = [each for each in known.steps if each.step >= step or each.generation == newest]
    return replace(known, steps=tuple(steps))


def plan_attempt(
    step: int, known: KnownSteps, *, least: int = 0, may_overwrite: bool = False
) -> int:
    """Return the generation under which a step is saved: `least`, or the first that is free.

    What this step's generation would share its number with is left of a save that has not
    ended. Raises StaleError for a step older than a whole one: it would be dropped at once.
    Raises HeldError for one that is whole itself, unless it `may_overwrite` that.
    """
    whole = [each.step for each in known.steps if each.is_whole]
    newest = max(whole, default=-1)
    if newest > step:
        raise StaleError(
            f"step {step} is older than step {newest}, which is whole, and would not be kept; a "
            f"run that goes on from an earlier step says so first: client.go_back(step=...)"
        )
    if step in whole and not may_overwrite:
        # The first words are those of torch's own writer.
        raise HeldError(
            f"Checkpoint already exists and overwrite=False: step {step} is whole; "
            "save another step, or give the writer overwrite=True"
        )
    first = known.run.first_generation if known.run else 0
    generation = max([least, first, *(each.generation for each in known.steps)])
    is_taken = any(each.step >= step and each.generation == generation for each in known.steps)
    return generation + is_taken


def check_kept(step: int, generation: int, known: KnownSteps) -> None:
    """Raise StaleError where a step that was just written is not kept.

    Another save has meanwhile made a later step whole, or a newer run or attempt has begun.
    """
    for each in known.steps:
        is_over = each.generation > generation and each.step <= step
        if is_over or (each.is_whole and each.step > step):
            raise StaleError(
                f"step {step} was overtaken while it was saved, and is not kept: step "
                f"{each.step} of generation {each.generation} has come meanwhile"
            )


def find_attempt(step: int, known: KnownSteps) -> int | None:
    """Return the newest generation of a step that is whole; None where there is none."""
    found = [each.generation for each in known.steps if each.is_whole and each.step == step]
    return max(found, default=None)


def check_begun(run: BegunRun | None, step: int, generation: int) -> None:
    """Raise StaleError for a save of a run that has not said where it begins, or is over.

    Without that, what an earlier run has left of a step is taken for this one's.
    """
    if run is None:
        raise StaleError(
            f"step {step} cannot be saved before the run has said where it begins: call "
            "client.go_back(step=...) first, on each rank, with 0 where nothing was loaded"
        )
    if generation < run.first_generation:
        raise StaleError(
            f"step {step} is of generation {generation}, and the newest run's begin at "
            f"{run.first_generation}: save under what client.go_back(step=...) returns"
        )


def judge_held(held: HeldShard, digest: str) -> Literal["same", "wait", "gone"]:
    """Say what a shard of this name, found at the begin of a save, is to a rank with this content.

    "same": it is this rank's, a replica was faster. "wait": it is being written. "gone": who
    wrote it has given up. Raises HeldError where its content is another.
    """
    if held.digest is not None and held.digest != digest:
        raise HeldError(
            "this shard is held with other content: another history has saved it under the same "
            "generation; each run calls client.go_back(step=...) before its first save"
        )
    if held.digest is not None:
        return "same"
    return "wait" if held.is_being_written else "gone"
