"""Faults of the source, of the producer and of the files: no wrong batch, and nothing left.

Each test ends with a count of processes, descriptors, locks and files.
"""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from resilience.data.errors import CacheFullError, ProducerError, SourceError
from resilience.data.format import PUBLISHED_OFFSET, TABLE_OFFSET
from resilience.data.segments import SegmentReader
from tests.cases import slow
from tests.resilience.data import fault_sources as faults
from tests.resilience.data import watch
from tests.resilience.data.scene import Scene, count_up, end_process, make_stateful
from tests.resilience.data.segment_files import flip
from tests.resilience.data.watch import find_processes, read

HEADER_FIRST = 16
IS_ALIVE = pytest.mark.parametrize("is_alive", [True, False], ids=["alive", "dead"])


@pytest.fixture
def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Scene]:
    with watch.watched_scene(tmp_path, monkeypatch) as scene:
        yield scene


def kill(scene: Scene) -> None:
    for pid in find_processes(scene.log.parent):
        end_process(pid, signal.SIGKILL)


def test_what_is_no_batch_is_an_error_at_its_place(scene: Scene) -> None:
    loader = scene.open(faults.yield_a_set)
    read(loader, 0, 1, 2)

    for _ in range(2):
        with pytest.raises(TypeError, match="batch"):
            loader.read(3)
    read(loader, 4, 5, 2)


@pytest.mark.parametrize(
    ("source", "error", "text"),
    [
        (faults.fail_to_begin, PermissionError, "corpus.bin"),
        ("json:nothing", ProducerError, "json:nothing does not exist: the module has no nothing"),
        ("wrong_syntax:make", (SyntaxError, SourceError), "invalid syntax"),
    ],
)
def test_a_wrong_source_says_what_is_wrong_with_it(
    scene: Scene,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    source: Any,
    error: type[Exception],
    text: str,
) -> None:
    modules = tmp_path / "modules"
    modules.mkdir()
    (modules / "wrong_syntax.py").write_text("def make(:\n")
    monkeypatch.syspath_prepend(modules)
    more = {"reference": source} if isinstance(source, str) else {"source": source}
    loader = scene.open(**more)

    for _ in range(2):
        with pytest.raises(error, match=text):
            loader.read(0)


def test_the_end_of_the_data_stays_the_end(scene: Scene) -> None:
    """Each further pass over the loader is an epoch of as many batches."""
    loader = scene.open(options={"num_batches": 5}, lookback_length=0, prefetch_length=1)
    for is_killed in (False, False, True, False):
        if is_killed:
            kill(scene)
        assert [batch["number"] for batch in loader] == list(range(5))
        with pytest.raises(IndexError, match="the stage has 5"):
            loader.read(5)


def test_a_batch_beyond_the_budget_costs_itself_alone(scene: Scene) -> None:
    loader = scene.open(faults.grow_at, {"number": 5}, budget_mib=1)
    read(loader, *range(5))

    for _ in range(2):
        with pytest.raises(CacheFullError, match=r"batch 5 .* set resilience.mmap.budget_mib to 3"):
            loader.read(5)
    read(loader, *range(6, 40))


@pytest.mark.parametrize(
    ("seed", "num_deaths"), [(1, 8), *(slow(seed, 40) for seed in range(2, 9))]
)
def test_a_producer_killed_at_any_line_costs_no_batch(
    scene: Scene, tmp_path: Path, seed: int, num_deaths: int
) -> None:
    chance = random.Random(seed)
    plan = tmp_path / "plan"
    numbers = [chance.randrange(1, 1500) for _ in range(num_deaths)]
    plan.write_text(" ".join(map(str, numbers)))
    loader = scene.open(faults.die_at_lines, {"plan": str(plan)}, checkpoint_frequency=5)
    number = 0
    while plan.read_text():
        # By chance six in a row die over one batch, which is an error; asked again, it comes.
        with suppress(ProducerError):
            read(loader, number)
            number += 1
    read(loader, *range(number, number + 20))
    assert len(scene.producers()) == num_deaths + 1


@pytest.mark.parametrize("seed", [1, slow(2)])
def test_a_producer_killed_at_any_moment_costs_no_batch(scene: Scene, seed: int) -> None:
    """Also before it has begun, and without a moment for the kernel to let go of its lock."""
    chance = random.Random(seed)
    num_batches = 300 if seed == 1 else 3000
    kills = set(chance.sample(range(num_batches), num_batches // 40))
    loader = scene.open(count_up, prefetch_length=2)

    for number in range(num_batches):
        if number in kills:
            for _ in range(chance.choice([0, 100, 10_000, 300_000])):
                os.getppid()
            for pid in find_processes(scene.log.parent):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        read(loader, number)


@IS_ALIVE
@pytest.mark.parametrize("seed", [0, slow(1), slow(2)])
def test_a_torn_file_costs_no_batch(scene: Scene, seed: int, is_alive: bool) -> None:
    chance = random.Random(seed)
    loader = scene.open(lookback_length=100)
    read(loader, *range(30))
    if not is_alive:
        kill(scene)
    for path in scene.segments():
        size = path.stat().st_size
        os.truncate(path, chance.choice([0, 100, TABLE_OFFSET, chance.randrange(size), size - 1]))

    read(loader, *range(40))
    read(scene.open(lookback_length=100), *range(60))
    read(loader, *range(40, 60))


def flip_in(path: Path, part: str, number: int, fingerprint: bytes) -> bool:
    """Flip a bit of a batch, where it lies in the segment."""
    with SegmentReader.open(path, fingerprint) as segment:
        if number not in segment.numbers:
            return False
        entry, first = segment._entry(number), segment.first
    positions = {
        "payload": entry.offset + entry.num_bytes - 5,
        "entry": TABLE_OFFSET + (number - first) * 48 + 3,
        "header": HEADER_FIRST,
        "count": PUBLISHED_OFFSET,
    }
    flip(path, positions[part])
    return True


@pytest.mark.parametrize(
    ("part", "is_alive"), [("payload", True), ("entry", False), ("header", True), ("count", False)]
)
def test_a_flipped_bit_costs_no_batch(scene: Scene, part: str, is_alive: bool) -> None:
    loader = scene.open(lookback_length=100)
    # So many that the producer is done with the first segment: it would write the count anew.
    read(loader, *range(80))
    fingerprint = bytes.fromhex(loader._spec.fingerprint)
    if not is_alive:
        kill(scene)
    assert sum(flip_in(path, part, 12, fingerprint) for path in scene.segments()) == 1

    read(scene.open(lookback_length=100), *range(25))
    read(loader, *range(40))
    assert scene.lines("make").count(12) == 2


@pytest.mark.parametrize("damage", ["flip", "cut", "another"])
def test_a_damaged_state_of_a_loader_costs_no_batch(scene: Scene, damage: str) -> None:
    loader = scene.open(make_stateful, lookback_length=100, prefetch_length=4)
    read(loader, *range(40))
    kill(scene)
    states = sorted(scene.root.glob("*/state-*"))
    for path in states:
        content = path.read_bytes()
        if damage == "flip":
            path.write_bytes(content.replace(b'"number": ', b'"number": 1'))
        elif damage == "cut":
            path.write_bytes(content[:-1])
        else:
            path.write_bytes(states[0].read_bytes())

    read(loader, *range(40, 60))
    read(scene.open(make_stateful, lookback_length=100), *range(60))


def test_what_a_killed_producer_had_half_written_goes(scene: Scene) -> None:
    loader = scene.open(make_stateful)
    read(loader, *range(20))
    kill(scene)
    (cache,) = scene.root.glob("train-*")
    half = [cache / name for name in (".state-16.json.123", ".segment-00000009.batches")]
    for path in half:
        path.write_text("half")

    read(loader, *range(20, 60))

    # The next producer may have such files of its own by now.
    for path in half:
        with suppress(FileNotFoundError):
            assert path.read_bytes() != b"half"
