"""After any restart the batches are those of the undisturbed sequence, the first ones at once.

At once means: without the source. It is held up until they were read, as one is that takes long
to begin; nothing is timed. A failure prints the seed and what had happened; DATA_SEEDS=7,8 runs
those seeds alone.
"""

from __future__ import annotations

import os
import random
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.cases import slow
from tests.resilience.data.job import (
    Job,
    Worker,
    expected_digests,
    find_producers,
    kill_producers,
    logged,
)

SEEDS = [int(each) for each in os.environ.get("DATA_SEEDS", "").split(",") if each] or [1]
CHECKPOINT_EVERY = 10
VAL_PREFETCH = 4
VAL_BATCHES = 25
"""So many batches a validation has."""


class Course(ABC):
    """What a job has read so far, and where it goes on after a fault."""

    def __init__(self, job: Job, expected: list[str], num_batches: int) -> None:
        self.job = job
        self.expected = expected
        self.num_batches = num_batches
        self.history: list[str] = []
        self.next = 0
        self.num_read = 0
        self.again: set[int] = set()
        """Batches that were read before a fault, and after it again from the cache."""
        self.times_made: dict[int, int] = {}
        """How often a batch had been made when it was read first."""

    @abstractmethod
    def resume(self) -> int:
        """Return where a worker begins that is started now."""

    @abstractmethod
    def kept(self) -> range:
        """Return the batches that have to be in the cache now."""

    def go_on(self) -> None:
        """Read the next batch."""
        self.check(self.job.ask("read", self.next))
        if self.next not in self.times_made:
            # Once, or more often where a producer was killed before it had stored it.
            self.times_made[self.next] = self.count_made(self.next)
        self.next += 1
        self.num_read += 1

    def made_again(self) -> list[int]:
        """Return what a restart has read and what was made again all the same."""
        return [
            number
            for number in sorted(self.again)
            if self.count_made(number) != self.times_made[number]
        ]

    def count_made(self, number: int) -> int:
        return logged(self.job.folder, "make").count(number)

    def check(self, answers: list[str]) -> None:
        assert answers == [self.expected[self.next]] * len(answers), self.history

    def is_done(self) -> bool:
        return self.num_read >= self.num_batches

    def restart(self) -> None:
        """Read what has to be in the cache, while no source can be opened."""
        kept = self.kept()
        self.next = self.resume()
        for _ in kept:
            self.go_on()
        self.again.update(kept)
        self.job.open_gate()


class Training(Course):
    """Goes on behind the newest checkpoint."""

    def __init__(self, job: Job, expected: list[str], *, tells: bool) -> None:
        super().__init__(job, expected, len(expected))
        self.tells = tells

    def resume(self) -> int:
        return max(0, self.next - 1) // CHECKPOINT_EVERY * CHECKPOINT_EVERY

    def kept(self) -> range:
        return range(self.resume(), self.next)

    def go_on(self) -> None:
        super().go_on()
        if self.tells and (self.next - 1) % CHECKPOINT_EVERY == 0:
            self.job.ask("checkpoint", self.next - 1)

    def restart(self) -> None:
        if self.tells:
            self.job.ask("checkpoint", self.resume())
        super().restart()

    def is_done(self) -> bool:
        return self.next == self.num_batches


class Validation(Course):
    """Begins at 0 each time."""

    def resume(self) -> int:
        return 0

    def kept(self) -> range:
        return range(min(self.num_read, VAL_PREFETCH))

    def go_on(self) -> None:
        if self.next == len(self.expected):
            assert set(self.job.ask("read", self.next)) == {"end"}
            self.next = 0
        super().go_on()


# Each fault may come while the workers wait for the next batch.


def worker_killed(course: Course, rng: random.Random) -> None:
    job = course.job
    victim = rng.choice(job.workers)
    others = order(course, rng, victim)
    victim.end()
    settle(course, others)
    job.close_gate()
    job.replace(victim, course.resume())


def workers_killed(course: Course, rng: random.Random) -> None:
    """The producer lives on."""
    job = course.job
    order(course, rng)
    for worker in job.workers:
        worker.end()
    job.close_gate()
    for worker in list(job.workers):
        job.replace(worker, course.resume())


def producer_killed(course: Course, rng: random.Random) -> None:
    job = course.job
    others = order(course, rng)
    kill_producers(job.folder)
    settle(course, others)
    job.close_gate()
    kill_producers(job.folder)


def job_killed(course: Course, rng: random.Random) -> None:
    """All its processes; sometimes the producer of the old job is still ending."""
    job = course.job
    order(course, rng)
    if rng.random() < 0.5:
        kill_producers(job.folder)
    for worker in job.workers:
        worker.end()
    job.end_owner()
    job.close_gate()
    job.start(course.resume())


def loaders_made_anew(course: Course, rng: random.Random) -> None:
    """In the workers that run, as an in-process restart does."""
    course.job.close_gate()
    course.job.ask("reopen", course.resume())


FAULTS: dict[str, Callable[[Course, random.Random], None]] = {
    "worker": worker_killed,
    "workers": workers_killed,
    "producer": producer_killed,
    "job": job_killed,
    "loaders": loaders_made_anew,
}


def order(course: Course, rng: random.Random, *without: Worker) -> list[Worker]:
    """Have the workers read the next batch, sometimes; return those to hear from."""
    if course.next == len(course.expected) or rng.random() < 0.5:
        return []
    for worker in course.job.workers:
        worker.say("read", course.next)
    return [worker for worker in course.job.workers if worker not in without]


def settle(course: Course, workers: list[Worker]) -> None:
    if workers:
        course.check([worker.hear() for worker in workers])


def make_course(folder: Path, jobs: list[Job], variant: str, num_batches: int) -> Course:
    settings: dict[str, Any] = {"val_prefetch_length": VAL_PREFETCH}
    if variant == "untold":
        settings["checkpoint_frequency"] = CHECKPOINT_EVERY
    options: dict[str, Any] = {"settings": settings}
    if variant == "validation":
        options |= {"stage": "val", "num_batches": VAL_BATCHES}
    job = Job(folder, **options)
    jobs.append(job)
    job.start()
    if variant == "validation":
        return Validation(job, expected_digests(folder, VAL_BATCHES), num_batches)
    return Training(job, expected_digests(folder, num_batches), tells=variant == "told")


@pytest.mark.parametrize("variant", [slow("told"), "untold", slow("validation")])
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    ("num_batches", "num_faults"),
    [
        pytest.param(60, 6, id="short"),
        pytest.param(500, 30, id="long", marks=pytest.mark.slow),
    ],
)
def test_random_faults_change_no_batch(
    tmp_path: Path, jobs: list[Job], variant: str, seed: int, num_batches: int, num_faults: int
) -> None:
    """Checkpoints are told to the cache, or only their frequency; or it is a validation."""
    rng = random.Random(f"{seed} {variant}")
    course = make_course(tmp_path, jobs, variant, num_batches)
    course.history.append(f"seed {seed}")
    kinds = [list(FAULTS)[each % len(FAULTS)] for each in range(num_faults)]
    rng.shuffle(kinds)
    points = sorted(rng.sample(range(1, num_batches), num_faults), reverse=True)

    while not course.is_done():
        if points and course.num_read >= points[-1]:
            points.pop()
            course.history.append(f"{kinds[0]} at {course.next}")
            FAULTS[kinds.pop(0)](course, rng)
            course.restart()
        else:
            course.go_on()

    assert not points
    assert course.made_again() == [], course.history


@pytest.mark.parametrize("variant", ["untold", slow("validation")])
@pytest.mark.parametrize(
    "kind", ["worker", "job", slow("workers"), slow("producer"), slow("loaders")]
)
def test_the_first_batch_after_a_restart_needs_no_source(
    tmp_path: Path, jobs: list[Job], variant: str, kind: str
) -> None:
    """In training it is one that only the worker that is ahead has read."""
    course = make_course(tmp_path, jobs, variant, num_batches=20)
    while course.next < CHECKPOINT_EVERY:
        course.go_on()
    ahead = course.job.workers[-1]
    ahead.say("read", CHECKPOINT_EVERY)
    assert ahead.hear() == course.expected[CHECKPOINT_EVERY]
    course.times_made[course.next] = course.count_made(course.next)
    course.next += 1

    FAULTS[kind](course, random.Random(1))
    course.restart()

    if kind not in ("producer", "job"):
        assert logged(tmp_path, "open") == [0]
    assert course.again
    assert course.made_again() == []
    while course.next < 2 * CHECKPOINT_EVERY:
        course.go_on()
    assert len(find_producers(tmp_path)) == 1


@pytest.mark.parametrize("variant", ["told", slow("untold")])
def test_a_new_producer_begins_where_its_consumers_are(
    tmp_path: Path, jobs: list[Job], variant: str
) -> None:
    """Not where they began, and it keeps what a resume needs from the first moment on."""
    course = make_course(tmp_path, jobs, variant, num_batches=40)
    while course.next < 36:
        course.go_on()

    kill_producers(tmp_path)
    while course.next < 39:
        course.go_on()

    assert all(number >= 36 for number in logged(tmp_path, "open")[1:])
    loaders_made_anew(course, random.Random(1))
    course.restart()
    assert course.made_again() == []


def test_ranks_of_a_position_share_the_cache_of_its_batches(
    tmp_path: Path, jobs: list[Job]
) -> None:
    """As tensor parallel ranks do; a rank knows its position, and needs no torch to ask for it."""
    positions = [0, 0, 1, 1]
    expected = [expected_digests(tmp_path, 30, rank=rank, size=2) for rank in range(2)]
    # All batches are still there when the slowest rank arrives.
    job = Job(tmp_path, num_workers=4, positions=positions, settings={"lookback_length": 30})
    jobs.append(job)
    job.start()

    for number in range(30):
        assert job.ask("read", number) == [expected[rank][number] for rank in positions]

    assert expected[0] != expected[1]
    assert job.ask("torch") == ["False"] * 4
    assert len(find_producers(tmp_path)) == 2
    for rank in range(2):
        made = logged(tmp_path, "make", rank=rank)
        assert sorted(set(made)) == made
        assert len(logged(tmp_path, "open", rank=rank)) == 1
