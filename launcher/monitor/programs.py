"""Events of a user's program as those of a trainer of ours. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from resilience.events import Event

_BEGUN = ("worker_started", "model_ready")


def as_ours(event: Event, nodes: Sequence[str], workers_per_node: int) -> Iterator[Event]:
    """Yield the events that a worker of ours would have written.

    A program that says step N has done N steps, and ours those up to the step of that number, which
    begin at 0. Workers that say nothing of themselves train from the opening of their generation.
    """
    if event.event == "step" and event.step is not None:
        yield replace(event, step=event.step - 1)
        return
    yield event
    if event.event == "worker_started":
        yield replace(event, event="model_ready")
    size, number = (event.fields.get(each) for each in ("world_size", "number"))
    if event.event == "generation_opened" and isinstance(size, int) and nodes:
        generation = number if isinstance(number, int) else event.generation
        for rank in range(size):
            # Agents give ranks to nodes in the order of their names.
            node = sorted(nodes)[min(rank // workers_per_node, len(nodes) - 1)]
            for name in _BEGUN:
                yield replace(
                    event, event=name, node=node, rank=rank, generation=generation, fields={}
                )


def code_text(event: Event) -> str:
    """Return the folder and the commit of a run's code, and whether it has other changes."""
    folder, commit = (str(event.fields.get(each, "")) for each in ("folder", "commit"))
    changes = " (with changes that are not committed)" if event.fields.get("is_dirty") else ""
    return f"{folder} at {commit[:_COMMIT_SHOWN]}{changes}"


_COMMIT_SHOWN = 7
