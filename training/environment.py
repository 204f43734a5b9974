"""What torchrun tells a worker: the one place that reads environment variables."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from training.errors import PlacementError


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerEnvironment:
    """Which worker this process is, and where the others are."""

    rank: int
    local_rank: int
    world_size: int
    master_addr: str
    master_port: int
    generation: int
    """Grows with every start of the workers, over torchrun's restarts and the job's."""
    is_store_hosted: bool
    """The agent hosts the store; otherwise rank 0 does."""


def has_agent(variables: Mapping[str, str]) -> bool:
    """Say whether a node agent that recovers has started this process; then it tells the rank."""
    return variables.get("RESILIENCE_RECOVERS") == "1"


def parse_environment(variables: Mapping[str, str]) -> WorkerEnvironment:
    """Return the worker's place; raises PlacementError for a variable that is missing."""
    return WorkerEnvironment(
        rank=_number(variables, "RANK"),
        local_rank=_number(variables, "LOCAL_RANK"),
        world_size=_number(variables, "WORLD_SIZE"),
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


def _text(variables: Mapping[str, str], name: str) -> str:
    if not (value := variables.get(name)):
        raise PlacementError(f"the variable {name} is not set; start workers with torchrun")
    return value


def _number(variables: Mapping[str, str], name: str) -> int:
    value = _text(variables, name)
    if not value.isdecimal():
        raise PlacementError(f"the variable {name} is {value!r}; allowed: a whole number")
    return int(value)
