"""A job on a real Slurm that loses a worker, an agent and a node, and ends with the same bits."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from resilience.events import Event, EventReader, read_events
from tests.launcher.command import last_of_each
from tests.scenarios.slurm import cluster
from tests.scenarios.slurm.jobs import ENDED, Slurm, agents, processes, submit_recipe, train_here
from tests.scenarios.slurm.test_run import check_same_bits, losses
from tests.scenarios.slurm.test_tiered import named

pytest.importorskip("torch", reason="a worker needs torch")
MAX_STEPS = 120
BATCH, SEQ_LENGTH, EPOCH_STEPS = 48, 16, 40
RUN_S = 900.0
RECIPE = (
    "recipe=llama/llama3_tiny_pretrain",
    "resilience/checkpointless=default",
    "resources.shm_gib=1",
    "resilience.checkpointless.hang_deadline_s=10",
    "resilience.checkpointless.join_deadline_s=60",
    f"trainer.max_steps={MAX_STEPS}",
    "trainer.log_every_n_steps=1",
)


class Watch:
    """Waits for events of a run."""

    def __init__(self, slurm: Slurm, run_dir: Path) -> None:
        self._slurm = slurm
        self._reader = EventReader(run_dir / "events.jsonl")
        self.seen: list[Event] = []

    def wait_for(self, is_it: Callable[[Event], bool], what: str) -> Event:
        """Return the first new event of which it is so."""
        found: list[Event] = []

        def has_come() -> bool:
            new = self._reader.read_new()
            self.seen += new
            found.extend(each for each in new if is_it(each))
            return bool(found)

        self._slurm.wait_until(has_come, what)
        return found[0]

    def wait_for_progress(self) -> None:
        """Return when a step has ended after what was seen up to now."""
        newest = max((each.step or 0 for each in self.seen if each.event == "step"), default=0)
        self.wait_for(lambda e: e.event == "step" and (e.step or 0) > newest + 3, "a later step")

    def members(self) -> dict[int | None, Event]:
        """Return where each rank is, by its last start."""
        return {each.rank: each for each in self.seen if each.event == "worker_started"}


@pytest.mark.slow
def test_job_ends_as_undisturbed_although_it_loses_a_worker_an_agent_and_a_node(
    slurm: Slurm, tmp_path: Path
):
    train_here(tmp_path / "here", *RECIPE)
    run_dir = tmp_path / "there"
    job_id = submit_recipe(run_dir, *RECIPE, "resilience.checkpointless.standby_nodes=2")
    watch = Watch(slurm, run_dir)

    watch.wait_for_progress()
    os.kill(watch.members()[1].fields["pid"], signal.SIGKILL)
    watch.wait_for(lambda event: event.event == "worker_replaced", "another worker")
    watch.wait_for_progress()
    (agent,) = agents(job_id, watch.members()[0].node)
    os.kill(agent, signal.SIGKILL)
    watch.wait_for(lambda event: event.event == "generation_opened", "a node less")
    watch.wait_for_progress()
    for pid in processes(job_id, watch.members()[3].node):
        os.kill(pid, signal.SIGKILL)
    watch.wait_for(lambda event: event.event == "generation_opened", "another node less")
    state = slurm.wait_for_end(job_id)

    logs = "".join(path.read_text() for path in run_dir.rglob("*.log"))
    assert state == "COMPLETED", logs
    assert len(losses(tmp_path / "here")) == MAX_STEPS
    check_same_bits(run_dir, tmp_path / "here")
    events = read_events(run_dir / "events.jsonl")
    assert "recovery_fallback" not in {each.event for each in events}
    members = {each.node for each in events if each.event == "worker_started"}
    assert len(members) == 4, "both nodes that stood by have taken a lost one's place"


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_job_that_is_queued_again_goes_on_from_its_state(slurm: Slurm, tmp_path: Path) -> None:
    """All of its agents are killed, and started again as another attempt."""
    recipe = last_of_each(
        *RECIPE, "resilience.checkpointless.hang_deadline_s=30", "trainer.max_steps=400",
        "trainer.num_nodes=3", "resilience.checkpointless.standby_nodes=1",
        "trainer.num_devices=1", f"trainer.global_batch_size={BATCH}",
        f"data.max_bytes={SEQ_LENGTH * BATCH * EPOCH_STEPS}", f"data.seq_length={SEQ_LENGTH}",
    )  # fmt: skip
    run_dir = tmp_path / "there"
    job_id = submit_recipe(run_dir, *recipe)

    def newest_step() -> int:
        return max((each.step or 0 for each in named(run_dir, "step")), default=0)

    cluster.wait_until(lambda: newest_step() > 2 * EPOCH_STEPS, "two epochs", RUN_S)
    slurm.ask("scontrol", "requeue", job_id)
    cluster.wait_until(lambda: slurm.field(job_id, "JobState") in ENDED, "the job has ended", RUN_S)

    train_here(tmp_path / "here", *recipe)
    check_same_bits(run_dir, tmp_path / "here")
    assert slurm.field(job_id, "JobState") == "COMPLETED"
    opened = [each.fields["number"] for each in named(run_dir, "generation_opened")]
    # Slurm asks them to end before it kills them, so they know which number was the last one.
    assert len(opened) > 1
    assert opened == sorted(set(opened)), "a number was given twice"
    later = [each for each in named(run_dir, "recovery_fallback") if each.generation == opened[-1]]
    assert {each.fields["source"] for each in later} == {"ram"}
    # Being asked to end, they kept the step that all had come to.
    stopped = {each.step for each in named(run_dir, "worker_stopped") if each.step}
    assert {each.step for each in later} == {step + 1 for step in stopped}
    assert min(stopped) >= 2 * EPOCH_STEPS
