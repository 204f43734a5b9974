"""A run's folder that hangs and a console that nobody reads hold up no step and no recovery."""

from __future__ import annotations

import os
import re
import select
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cases import slow
from tests.disks import frozen, open_disk
from tests.resilience.agent.runs import Run, fault, plan

LIMIT_S = 60.0


@pytest.fixture
def disk(run: Run) -> Iterator[Path]:
    """Return the run's folder, which is a disk of its own."""
    folder = run.folder / "run"
    with open_disk(folder, run.folder / "disk.img"):
        yield folder
        run.end()


def variables(run: Run, folder: Path, *faults: dict[str, object], **more: object) -> dict[str, str]:
    go_on = run.folder / "go-on"
    os.mkfifo(go_on)
    events = folder / "events.jsonl"
    return plan(*faults, EVENTS=events, NOTE=run.note, GO_ON=go_on, **more)


@pytest.mark.parametrize(
    ("kills", "last", "seconds"), [((40,), 120, 0), slow((40, 500, 1000), 1300, 60)]
)
def test_run_whose_folder_hangs_steps_on_and_replaces_workers(
    run: Run, disk: Path, kills: tuple[int, ...], last: int, seconds: float
) -> None:
    """Nothing is missing afterwards; those killed are the ones that had written the steps."""
    faults = (
        fault("wait_to_go_on", "forward", 0, 20),
        *(fault("kill", "forward", 0, step) for step in kills),
        fault("wait_to_go_on", "forward", 1, last),
    )
    told = variables(run, disk, *faults, STEPS=last + 20, STEP_S=0.04 if seconds else 0.01)
    run.start("n0", "--nproc-per-node", "2", variables=told)
    run.wait_for_note()

    with frozen(disk):
        since_s = time.monotonic()
        (run.folder / "go-on").write_text("")
        run.wait_for_note()
        assert all(each.step is None or each.step < 40 for each in run.events())
        time.sleep(max(0.0, since_s + seconds - time.monotonic()))
    (run.folder / "go-on").write_text("")

    assert run.wait() == 0, run.show()
    assert len(set(run.digests().values())) == 1
    steps = [each.step for each in run.events() if each.event == "step"]
    assert steps == list(range(last + 20)), run.show()
    found = Counter(each.event for each in run.events())
    assert found["generation_broken"] == found["worker_replaced"] == len(kills), run.show()
    assert found["generation_opened"] == len(kills) + 1
    deaths = [each for each in run.events() if each.fields.get("reason") == "died"]
    assert len(deaths) == len(kills)
    logs = sorted(disk.glob("logs/*/rank-0.generation-*.log"))
    printed = [int(step) for each in logs for step in re.findall(r"step (\d+)", each.read_text())]
    assert printed == list(range(last + 20))
    run.assert_nothing_left()


def test_console_that_nobody_reads_holds_up_nothing(run: Run) -> None:
    """What was said meanwhile is there for who reads it later."""
    console = run.folder / "n0.txt"
    os.mkfifo(console)
    file = os.open(console, os.O_RDWR)
    faults = (fault("kill", "forward", 0, 50), fault("tell", "forward", 1, 90))
    told = variables(run, run.folder / "run", *faults, STEPS=100, STEP_S=0)
    # What is there before the run fills the pipe but for a page.
    os.set_blocking(file, False)
    os.write(file, b"\n" * (15 << 12))
    os.set_blocking(file, True)
    run.start("n0", "--nproc-per-node", "2", variables={**told, "WORDS": "x" * 1000})
    # Nobody may read the console for a message of failure either.
    note = os.open(run.note, os.O_RDWR)
    assert select.select([note], [], [], LIMIT_S)[0], "no worker came to its place"
    os.close(note)
    said = bytearray()
    reader = threading.Thread(target=_read_all, args=(file, said))
    reader.start()

    status = run.agents["n0"].wait(LIMIT_S)
    os.write(file, b"END\n")
    reader.join()
    os.close(file)

    assert status == 0, said.decode()
    # A step whose gate nobody but the killed rank has passed is run again.
    steps = [int(each) for each in re.findall(rb"step (\d+)", bytes(said))]
    assert list(dict.fromkeys(steps)) == list(range(100))
    events = [each.step for each in run.events() if each.event == "step"]
    assert list(dict.fromkeys(events)) == list(range(100))
    assert len(steps) <= 101


def _read_all(file: int, said: bytearray) -> None:
    while not said.endswith(b"END\n"):
        said += os.read(file, 1 << 16)
