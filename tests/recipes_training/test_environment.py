from __future__ import annotations

from typing import Any

import pytest

from recipes_training.environment import (
    AGENT_PID,
    WorkerEnvironment,
    has_agent,
    parse_environment,
    parse_generation,
)
from recipes_training.errors import PlacementError
from resilience.inprocess.handles import WorkerHandles, read_handles

VARIABLES = {
    "RANK": "3",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "4",
    "MASTER_ADDR": "host",
    "MASTER_PORT": "29500",
}


def test_variables_of_torchrun_are_read():
    environment = parse_environment(
        {
            **VARIABLES,
            "TORCHELASTIC_RESTART_COUNT": "2",
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }
    )

    assert environment == WorkerEnvironment(
        rank=3,
        local_rank=1,
        world_size=4,
        local_world_size=None,
        master_addr="host",
        master_port=29500,
        generation=2,
        is_store_hosted=True,
    )


def test_generation_grows_over_attempts_of_the_job():
    starts = [("0", "0"), ("0", "2"), ("1", "0"), ("1", "1")]

    generations = [
        parse_generation(
            {
                "SLURM_RESTART_COUNT": requeues,
                "TORCHELASTIC_MAX_RESTARTS": "2",
                "TORCHELASTIC_RESTART_COUNT": restarts,
            }
        )
        for requeues, restarts in starts
    ]

    assert generations == [0, 2, 3, 4]


def test_without_an_agent_rank_0_has_the_store():
    environment = parse_environment(VARIABLES)

    assert environment.generation == 0
    assert not environment.is_store_hosted


@pytest.mark.parametrize("name", VARIABLES)
def test_missing_variable_is_named(name):
    variables = {key: value for key, value in VARIABLES.items() if key != name}

    with pytest.raises(PlacementError, match=f"the variable {name} is not set; start workers with"):
        parse_environment(variables)


def test_variable_that_is_no_number_is_named():
    with pytest.raises(PlacementError, match="the variable RANK is 'x'; allowed: a whole number"):
        parse_environment({**VARIABLES, "RANK": "x"})


def make_handles(**changed: Any) -> WorkerHandles:
    values: dict[str, Any] = {
        "agent_file": 3, "events_file": -1, "events_path": "/a b/\u00f6/\udcff/events.jsonl",
        "page_file": 4, "transfer_file": 5, "state_files": (), "slot": 0, "num_slots": 9,
        "num_local_ranks": 1, "transfer_bytes": 32 << 20, "node": "1", "agent_pid": 17,
        "recovers": True,
    }  # fmt: skip
    return WorkerHandles(**values | changed)


@pytest.mark.parametrize("state_files", [(), (7, 8)])
@pytest.mark.parametrize("recovers", [True, False])
def test_a_worker_reads_what_its_agent_gave_it(state_files, recovers):
    handles = make_handles(state_files=state_files, recovers=recovers)

    variables = handles.variables()

    assert read_handles(variables) == handles
    assert has_agent(variables) == recovers
    assert variables[AGENT_PID] == "17"
    assert read_handles({}) is None
    assert not has_agent({})
