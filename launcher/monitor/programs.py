"""Events of a user's program as those of a trainer of ours. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
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


def teller_of(step: Event) -> tuple[object, ...]:
    """Return which rank has told a step, and whether by what it printed."""
    return step.node, step.rank, bool(step.fields.get("printed"))


def steps_once(events: Iterable[Event]) -> list[Event]:
    """Return events with each step of a generation once, as the first rank has told it.

    Several nodes may print the same steps, and a program may print those that it logs. Of a step
    that is told again only values are taken that the first lacks.
    """
    found: list[Event] = []
    places: dict[object, dict[int, int]] = {}
    tellers: dict[object, object] = {}
    for event in events:
        generation, step = (event.fields.get("start"), event.generation), event.step
        if event.event == "step" and step is not None:
            known = places.setdefault(generation, {})
            is_again = tellers.setdefault(generation, teller_of(event)) != teller_of(event)
            if is_again and step <= max(known, default=-1):
                if (place := known.get(step)) is not None:
                    first = found[place]
                    own = {name: each for name, each in first.fields.items() if each is not None}
                    found[place] = replace(first, fields={**event.fields, **own})
                continue
            tellers[generation] = teller_of(event)
            known[step] = len(found)
        found.append(event)
    return found


def code_text(event: Event) -> str:
    """Return the folder and the commit of a run's code, and whether it has other changes."""
    folder, commit = (str(event.fields.get(each, "")) for each in ("folder", "commit"))
    changes = " (with changes that are not committed)" if event.fields.get("is_dirty") else ""
    return f"{folder} at {commit[:_COMMIT_SHOWN]}{changes}"


_COMMIT_SHOWN = 7
