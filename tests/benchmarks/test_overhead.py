from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from benchmarks import overhead, overhead_memory
from benchmarks import overhead_figures as figures
from benchmarks.events import Event
from benchmarks.overhead_figures import Sample
from tests.ports import free_ports
from tests.recipes_training.jobs import make_job, write_job
from tests.recipes_training.workers import ROOT, rank_variables

MIB = 1 << 20


def commit(at_s, step, pid):
    return Event(at_s, "committed", pid % 100, pid, {"step": step})


def fault(at_s, step, kind, pid):
    return Event(at_s, "faulted", pid % 100, pid, {"step": step, "kind": kind})


def test_pairs_are_judged_by_their_median_and_an_interval():
    """The interval of few pairs spans all of them."""
    ratio = figures.judge_pairs([1 + index / 100 for index in range(101)], [1.0] * 101)
    of_few = figures.judge_pairs([2.0, 4.0], [1.0, 1.0])

    assert (ratio.low, ratio.median, ratio.high) == (1.4, 1.5, 1.6)
    assert ratio.of_sums == pytest.approx(1.5)
    assert (of_few.low, of_few.median, of_few.high) == (2.0, 3.0, 4.0)


def test_step_lasts_from_the_first_begin_to_the_last_end():
    ranks = [[[0.0, 1.0, 4.0]], [[0.5, 2.0, 5.0]]]

    assert figures.join_spans(ranks) == [5.0]


def test_parts_lie_between_stamps():
    ranks = [[[0.0, 1.0, 4.0], [10.0, 11.0, 14.0]], [[0.0, 1.0, 2.0], [10.0, 11.0, 12.0]]]

    assert figures.median_parts(ranks, ("first", "second")) == {"first": 1.0, "second": 2.0}
    assert figures.last_to_come(ranks, ("first", "second"), "second") == 1.0


def test_overlap_shows_when_buckets_leave():
    rows = [{"backward_s": 0.1, "sent_s": [0.02, 0.1], "num_done": 1}] * 3

    overlap = figures.judge_overlap(rows)

    assert overlap.num_buckets == 2
    assert overlap.sent_ms == pytest.approx((20.0, 100.0))
    assert overlap.num_done == 1


def test_memory_is_told_by_kind_of_process_at_its_time():
    """A spare that has become a rank counts as one from then on."""
    agent = {1: 5 * MIB}
    samples = [Sample(at_s=at_s, agent=agent, workers={100: 30, 101: 20}) for at_s in (1.0, 3.0)]

    early, late = (figures.name_ranks(each, {100: 0.5, 101: 2.0}) for each in samples)

    assert (early.ranks, early.spares) == (30, 20)
    assert (late.ranks, late.spares) == (50, 0)
    assert early.total == late.total == 5 * MIB + 50


def test_memory_is_judged_in_calm_and_in_each_recovery():
    events = [
        *(commit(step, step, pid) for step in range(5) for pid in (100, 101)),
        fault(4.5, 5, "kill", 101),
        *(commit(6.0 + step, step, pid) for step in (5, 6) for pid in (100, 102)),
    ]
    sizes = {3.5: 100, 5.0: 120, 13.0: 500}
    samples = [
        Sample(at_s=at_s, agent={1: 10}, workers={100: size, 102: 7})
        for at_s, size in sizes.items()
    ]

    on = overhead_memory.judge("on", samples, events, 2)

    assert (on.peak, on.peak_without_spares, on.agent, on.spares) == (117, 110, 10, 7)
    assert on.recoveries == {"kill": 137}


def test_memory_without_a_recovery_has_no_peak_of_one():
    events = [commit(step, step, 100) for step in range(6)] + [fault(7.0, 6, "kill", 100)]

    assert figures.recovery_windows(events, 1) == []
    with pytest.raises(ValueError, match="no rank has committed step 9"):
        figures.calm_window(events, 9)


@pytest.mark.parametrize(
    ("change", "is_clean"),
    [
        pytest.param({}, True, id="nothing"),
        pytest.param({"modules": ["resilience.comm.gate"]}, False, id="module"),
        pytest.param({"threads": ["MainThread", "writer"]}, False, id="thread"),
        pytest.param({"collectives": {"c10d.allreduce_.default": 13}}, False, id="collective"),
    ],
)
def test_what_a_worker_without_recovery_met_is_judged(change, is_clean):
    def met(num_reductions):
        return {
            "modules": ["resilience", "resilience.events"],
            "threads": ["MainThread"],
            "collectives": {"c10d.allreduce_.default": num_reductions, "c10d.barrier.default": 1},
        }

    result = overhead.judge_off([met(4)], [met(10) | change], num_steps=3, num_buckets=1)

    assert result["is_clean"] is is_clean


WORKERS = """
import os, runpy, sys
import torch, torch.distributed
from transformers import LlamaForCausalLM
for folder in sys.argv[1:]:
    child = os.fork()
    if not child:
        options = [f"--job={folder}/job.json", f"--run-dir={folder}", "--node-name=node-0"]
        sys.argv = ["benchmarks.overhead_off", *options]
        runpy.run_module("benchmarks.overhead_off", run_name="__main__")
    assert os.waitpid(child, 0)[1] == 0
"""


def test_worker_without_recovery_meets_nothing_of_it(tmp_path):
    """No thread, no module of recovery and no collective more than data parallel training needs.

    Both workers are forked from a process that has imported torch, and none of our modules.
    """
    folders = [tmp_path / str(number) for number in overhead.OFF_STEPS]
    for folder, number in zip(folders, overhead.OFF_STEPS, strict=True):
        write_job(folder, make_job(trainer={"max_steps": number, "save_checkpoint": False}))
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        **rank_variables(0, 1, free_ports(1)[0]),
    }

    command = [sys.executable, "-c", WORKERS, *map(str, folders)]
    subprocess.run(command, env=environment, check=True, timeout=100, cwd=ROOT)

    met = [json.loads((folder / "off-0.json").read_text()) for folder in folders]
    num_steps = overhead.OFF_STEPS[1] - overhead.OFF_STEPS[0]
    result = overhead.judge_off([met[0]], [met[1]], num_steps=num_steps, num_buckets=1)
    assert result["foreign_modules"] == []
    assert result["threads"] == ["MainThread"]
    assert result["collectives_per_step"] == [{"c10d.allreduce_.default": 2}]
    assert result["is_clean"]
