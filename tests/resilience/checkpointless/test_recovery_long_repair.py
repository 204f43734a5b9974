"""A repair may take longer than a rank may be without progress, and nobody is blamed for it."""

from __future__ import annotations

import threading

import torch
import torch.distributed as dist

from resilience.checkpointless.recovery import Recovery
from resilience.comm.page import Activity
from resilience.state.layout import make_layout
from resilience.state.report import Phase, Report
from tests.resilience.checkpointless.recovery_channels import open_gloo
from tests.resilience.rank_processes import CONTEXT, TIMEOUT_S, run_ranks
from tests.resilience.state.nodes import PlainView

STEP = 5
SOURCE, BYSTANDER, TARGET = range(3)
NUM_BYTES = 40 << 20


class Members:
    """A generation of three replicas on three nodes, the last of which holds nothing."""

    number = 1
    layout = make_layout(nodes=["n0", "n1", "n2"], num_local_ranks=1)
    lock = threading.Lock()
    before = None
    is_passing = False

    def __init__(self, rank, group, is_repaired):
        self.rank = rank
        self.group = group
        self.marks = []
        self._is_repaired = is_repaired
        self.reports = [
            Report(rank=each, node=f"n{each}", generation=0, phase=Phase.FRESH)
            if each == TARGET
            else Report(
                rank=each,
                node=f"n{each}",
                generation=0,
                phase=Phase.COMPUTING,
                step=STEP,
                member_generation=0,
            )
            for each in range(3)
        ]

    def check(self):
        """The generation goes on."""

    def mark(self, activity, step, micro_batch=0):
        self.marks.append((activity, step))
        if self.rank == BYSTANDER and activity is Activity.WAITING:
            # What it waits for has not even begun: the target waits for this.
            self._is_repaired[BYSTANDER].set()
        if self.rank == TARGET and activity is Activity.WAITING:
            self._is_repaired[TARGET].set()


def repair(rank, world_size, folder, signals):
    store = dist.FileStore(f"{folder}/store", world_size)
    members = Members(rank, open_gloo(store, rank, world_size), signals)
    recovery = Recovery(apply=lambda step: None)
    recovery.bind(PlainView([torch.full((NUM_BYTES,), rank, dtype=torch.uint8)]))
    if rank == TARGET:
        assert signals[BYSTANDER].wait(TIMEOUT_S)
    recovery.resume(members, start=lambda fallback: 0)
    return members.marks, signals[TARGET].is_set()


def test_ranks_show_progress_while_they_repair_and_wait_while_others_do(tmp_path):
    signals = [CONTEXT.Event() for _ in range(3)]

    results = run_ranks(repair, 3, str(tmp_path), signals)

    marks = [each for each, _ in results]
    assert marks[BYSTANDER] == [(Activity.RECOVERY, 0), (Activity.WAITING, STEP)]
    for rank, before in ((SOURCE, []), (TARGET, [Activity.RECOVERY, Activity.WAITING])):
        activities = [activity for activity, _ in marks[rank]]
        assert activities[: len(before)] == before, "its source may have others to serve first"
        chunks = activities[len(before) : -1]
        assert chunks == [Activity.RECOVERY] * len(chunks)
        assert len(chunks) > 3
        assert activities[-1] is Activity.WAITING
    assert [is_repaired for _, is_repaired in results] == [True] * 3
