"""Small real runs on this machine, and what their events tell."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from resilience.events import Event, read_events
from tests.launcher.command import Ended, launch

SMALL = (
    "recipe=llama/llama3_tiny_pretrain",
    "action=run",
    "trainer.num_nodes=1",
    "trainer.num_devices=2",
    "trainer.optimizer.warmup_steps=4",
    "trainer.optimizer.decay_steps=20",
    "trainer.log_every_n_steps=1",
    "trainer.global_batch_size=8",
    "trainer.micro_batch_size=2",
    "data.max_bytes=300000",
)


def train(folder: Path, name: str, *words: str) -> Ended:
    """Train a run of this name below a folder, to its end."""
    return launch(*SMALL, f"run.name={name}", *words, folder=folder)


def go_on(run: Path, *overrides: str) -> Ended:
    return launch("continue", str(run), *overrides, folder=run.parent.parent)


def steps(run: Path) -> list[dict[str, Any]]:
    """Return what each step came to that was taken, and by which start."""
    found: dict[int, dict[str, Any]] = {}
    for event in read_events(run / "events.jsonl"):
        if event.event == "step" and event.fields["duration_s"] is not None:
            assert event.step is not None
            found[event.step] = event.fields
    return [found[number] for number in sorted(found)]


def named(run: Path, name: str) -> list[Event]:
    return [each for each in read_events(run / "events.jsonl") if each.event == name]
