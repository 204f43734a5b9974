"""What a daemon tells the others beside what it holds: runs, uploads, and what it found bad.

Each node tells all of it whenever any of it has changed; what was told before counts no more.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from resilience.tiered.catalog import LOWER_TIERS, StepAt
from resilience.tiered.errors import StaleError, VaultFullError
from resilience.tiered.memoryd.board import Board
from resilience.tiered.memoryd.http_spaces import Spaces
from resilience.tiered.memoryd.output import complain
from resilience.tiered.memoryd.peer_wire import read_copies, read_id, read_text, write_copies
from resilience.tiered.uploads import Sending

NAMESPACES_MAX = 4096
"""Runs of further namespaces are not taken note of, and that is said."""


class BoardNotes:
    """The notes of one daemon's board; a `peering.Notes`. Any thread."""

    def __init__(self, board: Board, spaces: Spaces | None = None) -> None:
        self._board = board
        self._spaces = spaces
        self._num_left_out = 0
        """Of so many namespaces it was said that their runs are not taken note of."""

    def tell(self) -> dict[str, Any]:
        """Return what the others are to know now, as JSON data."""
        board = self._board
        runs = {
            name: {"job": job, "runs": sorted(runs.items())}
            for name, (job, runs) in board.vault.runs().items()
        }
        sendings = [
            [name, each.tier, each.at.step, each.at.generation, each.digest]
            for name, each in board.own_sendings()
        ]
        notes: dict[str, Any] = {
            "runs": runs,
            "sendings": sendings,
            "used": board.used(),
            "stored": [],
            "numbers": [],
            "bad": [],
        }
        if board.shelf:
            stored = board.shelf.put_here()
            notes["stored"] = write_copies([copy for _, copy in stored])
            notes["numbers"] = [number for number, _ in stored]
            notes["bad"] = [list(each) for each in board.shelf.found_bad()]
        if self._spaces:
            notes["spaces"] = self._spaces.tell()
        return notes

    def hear(self, node: str, notes: Mapping[str, Any]) -> None:
        """Take what another node has told; ValueError, KeyError or TypeError for what is none."""
        board = self._board
        self._hear_runs(notes["runs"])
        board.hear_used(node, frozenset(map(read_text, notes["used"])))
        board.hear_sendings(node, [_read_sending(row, node) for row in notes["sendings"]])
        if board.shelf:
            board.shelf.hear(
                node,
                zip(map(int, notes["numbers"]), read_copies(notes["stored"], node), strict=True),
                {(read_text(name), read_text(digest)) for name, digest in notes["bad"]},
            )

        if self._spaces and "spaces" in notes:
            self._spaces.hear(notes["spaces"])

    def _hear_runs(self, content: Mapping[str, Any]) -> None:
        vault = self._board.vault
        known, left_out = set(vault.runs()), []
        for name, told in content.items():
            job = None if told["job"] is None else read_text(told["job"])
            if vault.job_of(name) not in (None, job):
                continue
            if name not in known and len(known) >= NAMESPACES_MAX:
                left_out.append(name)
                continue
            for first, step in told["runs"]:
                shard_id = read_id([name, step, first, ""])
                try:
                    vault.begin_run(
                        name, step=shard_id.step, first_generation=shard_id.generation, job=job
                    )
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


def _read_sending(row: list[Any], node: str) -> tuple[str, Sending]:
    name, tier, step, generation, digest = row
    if tier not in LOWER_TIERS:
        raise ValueError(f"no tier: {tier!r:.40}")
    shard_id = read_id([name, step, generation, ""])
    at = StepAt(step=shard_id.step, generation=shard_id.generation)
    return name, Sending(tier=tier, at=at, digest=read_text(digest), node=node)
