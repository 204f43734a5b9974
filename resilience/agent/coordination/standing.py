"""What an agent has been a member of, and what it has agreed to. Pure.

It outlives any coordinator: whoever asks next is told. A generation that an agent has agreed to
and that came about may have ended before it began; then what its workers held at the end of the one
before still counts, and is told under the newer number.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeVar

from resilience.comm.messages import Agree, Failed, Finished, Join, Learn, Open, Propose, Stopped
from resilience.state.layout import Layout

Said = TypeVar("Said", Failed, Stopped, Finished)


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
    ballot: int = -1
    agreed: Layout | None = None
    """Its ballot and its members."""
    shares_folder: bool = False
    """Whether all members see one folder of the run."""

    def join(self, *, node: str, address: str, start: str) -> Join:
        """Return what a coordinator is told."""
        is_next = self.proposed == self.generation + 1
        return Join(
            node=node,
            address=address,
            start=start,
            generation=self.generation,
            layout=self.layout,
            opened=self.opened,
            ballot=self.ballot if is_next else -1,
            agreed=self.agreed if is_next else None,
            shares_folder=self.shares_folder,
        )

    def open(self, opening: Open) -> Standing:
        """Become a member of a generation that begins."""
        return Standing(
            generation=opening.generation,
            layout=opening.layout,
            opened=opening.generation,
            shares_folder=opening.shares_folder,
        )

    def learn(self, news: Learn) -> Standing:
        """Take note of a newer generation in which the agent's workers have no part."""
        if news.generation <= self.generation:
            return self
        return Standing(
            generation=news.generation,
            layout=news.layout,
            opened=news.opened,
            shares_folder=news.shares_folder,
        )

    def consider(self, proposal: Propose, *, is_member: bool) -> tuple[Standing, Agree | None]:
        """Agree to the members of the next generation, unless it is too late for them.

        Members of the newest generation are bound by their agreements, of which they tell whoever
        proposes. Nobody asks the others for theirs: a number that they know may come again.
        """
        is_repeated = proposal.generation == self.proposed and proposal.ballot <= self.ballot
        if (is_member and is_repeated) or proposal.generation <= self.generation:
            return self, None
        standing = replace(
            self,
            proposed=proposal.generation,
            ballot=proposal.ballot,
            agreed=proposal.layout,
        )
        return standing, Agree(generation=proposal.generation, ballot=proposal.ballot)

    def relabel(self, said: Said) -> Said:
        """Return what was said of the generation that began last as said of the newest one."""
        if not self.opened <= said.generation < self.generation:
            return said
        if isinstance(said, Stopped):
            report = {**said.report, "generation": self.generation}
            if report.get("member_generation") == said.generation:
                report["member_generation"] = self.generation
            return replace(said, generation=self.generation, report=report)
        return replace(said, generation=self.generation)
