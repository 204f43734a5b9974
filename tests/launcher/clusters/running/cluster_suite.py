"""What every cluster does with a run, whatever it is made of.

A test class for a cluster has a fixture `world`, which can make happen there what a run meets.
"""

from __future__ import annotations

import time
from contextlib import AbstractContextManager
from typing import Protocol

import pytest

from launcher.clusters.running.cluster import Cluster, RunFolder, read_run_folder
from launcher.clusters.running.requests import write_request
from launcher.commands.sight import Sight, see_run
from launcher.errors import OutsideError
from launcher.monitor.standing import Phase

WAIT_S = 60.0


class World(Protocol):
    """A cluster, and the hands that rule it."""

    cluster: Cluster
    has_queue: bool
    remembers_deleted: bool
    """Whether a job that somebody else has ended is still known."""
    has_logs: bool

    def start(self, *, is_held: bool = False) -> RunFolder:
        """Submit a run; one that is held waits until it is begun."""
        ...

    def begin(self, run: RunFolder) -> None:
        """Give a held run what it waits for."""
        ...

    def end(self, run: RunFolder, status: int) -> None:
        """Have a run that goes on end by itself; it prints `the reason` before."""
        ...

    def end_from_outside(self, run: RunFolder) -> None:
        """End a run as somebody does who does not use the launcher."""
        ...

    def forget(self, run: RunFolder) -> RunFolder:
        """Return a run of which the cluster knows nothing any more."""
        ...

    def cut(self) -> AbstractContextManager[object]:
        """Have the cluster answer nobody within the block."""
        ...


def wait_for(world: World, run: RunFolder, *phases: Phase) -> Sight:
    """Return how a run stands once it is in one of the phases."""
    end_s = time.monotonic() + WAIT_S
    while True:
        sight = see_run(run, world.cluster)
        if sight.standing.phase in phases:
            return sight
        assert time.monotonic() < end_s, sight.standing
        time.sleep(0.05)


class ClusterContract:
    """Each state that a person may find a run in."""

    def test_queued_run_says_what_it_waits_for(self, world: World) -> None:
        if not world.has_queue:
            pytest.skip("it has no queue")
        run = world.start(is_held=True)

        assert wait_for(world, run, Phase.QUEUED).standing.why

        world.cluster.cancel(run)
        sight = wait_for(world, run, Phase.CANCELLED, Phase.FORGOTTEN)
        assert sight.standing.phase is Phase.CANCELLED or not world.remembers_deleted

    def test_run_goes_from_the_queue_to_its_end(self, world: World) -> None:
        run = world.start(is_held=world.has_queue)
        if world.has_queue:
            wait_for(world, run, Phase.QUEUED)
        world.begin(run)

        wait_for(world, run, Phase.RUNNING)
        world.end(run, 0)

        wait_for(world, run, Phase.SUCCEEDED)
        # Nobody is left to be asked, and nothing happens.
        world.cluster.cancel(run)
        assert see_run(run, world.cluster).standing.phase is Phase.SUCCEEDED

    def test_failed_run_says_why(self, world: World) -> None:
        run = world.start()
        world.begin(run)
        wait_for(world, run, Phase.RUNNING)

        world.end(run, 7)

        assert "7" in wait_for(world, run, Phase.FAILED).standing.why
        if world.has_logs:
            lines = world.cluster.logs(run, None).read_new()
            assert "the reason" in {line.text for line in lines}

    def test_run_that_we_end_is_cancelled_by_us(self, world: World) -> None:
        run = world.start()
        world.begin(run)
        wait_for(world, run, Phase.RUNNING)

        write_request(run)
        world.cluster.cancel(run)

        standing = wait_for(world, run, Phase.CANCELLED).standing
        assert "asked for its end with `launcher cancel`" in standing.why

    def test_run_that_somebody_else_ends_is_not_ours(self, world: World) -> None:
        run = world.start()
        world.begin(run)
        wait_for(world, run, Phase.RUNNING)

        world.end_from_outside(run)

        ended = Phase.CANCELLED if world.remembers_deleted else Phase.FORGOTTEN
        standing = wait_for(world, run, ended).standing
        assert "launcher cancel" not in standing.why
        assert standing.why

    def test_run_that_the_cluster_has_forgotten_says_so(self, world: World) -> None:
        run = world.start()
        world.begin(run)
        wait_for(world, run, Phase.RUNNING)

        run = world.forget(run)

        assert wait_for(world, run, Phase.FORGOTTEN).standing.why
        world.cluster.cancel(run)

    def test_cluster_that_gives_no_answer_is_known_as_such(self, world: World) -> None:
        run = world.start()
        world.begin(run)
        wait_for(world, run, Phase.RUNNING)

        with world.cut():
            assert see_run(run, world.cluster).standing.phase is Phase.UNREACHABLE
            assert see_run(run, world.cluster).standing.why
            with pytest.raises(OutsideError):
                world.cluster.cancel(run)

        assert see_run(run, world.cluster).standing.phase is Phase.RUNNING

    def test_run_is_found_again_by_its_folder(self, world: World) -> None:
        run = world.start()
        world.begin(run)

        again = read_run_folder(run.path)

        assert again.job == run.job
        wait_for(world, again, Phase.RUNNING)
