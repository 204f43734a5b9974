"""All that keeps a run going, at once: fifty events, then every node, then all memory is lost."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from launcher.clusters.local_nodes import end_strays
from launcher.clusters.running.cluster import read_run_folder
from launcher.clusters.running.lock import Holder, read_lock
from launcher.clusters.running.memory import remove_memory
from resilience.events import Event, read_events
from tests.launcher.command import last_of_each, launch
from tests.processes import processes_with

NUM_EVENTS = 50
NUM_STEPS = 3000
LIMIT_S = 900.0
WORDS = (
    "recipe=llama/llama3_tiny_everything", "action=run", "run.name=run",
    f"trainer.max_steps={NUM_STEPS}", "trainer.log_every_n_steps=1", "trainer.global_batch_size=48",
    "trainer.micro_batch_size=1", "data.max_bytes=300000", "data.seq_length=48",
    "model.num_layers=1", "model.hidden_size=32", "model.ffn_hidden_size=64", "model.head_dim=8",
    "resilience.elastic.hold_s=0", "resilience.elastic.scale_up_snooze_s=0",
    "resilience.checkpointless.process_restarts_max=10000",
    "resilience.checkpointless.restarts_without_progress_max=20", "oversubscribe=true",
)  # fmt: skip
CALM = (
    "resilience.elastic=null",
    "resilience.faults=null",
    "resilience.mmap=null",
    "resilience.tiered=null",
    "resilience.checkpointless=null",
    "trainer.num_nodes=1",
)
FAULTS = (
    "resilience.faults.injected=[]",
    (
        "resilience.faults.random={seed: 25, mean_steps_between: 70, kinds: [exception, sigkill], "
        "places: [forward, backward, reduction, before_update, within_update]}"
    ),
)
KINDS = ("kill worker", "kill node", "kill daemon", "ask for more", "ask for fewer")


@dataclass
class Everything:
    """The run, and what has befallen it."""

    folder: Path
    chance: random.Random
    told: list[str] = field(default_factory=list)

    @property
    def run(self) -> Path:
        return self.folder / "runs" / "run"

    def launch(self, *words: str) -> str:
        ended = launch(*words, folder=self.folder)
        assert ended.status == 0, f"{words}: {ended.err}{ended.out}\n{self.told}"
        return ended.out

    def events(self) -> list[Event]:
        return read_events(self.run / "events.jsonl")

    def wait_until(self, is_so: Callable[[list[Event]], bool]) -> list[Event]:
        end_s = time.monotonic() + LIMIT_S / 5
        while time.monotonic() < end_s:
            events = self.events()
            if is_so(events):
                return events
            assert not [each for each in events if each.event == "gave_up"], self.told
            # Events are written by many processes to one file, which nothing waits for.
            time.sleep(0.1)
        raise AssertionError(f"the run stands still\n{self.told}")

    def go_on(self, num_steps: int = 3) -> list[Event]:
        """Wait until the run has taken some more steps."""
        before = last_step(self.events())
        return self.wait_until(lambda events: last_step(events) >= before + num_steps)

    def finish(self) -> list[Event]:
        """Wait for the end of the run, as long as it gets on; returns its events."""
        while (events := self.events())[-1].event != "run_finished":
            some = last_step(events) + 50
            self.wait_until(
                lambda events, some=some: (
                    last_step(events) >= some or events[-1].event == "run_finished"
                )
            )
        return events

    @property
    def holder(self) -> Holder:
        holder = read_lock(self.run)
        assert holder is not None
        return holder

    def daemons(self) -> list[int]:
        """Return the checkpoint daemons of the run's nodes."""
        mark = f"LAUNCHER_RUN_ID={self.holder.run_id}"
        return processes_with(mark, word="resilience.tiered.memoryd")

    def befall(self, kind: str) -> None:
        """Do something to the run."""
        events = self.go_on()
        opened = [each for each in events if each.event == "generation_opened"][-1]
        num_nodes = int(opened.fields["world_size"])
        if kind == "kill node" and num_nodes < 2:
            kind = "ask for more"
        self.told.append(f"step {last_step(events)}, {num_nodes} nodes: {kind}")
        if kind == "kill worker":
            with suppress(ProcessLookupError):
                os.kill(self.chance.choice(living_workers(events)), signal.SIGKILL)
        elif kind == "kill node":
            nodes = sorted({each.node for each in events if is_of(each, opened.generation)})
            end_strays(self.holder.run_id, self.chance.choice(nodes))
        elif kind == "kill daemon":
            # One that was killed just now is not there again yet.
            for pid in self.daemons()[:1]:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        else:
            size = min(4, num_nodes + 1) if kind == "ask for more" else max(1, num_nodes - 1)
            self.launch("scale", str(self.run), f"nodes={size}", "--wait")

    def kill_everything(self) -> None:
        """Kill all of the run's processes, its launcher first."""
        os.kill(self.holder.pid, signal.SIGKILL)
        end_strays(self.holder.run_id)
        self.told.append(f"step {last_step(self.events())}: everything is killed")


def last_step(events: list[Event]) -> int:
    return max((each.step or 0 for each in events if each.event == "step"), default=0)


def is_of(event: Event, generation: int) -> bool:
    return event.generation == generation and event.event == "process_group_ready"


def living_workers(events: list[Event]) -> list[int]:
    """Return the processes of workers that are there."""
    pids = {each.fields["pid"] for each in events if each.event == "worker_started"}
    return [pid for pid in sorted(pids) if Path(f"/proc/{pid}").exists()]


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Everything]:
    world = Everything(tmp_path, random.Random(25))
    yield world
    if holder := read_lock(world.run):
        with suppress(ProcessLookupError):
            os.kill(holder.pid, signal.SIGKILL)
        end_strays(holder.run_id)
    launch("clean", str(world.run), folder=tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_run_that_everything_befalls_has_the_bits_of_a_calm_one(run: Everything) -> None:
    """Of one worker alone, that nothing befalls."""
    run.launch(*last_of_each(*WORDS, *CALM, "run.name=calm"), "run.detach=true")
    run.launch(*WORDS, *FAULTS, "run.detach=true")
    kinds = [*KINDS] * (NUM_EVENTS // len(KINDS))
    run.chance.shuffle(kinds)

    for kind in kinds:
        run.befall(kind)
    run.go_on()
    run.kill_everything()
    run.launch("continue", "run", "run.detach=true")
    run.go_on(10)
    run.kill_everything()
    remove_memory(read_run_folder(run.run))
    run.launch("continue", "run", "run.detach=true", "trainer.num_nodes=2")
    events = run.finish()

    assert events[-1].fields["exit_status"] == 0
    calm = run.folder / "runs" / "calm"
    run.launch("attach", "calm")
    assert losses_of(run.run) == losses_of(calm)
    assert weights_of(run.run) == weights_of(calm)
    of_memory, of_folder = sources_of_starts(events)
    assert {each.partition(":")[0] for each in of_memory} <= {"ram", "peer"}
    assert "folder" in of_folder


def sources_of_starts(events: list[Event]) -> list[set[str]]:
    """Return where each start that went on has taken its state from."""
    found: list[set[str]] = []
    for each in events:
        if each.event == "run_continued":
            found.append(set())
            generation = None
        elif each.event == "recovery_fallback" and found and generation in (None, each.generation):
            generation = each.generation
            found[-1].add(each.fields["source"])
    return found


def losses_of(run: Path) -> dict[int, str]:
    """Return the loss of each step, of which every report has the same bits."""
    found: dict[int, str] = {}
    for each in read_events(run / "events.jsonl"):
        if each.event == "step" and each.step is not None:
            loss = float(each.fields["loss"]).hex()
            assert found.setdefault(each.step, loss) == loss, each
    return found


def weights_of(run: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (run / "checkpoint").glob("*.safetensors")}
