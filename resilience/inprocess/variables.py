"""The environment variables that tell a program its rank, as torchrun sets them. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from resilience.comm.messages import Open
from resilience.run_record import RUN_DIR_VARIABLE

MAX_RESTARTS = "TORCHELASTIC_MAX_RESTARTS"
RUN_ID = "TORCHELASTIC_RUN_ID"
ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
NCCL_ERRORS = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
NCCL_LEAVES_THEM = "0"
"""torch's watchdog notes an error of NCCL, and neither ends the process nor aborts a communicator.

With 1 and 3 survivors of a dead peer would end. With 2 they would live, but the watchdog would
abort at a moment of its own: the stream runs on over garbage then, and the gate, which knows of
the breaks of its generation alone, could be passed with it.
"""
NUM_THREADS = "OMP_NUM_THREADS"
LINEAR_ALGEBRA_THREADS = "OPENBLAS_NUM_THREADS"
UNBUFFERED = "PYTHONUNBUFFERED"
GENERATION = "RESILIENCE_GENERATION"
"""What a torchrun below the worker leaves as it is, while it counts its own restarts."""
_RESTART_COUNT = "TORCHELASTIC_RESTART_COUNT"
_NODE_PLACES = ("NODE_RANK", "NUM_NODES", "HEAD_ADDR", "HEAD_PORT")
GLOO_CONNECTS_LATE = "TORCH_GLOO_LAZY_INIT"
GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"
GLOO_ASKS_ONCE = "GLOO_ENABLE_STORE_V2_API"
"""With 1 gloo asks the store for the addresses of 128 ranks at a time, and else for each twice."""


def rank_variables(opening: Open) -> dict[str, str]:
    """Return the variables that say which rank this is; an agent's others are there before."""
    host, _, port = opening.head.rpartition(":")
    layout, rank = opening.layout, str(opening.rank)
    return {
        "RANK": rank,
        "LOCAL_RANK": str(opening.local_rank),
        "WORLD_SIZE": str(layout.world_size),
        "LOCAL_WORLD_SIZE": str(layout.num_local_ranks),
        "GROUP_RANK": str(layout.seat(opening.rank).node_index),
        "GROUP_WORLD_SIZE": str(len(layout.nodes)),
        # All workers have one role.
        "ROLE_NAME": "default",
        "ROLE_RANK": rank,
        "ROLE_WORLD_SIZE": str(layout.world_size),
        "MASTER_ADDR": host,
        "MASTER_PORT": port,
        _RESTART_COUNT: str(opening.generation),
        # For children, which have no link to the agent: the first rank's has to host their store.
        "TORCHELASTIC_USE_AGENT_STORE": "False",
    }


def node_variables(opening: Open) -> dict[str, str]:
    """Return the variables of a program that is alone on its node, and starts what it likes."""
    host, _, port = opening.head.rpartition(":")
    layout = opening.layout
    index = layout.seat(opening.rank).node_index
    places = (str(index), str(len(layout.nodes)), host, port)
    count = str(opening.generation)
    return {
        **dict(zip(_NODE_PLACES, places, strict=True)),
        _RESTART_COUNT: count,
        GENERATION: count,
    }


def fill_in(command: Sequence[str], variables: Mapping[str, str], *, is_alone: bool) -> list[str]:
    """Return a command with the run's folder for {run_dir}.

    And of a program that is alone on its node with the node's place for {node_rank} and its like.
    """
    places = {name.lower(): name for name in _NODE_PLACES if is_alone}
    words = list(command)
    for place, name in {"run_dir": RUN_DIR_VARIABLE, **places}.items():
        shown = f"{{{place}}}"
        words = [word.replace(shown, variables.get(name, shown)) for word in words]
    return words
