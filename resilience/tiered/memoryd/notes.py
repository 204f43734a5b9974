"""What a daemon tells the others beside what it holds: runs, uploads, and what it found bad.

Each node tells all of it whenever any of it has changed; what was told before counts no more.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar

from pydantic import ConfigDict

from resilience.runtime.records import read_record
from resilience.tiered.catalog import Copy, Number, StepAt
from resilience.tiered.errors import StaleError, VaultFullError
from resilience.tiered.memoryd.board import Board
from resilience.tiered.memoryd.http_spaces import Numbers, Spaces
from resilience.tiered.memoryd.output import complain
from resilience.tiered.memoryd.peer_wire import check_copies, check_step
from resilience.tiered.uploads import Sending

NAMESPACES_MAX = 4096
"""Runs of further namespaces are not taken note of, and that is said."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeNotes:
    """The notes of one node, as they go over the wire."""

    __pydantic_config__: ClassVar = ConfigDict(extra="forbid")

    runs: Mapping[str, tuple[str | None, tuple[StepAt, ...]]] = field(default_factory=dict)
    """By namespace: its job, and the step from which the run of each first generation goes on."""
    sendings: tuple[tuple[str, Sending], ...] = ()
    used: tuple[str, ...] = ()
    stored: tuple[tuple[Number, Copy], ...] = ()
    bad: tuple[tuple[str, str], ...] = ()
    spaces: Mapping[str, Numbers] = field(default_factory=dict)


class BoardNotes:
    """The notes of one daemon's board. Any thread."""

    def __init__(self, board: Board, spaces: Spaces | None = None) -> None:
        self._board = board
        self._spaces = spaces
        self._num_left_out = 0
        """Of so many namespaces it was said that their runs are not taken note of."""

    def tell(self) -> NodeNotes:
        """Return what the others are to know now; equal where nothing has changed."""
        board = self._board
        runs = {
            name: (job, tuple(StepAt(step=runs[first], generation=first) for first in sorted(runs)))
            for name, (job, runs) in board.vault.runs().items()
        }
        return NodeNotes(
            runs=runs,
            sendings=tuple(board.sendings.own()),
            used=tuple(board.uses.own()),
            stored=tuple(board.shelf.put_here()) if board.shelf else (),
            bad=tuple(board.shelf.found_bad()) if board.shelf else (),
            spaces=self._spaces.tell() if self._spaces else {},
        )

    def hear(self, node: str, notes: object) -> None:
        """Take what another node has told last; raises ValueError for what is none."""
        board, told = self._board, read_record(NodeNotes, notes, "notes")
        self._hear_runs(told)
        board.uses.hear(node, frozenset(told.used))
        for name, each in told.sendings:
            check_step(name, each.at)
        # No node speaks for another one.
        board.sendings.hear(node, [(name, replace(of, node=node)) for name, of in told.sendings])
        board.wake()
        if board.shelf:
            check_copies([copy for _, copy in told.stored])
            board.shelf.hear(node, told.stored, set(told.bad))
        if self._spaces:
            self._spaces.hear(told.spaces)

    def _hear_runs(self, told: NodeNotes) -> None:
        vault = self._board.vault
        known, left_out = set(vault.runs()), []
        for name, (job, runs) in told.runs.items():
            if vault.job_of(name) not in (None, job):
                continue
            if name not in known and len(known) >= NAMESPACES_MAX:
                left_out.append(name)
                continue
            for at in runs:
                check_step(name, at)
                try:
                    vault.begin_run(name, step=at.step, first_generation=at.generation, job=job)
                except StaleError:  # this node knows of a newer one
                    continue
                except VaultFullError as error:
                    complain(str(error))
            known.add(name)
        if len(left_out) > self._num_left_out:
            self._num_left_out = len(left_out)
            complain(
                f"the runs of {len(left_out)} namespaces are not taken note of, {left_out[0]:.80} "
                f"among them: there are {NAMESPACES_MAX} others"
            )
