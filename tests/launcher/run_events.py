"""The events of a small run, as its workers and launcher write them."""

from __future__ import annotations

from typing import Any

from resilience.events import Event


def event(
    name: str,
    time: float,
    rank: int | None = None,
    *,
    step: int | None = None,
    generation: int = 0,
    **fields: Any,
) -> Event:
    node = "launcher" if rank is None else f"node-{rank // 2}"
    return Event(
        time=time, node=node, rank=rank, generation=generation, step=step, event=name, fields=fields
    )


def step_event(number: int, time: float, loss: float | str = 2.0, **more: Any) -> Event:
    fields = {"loss": loss, "lr": 0.001, "duration_s": 0.5, "num_samples": 16 * (number + 1)}
    return event("step", time, 0, step=number, **{**fields, **more})


def all_ranks(name: str, time: float, **more: Any) -> list[Event]:
    return [event(name, time, rank, **more) for rank in range(4)]


def whole_run() -> list[Event]:
    """Return a run of 4 workers that takes 20 seconds and 4 steps."""
    return [
        event("run_started", 100.0),
        *all_ranks("worker_started", 102.0),
        *all_ranks("process_group_ready", 105.0),
        *all_ranks("data_ready", 106.0),
        *all_ranks("model_ready", 108.0),
        *(step_event(number, 109.0 + number, 4.0 - number) for number in range(4)),
        event("checkpoint_started", 113.0, 0),
        event("checkpoint_written", 115.0, 0, path="/runs/x/checkpoint", num_bytes=2_500_000),
        *all_ranks("worker_finished", 116.0),
        event("run_finished", 120.0, exit_status=0, reason="all nodes succeeded"),
    ]
