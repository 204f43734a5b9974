"""The plan of a job: its figures, and what they come to. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from launcher.job.content import TrainingContent
from launcher.job.parameters import count_parameters
from launcher.plan.devices import TABLE, Device
from launcher.plan.figure import Figure
from launcher.plan.fit import Fit, judge_device, judge_node
from launcher.plan.memory import device_memory, node_memory, replica, together
from launcher.plan.time import duration, limit_days, replica_seconds, work


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """All that is told of a job; what is a device's is None or empty where it has none."""

    job: TrainingContent
    device: Device | None
    mfu: float
    parameters: Figure
    on_device: tuple[Figure, ...]
    """The parts and their sum."""
    replica: tuple[Figure, ...]
    """What a rank's second copy is, and how long it is on its way."""
    on_node: tuple[Figure, ...]
    time: tuple[Figure, ...]
    device_fit: Fit | None
    node_fit: Fit
    limit_days: float | None

    @property
    def ends_in_time(self) -> bool | None:
        """Return whether training ends within the limit, None where one of the two is not known."""
        if self.limit_days is None or self.device is None:
            return None
        return self.time[-1].value <= self.limit_days


def make_plan(job: TrainingContent, device: Device | None, mfu: float) -> Plan:
    """Return the plan of a job on such devices."""
    node = node_memory(job)
    parts = device_memory(job) if device else ()
    return Plan(
        job=job,
        device=device,
        mfu=mfu,
        parameters=_parameters(job),
        on_device=(*parts, together(parts, device.memory_gib, TABLE)) if device else (),
        replica=_replica(job, device) if device else (),
        on_node=(*node, together(node, job.instance.memory_gib, "conf/instance")),
        time=(*work(job), *(duration(job, device, mfu) if device else ())),
        device_fit=judge_device(job, device) if device else None,
        node_fit=judge_node(job),
        limit_days=limit_days(job),
    )


def _parameters(job: TrainingContent) -> Figure:
    model = job.model
    return Figure(
        name="parameters",
        value=count_parameters(model),
        unit="number",
        formula=f"{model.num_layers} layers of {model.architecture}, embedding and output",
        source="launcher/job/parameters.py",
    )


def _replica(job: TrainingContent, device: Device) -> tuple[Figure, ...]:
    own = replica(job)
    if not own.value:
        return (own,)
    seconds = replica_seconds(job, device, own.value)
    arrival = Figure(
        name="replica to a new rank",
        value=seconds,
        unit="seconds",
        formula=f"at {own.value / 1e9 / seconds:.3g} GB/s, the link that it takes, at the least",
        source=TABLE,
    )
    return own, arrival
