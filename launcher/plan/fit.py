"""Whether a job fits the devices and nodes that it asks for.

All is pure but what looks the devices up: `misfits` and `check_fit`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from launcher.errors import RecipeError
from launcher.job.content import JobContent, TrainingContent
from launcher.plan.devices import Device, read_device
from launcher.plan.figure import GIB, Figure, add_up, in_gib
from launcher.plan.memory import STATE, device_memory, node_memory

USABLE = 0.92
"""Share of a device's memory that tensors can have: CUDA's context, NCCL's buffers and gaps between
tensors take the rest. A choice, not a measurement."""

Verdict = Literal["fits", "probably does not fit", "does not fit"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """Whether something fits, and why not."""

    verdict: Verdict
    reason: str = ""


def judge_device(job: TrainingContent, device: Device) -> Fit:
    """Return whether the parts of a rank's memory fit its device.

    Weights, gradients and optimizer are exact, so that what does not hold them surely fails; the
    rest is an estimate.
    """
    parts = device_memory(job)
    state = add_up(tuple(each for each in parts if each.name in STATE))
    capacity = device.memory_gib * GIB
    where = f"a device of {job.instance.type!r} has {in_gib(capacity)}"
    if state > capacity:
        reason = (
            f"weights, gradients and optimizer take {in_gib(state)} of each device, and {where}; "
            f"divide them over more ranks ({_remedy(job)}), or choose another instance"
        )
        return Fit(verdict="does not fit", reason=reason)
    if add_up(parts) > capacity * USABLE:
        largest = ", ".join(f"{each.name} {in_gib(each.value)}" for each in parts if each.value)
        reason = (
            f"a device probably needs {in_gib(add_up(parts))} ({largest}), and {where}, of which "
            f"{USABLE:.0%} are for tensors; `plan` shows each part"
        )
        return Fit(verdict="probably does not fit", reason=reason)
    return Fit(verdict="fits")


def _remedy(job: TrainingContent) -> str:
    return (
        "trainer.sharding, trainer.num_nodes"
        if job.trainer.kind == "torch"
        else "trainer.tensor_parallel, pipeline_parallel, expert_parallel, trainer.num_nodes"
    )


def judge_node(job: TrainingContent) -> Fit:
    """Return whether the memory of a node holds what the job puts there."""
    parts: tuple[Figure, ...] = node_memory(job)
    capacity = job.instance.memory_gib * GIB
    if add_up(parts) <= capacity:
        return Fit(verdict="fits")
    reason = (
        f"a node needs {in_gib(add_up(parts))} of memory, and {job.instance.type!r} has "
        f"{in_gib(capacity)}; `plan` shows each part"
    )
    return Fit(verdict="probably does not fit", reason=reason)


def misfits(given: JobContent) -> list[str]:
    """Return the parts of a job that do not fit, or probably do not.

    None of a job on unknown devices, and none of a script: its sizes are not known.
    """
    if (job := given.training) is None:
        return []
    device = read_device(job.instance)
    fits = [*([judge_device(job, device)] if device else []), judge_node(job)]
    return [fit.reason for fit in fits if fit.reason]


def check_fit(given: JobContent) -> None:
    """Raise RecipeError where a job surely does not fit its devices."""
    job = given.training
    device = read_device(job.instance) if job else None
    fit = judge_device(job, device) if job and device else None
    if fit and fit.verdict == "does not fit":
        raise RecipeError(f"action 'submit': {fit.reason}; plan.force=true submits it all the same")
