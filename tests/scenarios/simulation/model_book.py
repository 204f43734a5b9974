"""Gives agents, messages and questions of the model numbers, and remembers what comes of each turn.

Equal things have one number. Ballots grow with each coordinator, so equal worlds would never come
again: the numbers of the ballots in a world are made small, see `shrink`.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import fields, replace
from itertools import pairwise
from typing import Any, NamedTuple

from resilience.agent.coordination.founding import Record
from resilience.agent.coordination.membership import Options
from resilience.comm.messages import Ballot, Message, encode
from resilience.state.layout import Layout
from resilience.state.report import Report
from tests.scenarios.simulation.model_agent import Agent, Found, Renew
from tests.scenarios.simulation.model_turn import Outcome, Turn

EVERYONE = -1
"""To whom something is said that all who are connected hear."""
GAP_MAX = 2
"""Numbers of ballots that are further apart are brought so near: there is room for one between."""


class Done(NamedTuple):
    """An outcome in numbers."""

    agent: int
    said: tuple[tuple[int, int], ...]
    asked: tuple[int, ...]
    decided: tuple[tuple[int, int], ...]
    chosen: tuple[tuple[int, int, int], ...]


class Folder(NamedTuple):
    """What lies in the folder of the run."""

    founding: Record | None
    records: tuple[tuple[int, Layout], ...]


class Numbers:
    """Gives equal things one number."""

    def __init__(self) -> None:
        self._by_key: dict[Hashable, int] = {}
        self._things: list[Any] = []

    def of(self, thing: object, key: Hashable) -> int:
        number = self._by_key.setdefault(key, len(self._things))
        if number == len(self._things):
            self._things.append(thing)
        return number

    def __getitem__(self, number: int) -> Any:
        return self._things[number]

    def __len__(self) -> int:
        return len(self._things)


class Book:
    """All that was ever seen of a model."""

    def __init__(self, names: list[str], options: Options, *, shares_folder: bool) -> None:
        self.names, self.options, self.shares_folder = names, options, shares_folder
        self._agents, self._items, self._asked = Numbers(), Numbers(), Numbers()
        self._layouts, self._folders = Numbers(), Numbers()
        self._memory: dict[Hashable, Done] = {}
        self._agent_ballots: dict[int, frozenset[int]] = {}
        self._item_ballots: dict[int, frozenset[int]] = {}
        self._renamed: dict[Hashable, int] = {}

    # ---- numbers

    def agent(self, number: int) -> Agent:
        agent: Agent = self._agents[number]
        return agent

    def item(self, number: int) -> tuple[Message, frozenset[str]]:
        """Return a message, and whom its speaker knew of as present."""
        item: tuple[Message, frozenset[str]] = self._items[number]
        return item

    def layout(self, number: int) -> Layout:
        layout: Layout = self._layouts[number]
        return layout

    def folder(self, number: int) -> Folder:
        folder: Folder = self._folders[number]
        return folder

    def question(self, number: int) -> tuple[str, Any]:
        """Return the start of an agent that has asked the folder, and what."""
        question: tuple[str, Any] = self._asked[number]
        return question

    def is_renewal(self, number: int) -> bool:
        return isinstance(self.question(number)[1], Renew)

    def is_founding(self, number: int) -> bool:
        return isinstance(self.question(number)[1], Found)

    def enter(self, name: str, start: int) -> int:
        """Return the number of an agent that has just come."""
        agent = Agent(
            name=name,
            start=f"{name}#{start}",
            options=self.options,
            shares_folder=self.shares_folder,
        )
        return self._agents.of(agent, agent.key())

    def enter_layout(self, layout: Layout) -> int:
        return self._layouts.of(layout, layout)

    def enter_folder(self, folder: Folder) -> int:
        return self._folders.of(folder, folder)

    def _enter_item(self, message: Message, roster: frozenset[str]) -> int:
        return self._items.of((message, roster), (encode(message), roster))

    # ---- turns

    def turn(self, number: int, verb: str, *args: Hashable) -> Done:
        """Return what an agent does, which is the same each time."""
        key = (number, verb, args)
        done = self._memory.get(key)
        if done is None:
            done = self._memory[key] = self._take_turn(self.agent(number), verb, args)
        return done

    def _take_turn(self, agent: Agent, verb: str, args: tuple[Any, ...]) -> Done:
        if verb == "hear_leader":
            args = self.item(args[0])
        elif verb == "hear_follower":
            args = (args[0], self.item(args[1])[0])
        outcome: Outcome = getattr(Turn(agent), verb)(*args)
        return Done(
            self._agents.of(outcome.agent, outcome.agent.key()),
            tuple(
                (self.names.index(to) if to else EVERYONE, self._enter_item(message, roster))
                for to, message, roster in outcome.said
            ),
            tuple(
                self._asked.of(each, each)
                for each in ((agent.start, each) for each in outcome.asked)
            ),
            tuple((self.enter_layout(layout), step) for layout, step in outcome.decided),
            tuple(
                (generation, self.enter_layout(layout), begin)
                for generation, layout, begin in outcome.chosen
            ),
        )

    # ---- ballots

    def shrink(self, agents: list[int], queues: list[tuple[int, ...]]) -> None:
        """Make the numbers of all ballots small, and leave their order as it is.

        Numbers that are far apart come near, with room for one ballot between them. That is one
        place where worlds are taken for equal that differ, in what two coordinators that raise
        their ballots again and again without hearing of each other call them.
        """
        found: set[int] = {0}
        for number in agents:
            found |= self._find_agent_ballots(number)
        for queue in queues:
            for item in queue:
                if item >= 0:
                    found |= self._find_item_ballots(item)
        numbers = sorted(found)
        small, names = 0, {0: 0}
        for before, number in pairwise(numbers):
            small += min(number - before, GAP_MAX)
            names[number] = small
        if small == numbers[-1]:
            return
        key = tuple(names.items())
        agents[:] = [self._rename_agent(each, names, key) for each in agents]
        queues[:] = [
            tuple(each if each < 0 else self._rename_item(each, names, key) for each in queue)
            for queue in queues
        ]

    def _find_agent_ballots(self, number: int) -> frozenset[int]:
        found = self._agent_ballots.get(number)
        if found is None:
            ballots = _find_ballots([self.agent(number)])
            found = self._agent_ballots[number] = frozenset(ballots)
        return found

    def _find_item_ballots(self, number: int) -> frozenset[int]:
        found = self._item_ballots.get(number)
        if found is None:
            found = self._item_ballots[number] = frozenset(_find_ballots([self.item(number)[0]]))
        return found

    def _rename_agent(self, number: int, names: Mapping[int, int], key: Hashable) -> int:
        if (renamed := self._renamed.get(("agent", number, key))) is None:
            agent = _rename(self.agent(number), names)
            renamed = self._agents.of(agent, agent.key())
            self._renamed["agent", number, key] = renamed
        return renamed

    def _rename_item(self, number: int, names: Mapping[int, int], key: Hashable) -> int:
        if (renamed := self._renamed.get(("item", number, key))) is None:
            message, roster = self.item(number)
            renamed = self._enter_item(_rename(message, names), roster)
            self._renamed["item", number, key] = renamed
        return renamed


def _is_ballot(thing: object) -> bool:
    is_pair = isinstance(thing, tuple) and len(thing) == 2
    return is_pair and isinstance(thing[0], int) and isinstance(thing[1], str)  # type: ignore[index]


_KEPT = (Layout, Record, Options, Report)
"""Hold no ballots."""


def _find_ballots(things: Iterable[Any]) -> Iterable[int]:
    """Yield the numbers of all ballots in these things."""
    for thing in things:
        if _is_ballot(thing):
            yield thing[0]
        elif isinstance(thing, Mapping):
            yield from _find_ballots(thing.values())
        elif isinstance(thing, tuple):
            yield from _find_ballots(thing)
        elif hasattr(thing, "__dataclass_fields__") and not isinstance(thing, _KEPT):
            yield from _find_ballots(getattr(thing, each.name) for each in fields(thing))


def _rename(thing: Any, names: Mapping[int, int]) -> Any:
    """Return a thing with other numbers in its ballots."""
    if _is_ballot(thing):
        ballot: Ballot = (names[thing[0]], thing[1])
        return ballot
    if isinstance(thing, Mapping):
        return {key: _rename(each, names) for key, each in thing.items()}
    if isinstance(thing, tuple):
        return tuple(_rename(each, names) for each in thing)
    if hasattr(thing, "__dataclass_fields__") and not isinstance(thing, _KEPT):
        return replace(
            thing,
            **{each.name: _rename(getattr(thing, each.name), names) for each in fields(thing)},
        )
    return thing
