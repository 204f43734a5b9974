"""What a benchmarked job has to do: written once by the driver, read by every worker.

Standard library only, since drivers and workers run in different environments.
"""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Literal

RUN_DIR_VARIABLE = "FAULTBENCH_RUN_DIR"
NUM_RANKS = 4
MICRO_BATCH = 2

Kind = Literal["exception", "kill", "stop", "assert", "address"]
Place = Literal["backward", "update"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One planned fault; it has either a step or a second of the measured window.

    `kill` is SIGKILL and `stop` SIGSTOP, both sent by the victim to itself. `assert` and
    `address` are errors of a kernel, for workers on a device. The place is
    between forward and backward, or within the update when weights have been written.
    """

    kind: Kind
    rank: int
    step: int | None = None
    at_s: float | None = None
    place: Place = "backward"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class JobPlan:
    """One run of the job under one system.

    `ports` are free ones of 127.0.0.1 for whatever the system has to listen on.
    """

    run_dir: str
    num_steps: int
    faults: tuple[Fault, ...] = ()
    num_ranks: int = NUM_RANKS
    checkpoint_every: int = 1
    gloo_timeout_s: float = 10.0
    ports: tuple[int, ...] = ()

    def write(self) -> None:
        """Write this plan to its run folder, which must exist."""
        text = json.dumps(dataclasses.asdict(self), indent=1)
        Path(self.run_dir, "plan.json").write_text(text + "\n", "utf-8")


def parse_plan(text: str) -> JobPlan:
    """Parse what `JobPlan.write` wrote."""
    values = json.loads(text)
    values["faults"] = tuple(Fault(**fault) for fault in values["faults"])
    values["ports"] = tuple(values["ports"])
    return JobPlan(**values)


def read_plan() -> JobPlan:
    """Read the plan of the run that this process belongs to."""
    return parse_plan(Path(os.environ[RUN_DIR_VARIABLE], "plan.json").read_text("utf-8"))
