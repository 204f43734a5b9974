"""The nodes of the launcher's local cluster, started by hand, that are killed and started again."""

from __future__ import annotations

import os
import signal
import subprocess
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from launcher.clusters.local_nodes import end_strays, node_environment
from resilience.events import Event, EventReader, read_events
from tests.launcher.command import launch
from tests.ports import free_ports
from tests.scenarios.membership.agents.real_world import pause
from tests.scenarios.recovery.runs import check_no_step_lost
from tests.scenarios.slurm import cluster
from tests.scenarios.slurm.test_run import losses

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]
NAMES = [f"node-{index}" for index in range(4)]
EPOCH_STEPS, SAVED_STEPS = 40, 40
BATCH, SEQ_LENGTH = 12, 16
RECIPE = (
    "recipe=llama/llama3_tiny_pretrain",
    "cluster=local",
    "resilience/checkpointless=default",
    "resources.shm_gib=1",
    f"trainer.global_batch_size={BATCH}",
    "trainer.micro_batch_size=1",
    "trainer.num_devices=1",
    "trainer.max_steps=100000",
    "trainer.optimizer.decay_steps=400",
    "trainer.log_every_n_steps=1",
    "resilience.tiered.ram.every_s=null",
    f"resilience.tiered.ram.every_n_steps={SAVED_STEPS}",
    "resilience.tiered.store.every_s=null",
    f"resilience.tiered.store.every_n_steps={SAVED_STEPS}",
    f"data.seq_length={SEQ_LENGTH}",
    f"data.max_bytes={SEQ_LENGTH * BATCH * EPOCH_STEPS}",
)
LIMIT_S = 180.0
WHOLE_RUN_S = 600.0
"""A run that nobody disturbs may take as many steps as a disturbed one has taken in its waits."""


@dataclass
class Nodes:
    """The scripts of a run, and what runs of them."""

    run_dir: Path
    run_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    running: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    seen: list[Event] = field(default_factory=list)

    def __post_init__(self) -> None:
        endpoint = f"127.0.0.1:{free_ports(1)[0]}"
        self.environment = node_environment(os.environ, endpoint, self.run_id)
        self.reader = EventReader(self.run_dir / "events.jsonl")
        (self.run_dir / "logs").mkdir(exist_ok=True)

    def start(self, *names: str) -> None:
        for name in names:
            with (self.run_dir / "logs" / f"{name}.log").open("ab") as log:
                self.running[name] = subprocess.Popen(
                    ["bash", str(self.run_dir / f"{name}.sh")],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env={**self.environment, "LAUNCHER_NODE": name},
                    start_new_session=True,
                )

    def kill(self, *names: str) -> None:
        """Kill all processes of nodes."""
        for name in names:
            end_strays(self.run_id, name)
            self.running.pop(name).wait(LIMIT_S)

    def stop(self) -> list[int]:
        """Have all workers end after the same step."""
        for each in self.running.values():
            each.send_signal(signal.SIGTERM)
        return [each.wait(LIMIT_S) for each in self.running.values()]

    def look(self) -> None:
        self.seen += self.reader.read_new()

    def wait_until(self, is_so: Callable[[], bool], what: str, limit_s: float = LIMIT_S) -> None:
        def has_come() -> bool:
            self.look()
            return is_so()

        try:
            cluster.wait_until(has_come, what, limit_s)
        except TimeoutError as error:
            raise AssertionError(f"{error}\n{self.log()}") from error

    def wait_for_return(self, name: str, number: int) -> None:
        """Return when a node has joined so often, and the run steps on."""
        self.wait_until(
            lambda: sum(each.fields["node"] == name for each in self.named("node_joined")) > number,
            f"{name} is back",
        )
        self.wait_for_steps(5)

    def wait_for_steps(self, number: int) -> None:
        """Return when so many further steps have ended."""
        self.look()
        begun = len(self.named("step"))
        self.wait_until(lambda: len(self.named("step")) >= begun + number, "the run steps on")

    def named(self, event: str) -> list[Event]:
        return [each for each in self.seen if each.event == event]

    def log(self) -> str:
        logs = sorted((self.run_dir / "logs").glob("*.log"))
        return "\n".join(f"{each.name}\n{each.read_text()[-3000:]}" for each in logs)


@contextmanager
def started(folder: Path, num_standby: int) -> Iterator[Nodes]:
    """Render a recipe, and start its nodes; nothing of them is left after the block."""
    done = launch(
        *RECIPE,
        f"trainer.num_nodes={len(NAMES) - num_standby}",
        f"resilience.checkpointless.standby_nodes={num_standby}",
        f"run.dir={folder}",
        folder=folder.parent,
    )
    assert done.status == 0, done.err
    nodes = Nodes(folder)
    try:
        nodes.start(*NAMES)
        nodes.wait_for_steps(5)
        yield nodes
    finally:
        for name in NAMES:
            end_strays(nodes.run_id, name)
        for each in nodes.running.values():
            each.wait(LIMIT_S)
        # A run that was stopped keeps its checkpoints for the next start.
        launch("clean", str(folder), folder=folder.parent)


def check_bits(folder: Path, num_standby: int, run_dir: Path) -> None:
    """Assert that the steps of a run are those of one that nobody disturbs."""
    found = losses(run_dir)
    with started(folder, num_standby) as nodes:
        nodes.wait_until(
            lambda: any((each.step or 0) > max(found) for each in nodes.named("step")),
            "as many steps",
            WHOLE_RUN_S,
        )
    known = losses(folder)
    assert {step: loss for step, loss in found.items() if known[step] != loss} == {}


def check_nothing_lost(folder: Path, num_standby: int) -> None:
    events = read_events(folder / "run" / "events.jsonl")
    assert [each for each in events if each.event == "recovery_fallback"] == []
    check_no_step_lost(events)
    check_bits(folder / "undisturbed", num_standby, folder / "run")


@pytest.mark.parametrize("num_standby", [0, 1])
@pytest.mark.parametrize("away_s", [0, 1, 20])
def test_each_node_is_killed_and_started_again(
    tmp_path: Path, num_standby: int, away_s: int
) -> None:
    with started(tmp_path / "run", num_standby) as nodes:
        for name in NAMES:
            number = sum(each.fields["node"] == name for each in nodes.named("node_joined"))
            nodes.kill(name)
            pause(away_s)
            nodes.start(name)
            nodes.wait_for_return(name, number)
        statuses = nodes.stop()

    assert statuses == [143] * len(NAMES), nodes.log()
    check_nothing_lost(tmp_path, num_standby)


@pytest.mark.parametrize("num_standby", [0, 1])
def test_all_but_one_are_killed_and_started_again(tmp_path: Path, num_standby: int) -> None:
    with started(tmp_path / "run", num_standby) as nodes:
        (first,) = {each.node for each in nodes.named("worker_started") if each.rank == 0}
        others = [name for name in NAMES if name != first]
        nodes.kill(*others)
        nodes.start(*others)
        nodes.wait_for_steps(20)
        statuses = nodes.stop()

    assert statuses == [143] * len(NAMES), nodes.log()
    check_nothing_lost(tmp_path, num_standby)


@pytest.mark.parametrize("num_standby", [0, 1])
def test_all_are_killed_and_go_on_from_the_newest_checkpoint(
    tmp_path: Path, num_standby: int
) -> None:
    with started(tmp_path / "run", num_standby) as nodes:
        nodes.wait_until(
            lambda: any((each.step or 0) > 3 * SAVED_STEPS for each in nodes.named("step")),
            "three checkpoints",
        )
        nodes.kill(*NAMES)
        nodes.start(*NAMES)
        nodes.wait_for_steps(SAVED_STEPS)
        statuses = nodes.stop()

    assert statuses == [143] * len(NAMES), nodes.log()
    events = read_events(tmp_path / "run" / "events.jsonl")
    opened = [each.fields["number"] for each in events if each.event == "generation_opened"]
    assert opened[-1] >= 100
    fallbacks = [each for each in events if each.event == "recovery_fallback"]
    begun = [each for each in fallbacks if each.generation >= 100]
    assert {each.fields["source"] for each in begun}.isdisjoint({"start"})
    assert {each.step for each in begun} <= {2 * SAVED_STEPS, 3 * SAVED_STEPS}
    check_bits(tmp_path / "undisturbed", num_standby, tmp_path / "run")
