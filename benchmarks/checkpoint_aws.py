"""AWS's checkpointing library, whose daemon's address is the plan's option `url`.

    python -m benchmarks.checkpoint_aws PLAN

Runs in the environment of scripts/install-aws-checkpointing.sh.
"""

from __future__ import annotations

import logging
import os
import sys
import time

import torch
import torch.distributed.checkpoint as dcp
from amzn_sagemaker_checkpointing.checkpointing.filesystem.filesystem import (
    SageMakerTieredStorageReader,
    SageMakerTieredStorageWriter,
)
from amzn_sagemaker_checkpointing.config.sagemaker_checkpoint_config import (
    SageMakerCheckpointConfig,
)

from benchmarks.checkpoint_state import (
    Figures,
    Plan,
    Ranks,
    Timed,
    change,
    check_equal,
    clear,
    copy_into,
    make_room,
    make_state,
    read_plan,
    run_laps,
    run_ranks,
)

NAMESPACE = "bench"
STEPS_RETAINED = 3
"""The library's own number: a daemon has all its memory after so many saves and one more."""


def make_config(plan: Plan) -> SageMakerCheckpointConfig:
    """Return the configuration with a logger that the library adds no file to."""
    logger = logging.getLogger(NAMESPACE)
    logger.setLevel(logging.CRITICAL + 1)
    path = f"/var/log/sagemaker_checkpointing/{NAMESPACE}_checkpointing.log"
    logger.addHandler(logging.FileHandler(path, delay=True))
    return SageMakerCheckpointConfig(namespace=NAMESPACE, world_size=plan.num_ranks, logger=logger)


def run_rank(plan: Plan, rank: int, ranks: Ranks) -> None:
    """Save and restore, lap by lap."""
    for name in ("no_proxy", "NO_PROXY", "HTTP_PROXY"):
        os.environ.pop(name, None)
    # No setting of the library leads to another address than AWS's.
    os.environ["http_proxy"] = plan.options["url"]
    config = make_config(plan)
    state = make_state(plan, rank)
    room = make_room(plan, rank)

    for step in range(1, STEPS_RETAINED + 1):
        writer = SageMakerTieredStorageWriter(config, step=step)
        dcp.async_save(state, storage_writer=writer).result()

    def lap(step: int, figures: Figures) -> None:
        figures.span("clone", ranks.run(lambda: copy_into(room, state)))
        change(state, step)
        ranks.barrier()
        began_s = time.monotonic()
        writer = SageMakerTieredStorageWriter(config, step=step)
        saving = dcp.async_save(state, storage_writer=writer)
        blocked_s = time.monotonic() - began_s
        # Its thread uses the same process group: nothing else may until it has ended.
        saving.result()
        saved = Timed(began_s, time.monotonic())
        figures.slowest("blocked", blocked_s)
        figures.span("own RAM", saved)
        del saving, writer
        clear(room)
        reader = SageMakerTieredStorageReader(config, step=step)
        timed = ranks.run(lambda: dcp.load(room, storage_reader=reader))
        figures.span("restore, living", timed)
        check_equal(state, room)

    run_laps(plan, rank, lap, ranks, first_step=STEPS_RETAINED + 1)


if __name__ == "__main__":
    torch.set_num_threads(1)
    plan = read_plan(sys.argv[1])
    run_ranks(plan, "ranks", run_rank)
