"""A run that is stopped, killed, cleaned, branched from and gone on with has a calm one's bits."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from resilience.events import read_events
from tests.launcher.command import TIMEOUT_S, last_of_each
from tests.launcher.local_world import end_all
from tests.scenarios.local_runs.histories import History, Trace, history, newest_stored

NUM_STEPS = 24
LIMIT_S = 3 * TIMEOUT_S
CHANGED = "trainer.optimizer.lr=0.002"
WORDS = (
    "recipe=llama/llama3_tiny_pretrain", "action=run", "run.name=run",
    f"trainer.max_steps={NUM_STEPS}", "trainer.num_nodes=1", "trainer.num_devices=2",
    "trainer.optimizer.warmup_steps=4", f"trainer.optimizer.decay_steps={NUM_STEPS}",
    "trainer.log_every_n_steps=1", "trainer.global_batch_size=8", "trainer.micro_batch_size=2",
    "data.max_bytes=300000", "resilience/tiered=folder", "resilience.tiered.ram.every_n_steps=2",
    "resilience.tiered.store.every_n_steps=4", "resilience.tiered.store.required=false",
)  # fmt: skip


@dataclass
class LocalTrace(Trace):
    """A trace of this machine."""

    is_changed: bool = False
    """Whether a start was told another learning rate, which stays."""

    def start(self, *more: str) -> subprocess.Popen[bytes]:
        store = f"resilience.tiered.store.url=folder:{self.folder / 'disk' / 'store'}"
        words = ("continue", self.names[-1]) if self.run.exists() else (*WORDS, store)
        if len(self.names) > 1 and not self.run.exists():
            words = ("branch", self.names[-2], f"run.name={self.names[-1]}")
        with (self.folder / "console").open("ab") as console:
            return subprocess.Popen(
                [sys.executable, "-m", "launcher", *words, *more],
                cwd=self.folder, stdout=console, stderr=console,
            )  # fmt: skip

    def wait_for(self, step: int, process: subprocess.Popen[bytes]) -> None:
        """Wait until a step was taken by the newest start, or the run has ended."""
        known = len(read_events(self.run / "events.jsonl")) if self.run.exists() else 0
        end_s = time.monotonic() + LIMIT_S
        while process.poll() is None:
            assert time.monotonic() < end_s, self.describe()
            if self.run.exists() and (self.run / "events.jsonl").exists():
                new = read_events(self.run / "events.jsonl")[known:]
                if any(each.event == "step" and (each.step or 0) >= step for each in new):
                    return
            time.sleep(0.05)

    def describe(self) -> str:
        return f"{self.told}\n{(self.folder / 'console').read_text()}"


def play(trace: LocalTrace, seed: int) -> None:
    """Start the run again and again, until it has taken all its steps."""
    chance = random.Random(seed)
    disk = trace.folder / "disk"
    disk.mkdir()
    for number in range(3):
        process = start(trace, chance)
        trace.wait_for(chance.randrange(NUM_STEPS), process)
        if number and chance.random() < 0.3:
            trace.told.append("the store is gone for a while")
            disk.rename(trace.folder / "away")
            time.sleep(chance.uniform(0.0, 2.0))
            (trace.folder / "away").rename(disk)
        how = chance.choice([signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
        trace.told.append(f"{how.name} after step {max(trace.steps(), default=-1)}")
        process.send_signal(how)
        process.wait(LIMIT_S)
        if how == signal.SIGKILL:
            end_all(trace.folder)
        # Of what its store has nothing of yet, memory has the only state.
        if chance.random() < 0.3 and newest_stored(trace.run):
            trace.told.append("clean")
            command = [sys.executable, "-m", "launcher", "clean", trace.names[-1]]
            subprocess.run(command, cwd=trace.folder, timeout=LIMIT_S, capture_output=True)
        if max(trace.steps(), default=-1) == NUM_STEPS - 1:
            return
        if 0 < newest_stored(trace.run) < NUM_STEPS and chance.random() < 0.3:
            trace.told.append(f"a branch of step {newest_stored(trace.run)}")
            trace.names.append(f"run-{len(trace.names)}")
    trace.told.append("to the end")
    process = start(trace, chance)
    status = process.wait(LIMIT_S)
    assert status == 0, trace.describe()


def start(trace: LocalTrace, chance: random.Random) -> subprocess.Popen[bytes]:
    """Start, branch or go on, and sometimes have all further steps take another learning rate."""
    begins = len(trace.names) == 1 and not trace.run.exists()
    if begins or trace.is_changed or chance.random() > 0.3:
        return trace.start()
    trace.told.append(f"{CHANGED} after step {max(trace.steps(), default=-1)}")
    trace.is_changed = True
    return trace.start(CHANGED)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> LocalTrace:
    trace = LocalTrace(tmp_path_factory.mktemp("undisturbed"))
    (trace.folder / "disk").mkdir()
    assert trace.start().wait(LIMIT_S) == 0, trace.describe()
    return trace


def changed_at(steps: History, wanted: History) -> int | None:
    """Return the first step of another learning rate than that of an undisturbed run."""
    changed = [step for step in sorted(steps) if steps[step]["lr"] != wanted[step]["lr"]]
    assert changed == sorted(steps)[len(steps) - len(changed) :], "the old one has come back"
    return changed[0] if changed else None


def undisturbed_with_change(undisturbed: LocalTrace, step: int) -> Path:
    """Return a run that was changed when it had ended with this step, and else never disturbed."""
    name = f"changed-{step}"
    store = f"resilience.tiered.store.url=folder:{undisturbed.folder / 'disk' / name}"
    begun = last_of_each(*WORDS, store, f"run.name={name}")
    if (undisturbed.folder / "runs" / name).exists():
        commands = []
    elif step == 0:
        commands = [(*begun, CHANGED)]
    else:
        on = ("continue", name, f"trainer.max_steps={NUM_STEPS}", CHANGED)
        commands = [last_of_each(*begun, f"trainer.max_steps={step}"), on]
    for words in commands:
        done = subprocess.run(
            [sys.executable, "-m", "launcher", *words],
            cwd=undisturbed.folder, timeout=LIMIT_S, capture_output=True, text=True,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
    return undisturbed.folder / "runs" / name


@pytest.fixture
def trace(tmp_path: Path) -> Iterator[LocalTrace]:
    trace = LocalTrace(tmp_path)
    yield trace
    end_all(tmp_path)
    for name in trace.names:
        command = [sys.executable, "-m", "launcher", "clean", name]
        subprocess.run(command, cwd=tmp_path, timeout=LIMIT_S, capture_output=True)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(40))
def test_a_run_that_is_disturbed_at_random_has_the_bits_of_one_that_is_not(
    trace: LocalTrace, undisturbed: LocalTrace, seed: int
) -> None:
    play(trace, seed)

    found, wanted = trace.steps(), undisturbed.steps()
    calm = undisturbed.run
    if (changed := changed_at(found, wanted)) is not None:
        trace.told.append(f"changed before step {changed}")
        calm = undisturbed_with_change(undisturbed, changed)
        wanted = history([calm])
    assert trace.is_changed >= (changed is not None), trace.describe()
    trace.assert_same(wanted)
    model = Path("checkpoint/model.safetensors")
    if (trace.run / model).exists():
        assert (trace.run / model).read_bytes() == (calm / model).read_bytes()
