"""What whoever starts the workers tells one of them: the one place that reads these variables."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from recipes_training.errors import PlacementError
from resilience.run_record import START_VARIABLE

_REQUIRED = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerEnvironment:
    """Which worker this process is, and where the others are."""

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int | None
    """Workers of each node; None where nobody says."""
    master_addr: str
    """Host of the store; empty for a worker that is the whole world and needs none."""
    master_port: int
    generation: int
    """Grows with every start of the workers, over torchrun's restarts and the job's."""
    is_store_hosted: bool
    """Whether somebody else hosts the store; otherwise rank 0 does."""


AGENT_PID = "RESILIENCE_AGENT_PID"
"""Variable in which our node agent names its process."""


def has_agent(variables: Mapping[str, str]) -> bool:
    """Return whether a node agent that recovers has started this process."""
    return variables.get("RESILIENCE_RECOVERS") == "true"


def parse_environment(variables: Mapping[str, str]) -> WorkerEnvironment:
    """Return the worker's place; raises PlacementError for a variable that is missing or wrong.

    A process that nobody told anything is the whole world.
    """
    if not any(name in variables for name in _REQUIRED):
        return WorkerEnvironment(
            rank=0,
            local_rank=0,
            world_size=1,
            local_world_size=1,
            master_addr="",
            master_port=0,
            generation=parse_generation(variables),
            is_store_hosted=True,
        )
    return WorkerEnvironment(
        rank=_number(variables, "RANK"),
        local_rank=_number(variables, "LOCAL_RANK"),
        world_size=_number(variables, "WORLD_SIZE"),
        local_world_size=(
            _number(variables, "LOCAL_WORLD_SIZE") if "LOCAL_WORLD_SIZE" in variables else None
        ),
        master_addr=_text(variables, "MASTER_ADDR"),
        master_port=_number(variables, "MASTER_PORT"),
        generation=parse_generation(variables),
        is_store_hosted=variables.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
    )


def parse_generation(variables: Mapping[str, str]) -> int:
    """Return a number that grows with every start of the workers, 0 where nobody counts.

    Slurm counts how often it queued the job again, torchrun its restarts within that.
    """
    num_requeues = int(variables.get("SLURM_RESTART_COUNT", "0"))
    num_restarts_max = int(variables.get("TORCHELASTIC_MAX_RESTARTS", "0"))
    num_restarts = int(variables.get("TORCHELASTIC_RESTART_COUNT", "0"))
    return num_requeues * (num_restarts_max + 1) + num_restarts


def start_number(variables: Mapping[str, str]) -> int:
    """Return which start of the run this is, from 0; also 0 where nobody counts them."""
    return int(variables.get(START_VARIABLE, "0"))


def _text(variables: Mapping[str, str], name: str) -> str:
    if not (value := variables.get(name)):
        raise PlacementError(f"the variable {name} is not set; start workers with torchrun")
    return value


def _number(variables: Mapping[str, str], name: str) -> int:
    value = _text(variables, name)
    if not value.isdecimal():
        raise PlacementError(f"the variable {name} is {value!r}; allowed: a whole number")
    return int(value)
