"""The limits and ours: saves into node memory and to a peer, and restores from there.

    python -m benchmarks.checkpoint_ours PLAN

Each lap: a clone by all ranks into touched memory; a save in line; a save while a device
works elsewhere, for which a sleep of three clones stands; and three restores of it, by the
ranks themselves, by new processes, and on a node that has to get it from the peer.
"""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from benchmarks.checkpoint_nodes import (
    LIMIT_S,
    OWN,
    choose_names,
    make_client,
    run_nodes,
    wait_alone,
    wait_held,
)
from benchmarks.checkpoint_state import (
    SLEEP,
    Figures,
    Plan,
    Ranks,
    State,
    Timed,
    change,
    check_equal,
    clear,
    copy_into,
    digest,
    end,
    join,
    make_room,
    make_state,
    read_plan,
    run_laps,
    run_ranks,
    start_ranks,
    until,
    wait_file,
)
from resilience.state.view import NamedTensor
from resilience.tiered.client import TieredClient
from resilience.tiered.loader import load
from resilience.tiered.saver import Saver

NAMES = (OWN, "node1", "node2")
GENERATION = 1


@dataclass
class RankView:
    """A rank's tensors as the saver and the loader want them."""

    shard: str
    state: State
    rest: dict[str, Any] = field(default_factory=dict)
    replica: int = 0

    def tensors(self) -> Sequence[NamedTensor]:
        """Return all of them."""
        return [NamedTensor(name=name, tensor=each) for name, each in self.state.items()]

    def read_rest(self) -> Mapping[str, Any]:
        """Return what is no tensor."""
        return self.rest

    def write_rest(self, rest: Mapping[str, Any]) -> None:
        """Take it over."""
        self.rest = dict(rest)


class Rank:
    """One rank through all laps."""

    def __init__(self, plan: Plan, rank: int, ranks: Ranks) -> None:
        own, peer, third = choose_names(NAMES)
        self.plan, self.rank, self.ranks = plan, rank, ranks
        self.state = make_state(plan, rank)
        self.room = make_room(plan, rank)
        self.view = RankView(str(rank), self.state)
        self.client = make_client(plan, own)
        self.peer, self.third = make_client(plan, peer), make_client(plan, third)
        self.saver = Saver(self.client, num_shards=plan.num_ranks, has_begun=True)

    def lap(self, step: int, figures: Figures) -> None:
        """Measure everything once; takes two steps."""
        memcpy_s = timed_alone(self.state, self.room, self.ranks)
        figures.note("memcpy", memcpy_s)
        clone_s = figures.span("clone", self.ranks.run(lambda: copy_into(self.room, self.state)))
        self.save_in_line(2 * step, figures)
        self.save_beside(2 * step + 1, clone_s, figures)
        self.restore(self.client, "ram", 2 * step + 1, "restore, living", figures)
        self.restore_anew(2 * step + 1, figures)
        self.restore(self.third, "peer", 2 * step + 1, "restore from a peer", figures)

    def save_in_line(self, step: int, figures: Figures) -> None:
        """Save while the cores have nothing else to do."""
        change(self.state, step)
        timed = self.ranks.run(lambda: self.saver.save(self.view, step=step, generation=GENERATION))
        figures.span("in line", timed)
        self.wait_peer(step)
        self.wait_alone(step)

    def save_beside(self, step: int, clone_s: float, figures: Figures) -> None:
        """Save while a device computes: what the calls take is what training waits."""
        change(self.state, step)
        self.ranks.barrier()
        began_s = time.monotonic()
        saving = self.saver.start(self.view, step=step, generation=GENERATION)
        started_s = time.monotonic()
        time.sleep(SLEEP * clone_s)
        woken_s = time.monotonic()
        saving.wait_copied(stall_s=LIMIT_S, pulse=lambda: None)
        waited_s = time.monotonic()
        saved = saving.wait(LIMIT_S)
        safe_s = started_s + saved.seconds
        safe = Timed(began_s, safe_s)
        self.wait_peer(step)
        on_peer = Timed(began_s, time.monotonic())
        self.wait_alone(step)
        figures.slowest("blocked", started_s - began_s + waited_s - woken_s)
        figures.span("own RAM", safe)
        figures.span("peer RAM", on_peer)

    def wait_peer(self, step: int) -> None:
        """Block until the peer has all shards."""
        if self.rank == 0:
            wait_held(self.peer, step, self.plan.num_ranks)
        self.ranks.barrier()

    def wait_alone(self, step: int) -> None:
        """Block until the step before has gone, whose memory the next one takes."""
        if self.rank == 0:
            wait_alone(self.client, step)
        self.ranks.barrier()

    def restore(
        self, client: TieredClient, source: str, step: int, name: str, figures: Figures
    ) -> None:
        """Read the newest step back into other tensors."""
        clear(self.room)
        view = RankView(str(self.rank), self.room)
        sources = []

        def read() -> None:
            loaded = load(client, view, step=step, generation=GENERATION)
            sources.append(loaded.source)

        figures.span(name, self.ranks.run(read))
        check_equal(self.state, self.room)
        if not sources[0].startswith(source):
            raise SystemExit(f"{name}: read from {sources[0]}, not from {source}")

    def restore_anew(self, step: int, figures: Figures) -> None:
        """Let new processes read it, and note what they took."""
        self.plan.folder.joinpath(f"digest-{self.rank}").write_text(digest(self.state))
        self.ranks.barrier()
        done = self.plan.folder / f"restored-{step}"
        if self.rank == 0:
            (self.plan.folder / f"saved-{step}").touch()
        with until("a restore by new processes", LIMIT_S) as pause:
            while not done.exists():
                pause()
        figures.note("restore, new process", float(done.read_text()))
        self.ranks.barrier()


def timed_alone(state: State, room: State, ranks: Ranks) -> float:
    """Return the time that rank 0 alone takes to copy its state."""
    seconds = 0.0
    if ranks.rank == 0:
        began_s = time.monotonic()
        copy_into(room, state)
        seconds = time.monotonic() - began_s
    return ranks.most(seconds)


def run_new(plan: Plan, rank: int, ranks: Ranks, step: int) -> None:
    """Be a new process of a rank: its model is there, and nothing of the daemon's memory."""
    room = make_room(plan, rank)
    view = RankView(str(rank), room)
    client = make_client(plan, OWN)
    timed = ranks.run(lambda: load(client, view, step=step, generation=GENERATION))
    seconds = ranks.span_s(timed)
    if digest(room) != (plan.folder / f"digest-{rank}").read_text():
        raise SystemExit("a new process has restored other bits")
    ranks.barrier()
    if rank == 0:
        new = plan.folder / "new"
        new.write_text(str(seconds))
        new.rename(plan.folder / f"restored-{step}")


def run(plan: Plan) -> None:
    """Run daemons, ranks and, when they ask for it, new processes."""

    def run_rank(plan: Plan, rank: int, ranks: Ranks) -> None:
        run_laps(plan, rank, Rank(plan, rank, ranks).lap, ranks)

    with run_nodes(plan, choose_names(NAMES)):
        children = start_ranks(plan, "ranks", run_rank)
        try:
            for lap in range(1, plan.laps + 2):
                step = 2 * lap + 1
                wait_file(plan.folder / f"saved-{step}", children)
                run_ranks(plan, f"new-{step}", functools.partial(run_new, step=step))
            join(children)
        except BaseException:
            end(children)
            raise


if __name__ == "__main__":
    torch.set_num_threads(1)
    run(read_plan(sys.argv[1]))
