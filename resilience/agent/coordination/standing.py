"""What an agent has been a member of, and what it has agreed to. Pure.

It outlives any coordinator: whoever asks next is told. A generation that an agent has agreed to
and that came about may have ended before it began; then what its workers held at the end of the one
before still counts, and is told under the newer number.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeVar

from resilience.comm import messages
from resilience.comm.messages import NO_BALLOT, Ballot, Join
from resilience.state.layout import Layout

Said = TypeVar("Said", messages.Failed, messages.Stopped, messages.Finished)


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """An agent's part in the run."""

    generation: int = -1
    """The newest that it knows of."""
    layout: Layout | None = None
    """The members of that generation."""
    opened: int = -1
    """The newest that has begun."""
    proposed: int = -1
    """The generation of the newest proposal to which it has agreed."""
    ballot: Ballot = NO_BALLOT
    agreed: Layout | None = None
    """Its ballot and its members."""
    shares_folder: bool = False
    """Whether all members see one folder of the run."""

    def join(self, *, node: str, address: str, start: str, sees_folder: bool) -> Join:
        """Return what a coordinator is told, whose folder the agent `sees_folder` or does not.

        A member has seen it as its generation began, and one that hangs since is the same. What a
        standby has heard of members says nothing of its own folder.
        """
        is_next = self.proposed == self.generation + 1
        is_member = self.layout is not None and self.layout.place_of(node, start) >= 0
        return Join(
            node=node,
            address=address,
            start=start,
            generation=self.generation,
            layout=self.layout,
            opened=self.opened,
            ballot=self.ballot if is_next else NO_BALLOT,
            agreed=self.agreed if is_next else None,
            shares_folder=sees_folder or (is_member and self.shares_folder),
        )

    def open(self, opening: messages.Open) -> Standing:
        """Become a member of a generation that begins."""
        return _begin_behind(opening, opening.generation)

    def learn(self, news: messages.Learn) -> Standing:
        """Take note of a newer generation in which the agent's workers have no part."""
        if news.generation <= self.generation:
            return self
        return _begin_behind(news, news.opened)

    def consider(self, proposal: messages.Propose) -> tuple[Standing, messages.Agree | None]:
        """Agree to the members of the next generation, unless it is too late for them."""
        is_repeated = (self.proposed, self.ballot) == (proposal.generation, proposal.ballot)
        if is_repeated and proposal.layout != self.agreed:
            return self, None
        if proposal.generation <= self.generation:
            return self, None
        standing = replace(
            self, proposed=proposal.generation, ballot=proposal.ballot, agreed=proposal.layout
        )
        return standing, messages.Agree(generation=proposal.generation, ballot=proposal.ballot)

    def relabel(self, said: Said) -> Said:
        """Return what was said of the generation that began last as said of the newest one."""
        if not self.opened <= said.generation < self.generation:
            return said
        if isinstance(said, messages.Stopped):
            report = {**said.report, "generation": self.generation}
            if report.get("member_generation") == said.generation:
                report["member_generation"] = self.generation
            return replace(said, generation=self.generation, report=report)
        return replace(said, generation=self.generation)


def _begin_behind(news: messages.Open | messages.Learn, opened: int) -> Standing:
    """Return the part of an agent that has agreed to nothing since this generation."""
    return Standing(
        generation=news.generation,
        layout=news.layout,
        opened=opened,
        shares_folder=news.shares_folder,
    )
