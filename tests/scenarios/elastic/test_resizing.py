"""A run that HyperPod's operator resizes: all workers save, end, and start at another size."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from launcher.job import Job, read_job
from launcher.report.record import build_record
from recipes_training.coordinator import OnlyGeneration
from recipes_training.errors import GroupError
from recipes_training.once import leave
from recipes_training.stop import EXIT_STATUS, StopSignal
from tests.ports import free_ports
from tests.recipes_training.jobs import make_job, write_job
from tests.recipes_training.workers import ROOT, Outcome, Workers, rank_variables
from tests.scenarios.tiered.runs import Nodes, loads, start_nodes, tiered
from tests.waiting import wait_until
from tests.warm import Process, start

NUM_STEPS = 16
ELASTIC = {
    "nodes_min": 1, "nodes_max": 2, "nodes_step": None, "nodes_allowed": None,
    "may_lose_steps": False, "hold_s": 1.0, "scale_up_snooze_s": 2.0, "scaling_timeout_s": 3,
    "graceful_shutdown_timeout_s": 5, "faulty_scale_down_timeout_s": None,
}  # fmt: skip


def resized_job(disk: Path, *, num_nodes: int = 2, num_devices: int = 1) -> Job:
    """Return an elastic job without recovery whose store gets its last state alone."""
    unset = dict.fromkeys(("every_s", "keep", "endpoint", "region", "part_size_mib", "attempts"))
    store = {**unset, "url": f"folder:{disk}", "every_n_steps": 1000, "waiting_max": 1,
             "deadline_s": 60.0, "path_style": False, "required": True}  # fmt: skip
    return make_job(
        trainer={
            "num_nodes": num_nodes,
            "num_devices": num_devices,
            "max_steps": NUM_STEPS,
            "order_of_sums": "fixed",
        },
        resilience={"elastic": ELASTIC, "tiered": tiered(every_n_steps=1000, store=store)},
    )


class Operator:
    """Stands in for HyperPod's operator with an agent on each node: starts all, asks all to leave.

    A node's daemon knows no other, and its memory goes between two starts.
    """

    def __init__(self, folder: Path, job: Job, nodes: Sequence[Nodes]) -> None:
        self.outcome = Outcome(folder, [])
        self._job_path = write_job(folder, job)
        self._nodes = nodes
        self._workers: list[Process] = []
        self._step = -1

    def start(self, size: int, *, step: int, **variables: str) -> None:
        """Start so many workers, the first of which stands still after the step."""
        for nodes in self._nodes:
            nodes.lose_memory()
        folder, port = self.outcome.folder, free_ports(1)[0]
        self._step = step
        for rank in range(size):
            (daemon,) = self._nodes[rank].daemons.values()
            place = {**rank_variables(rank, size, port), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
            told = {"MEMORYD_DIR": str(daemon.folder), "TEST_STEP": str(step), **variables}
            words = [f"--job={self._job_path}", f"--run-dir={folder}", f"--node-name=n{rank}"]
            with (folder / f"worker-{rank}.log").open("ab") as log:
                worker = start(
                    ["tests.scenarios.tiered.programs", *words],
                    folder=ROOT,
                    environment={**os.environ, "GLOO_SOCKET_IFNAME": "lo", **place, **told},
                    output=log,
                )
            self._workers.append(worker)

    def ask_to_leave(self, *ranks: int) -> None:
        """Send SIGUSR1 to some workers in the middle of a step, to the others once it is saved."""
        folder, step = self.outcome.folder, self._step
        wait_until((folder / f"held-{step}").exists)
        num_saved = len(self.outcome.named("checkpoint_saved"))
        for rank in ranks:
            self._workers[rank].send_signal(signal.SIGUSR1)
        (folder / f"go-{step}").touch()
        wait_until(lambda: len(self.outcome.named("checkpoint_saved")) > num_saved)
        for rank in {*range(len(self._workers))} - {*ranks}:
            self._workers[rank].send_signal(signal.SIGUSR1)

    def wait(self) -> list[int]:
        """Return the statuses of all workers."""
        ended, self._workers = self._workers, []
        return [each.wait(timeout=100) for each in ended]

    def close(self) -> None:
        for each in self._workers:
            each.kill()
            each.wait()


@contextmanager
def operate(folder: Path) -> Iterator[Operator]:
    disk = folder / "disk"
    options = ["--store", f"folder:{disk}", "--store-every-n-steps", "1000"]
    with ExitStack() as stack:
        nodes = [
            stack.enter_context(start_nodes(folder / name, [name], options=options))
            for name in ("n0", "n1")
        ]
        operator = Operator(folder / "run", resized_job(disk), nodes)
        stack.callback(operator.close)
        yield operator


def run_calmly(workers: Workers, folder: Path) -> Outcome:
    """Return the run that never changed, of one node with two workers and no checkpoints."""
    job = resized_job(folder, num_nodes=1, num_devices=2)
    content = job.model_dump(mode="json", by_alias=True)
    content["resilience"] = dict.fromkeys(content["resilience"])
    return workers.run(Job.model_validate(content), folder / "calm")


def phases(run: Outcome) -> list[str]:
    """Return what the report says of each rank at the end of the run's events."""
    workers = build_record(read_job(run.folder / "job.json"), run.events).state.workers
    return [each.phase for each in workers.values()]


def test_a_run_of_2_1_and_2_nodes_ends_with_the_bits_of_one_that_never_changed(
    tmp_path: Path, workers: Workers
) -> None:
    calm = run_calmly(workers, tmp_path)

    with operate(tmp_path) as operator:
        run = operator.outcome
        operator.start(2, step=3)
        operator.ask_to_leave(1)
        assert operator.wait() == [0, 0]
        assert phases(run) == ["stopped", "stopped"]
        operator.start(1, step=8)
        operator.ask_to_leave(0)
        assert operator.wait() == [0]
        assert "finished" not in phases(run)
        operator.start(2, step=NUM_STEPS)
        assert operator.wait() == [0, 0]

    assert phases(run) == ["finished", "finished"]
    left = [each.step for each in run.named("worker_stopped")]
    assert None not in left
    assert left[0] == left[1]
    first, second = left[0] or 0, left[2] or 0
    # A start tells of the step that it goes on from.
    told = [*range(first + 1), *range(first, second + 1), *range(second, NUM_STEPS)]
    assert [each["step"] for each in run.steps] == told
    assert run.losses == [calm.losses[step] for step in told]
    assert run.weights() == calm.weights()
    begun = [(0, first + 1), (0, second + 1), (1, second + 1)]
    assert loads(run) == [(rank, step, "folder") for rank, step in begun]


@pytest.mark.slow
def test_a_worker_killed_in_the_save_ends_the_others_with_1_and_the_run_goes_on(
    tmp_path: Path, workers: Workers
) -> None:
    calm = run_calmly(workers, tmp_path)

    with operate(tmp_path) as operator:
        run = operator.outcome
        operator.start(2, step=3, TEST_RANK="1", TEST_SIGNAL=str(int(signal.SIGKILL)))
        operator.ask_to_leave(0, 1)
        assert operator.wait() == [1, -signal.SIGKILL]
        operator.start(1, step=NUM_STEPS)
        assert operator.wait() == [0]

    assert run.losses[-1] == calm.losses[-1]
    assert run.weights() == calm.weights()


def _leave(
    workers: Workers, folder: Path, *, num_devices: int = 2, event: str, **variables: Any
) -> Outcome:
    """Run one node whose workers are asked to leave at an event."""
    disk = folder / "disk"
    options = ["--store", f"folder:{disk}", "--store-every-n-steps", "1000"]
    with start_nodes(folder / "nodes", options=options) as nodes:
        told = {**nodes.variables("n0"), "TEST_EVENT": event, **variables}
        if told.get("TEST_DAEMON"):
            told["TEST_DAEMON"] = str(nodes["n0"].pid)
        return workers.run(
            resized_job(disk, num_nodes=1, num_devices=num_devices),
            folder / "run",
            target="tests.scenarios.tiered.programs:leave_at_event",
            variables=told,
            is_success_expected=False,
        )


def test_a_worker_that_is_asked_before_its_first_step_leaves_after_it(
    tmp_path: Path, workers: Workers
) -> None:
    outcome = _leave(workers, tmp_path, event="process_group_ready")

    assert outcome.statuses == [0, 0]
    assert {each.step for each in outcome.named("worker_stopped")} == {0}


def test_a_worker_that_is_asked_before_the_others_are_met_ends_at_once(
    tmp_path: Path, workers: Workers
) -> None:
    outcome = _leave(workers, tmp_path, num_devices=1, event="worker_started")

    assert outcome.statuses == [-signal.SIGUSR1]


@pytest.mark.parametrize(
    ("what", "status"),
    [
        pytest.param(signal.SIGUSR1, 0, id="again"),
        pytest.param(signal.SIGTERM, EXIT_STATUS, id="stop"),
    ],
)
def test_a_signal_in_the_save_does_not_end_it(
    tmp_path: Path, workers: Workers, what: signal.Signals, status: int
) -> None:
    variables = {"TEST_RANK": "0", "TEST_SIGNAL": str(int(what))}

    outcome = _leave(workers, tmp_path, num_devices=1, event="process_group_ready", **variables)

    assert outcome.statuses == [status]
    assert [each.step for each in outcome.named("checkpoint_saved")] == [1]
    assert [each.name for each in (tmp_path / "disk").glob("*/steps/*")] != []


def test_a_state_that_the_store_has_not_got_is_no_success(tmp_path: Path, workers: Workers) -> None:
    variables = {"TEST_RANK": "0", "TEST_SIGNAL": str(int(signal.SIGKILL)), "TEST_DAEMON": "yes"}

    outcome = _leave(workers, tmp_path, num_devices=1, event="process_group_ready", **variables)

    assert outcome.statuses == [1]
    assert outcome.log().splitlines()[-1] == (
        "recipes_training: the state of step 1 is not in the store: this node's daemon has not got "
        "it; the next start goes on from the newest one that is"
    )


def test_a_worker_that_nobody_has_asked_does_not_say_that_it_has_finished() -> None:
    unasked = OnlyGeneration(number=0, rank=0, layout=None, store=None)  # type: ignore[arg-type]

    with pytest.raises(GroupError, match=r"another worker was asked to leave .* this one was not"):
        leave(unasked, StopSignal(), timedelta(0))
