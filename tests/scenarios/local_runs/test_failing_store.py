"""A store that fails in the middle of a run: told wherever a person looks, and made good later."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from resilience.tiered.arena_folder import read_arenas
from tests.disks import frozen, open_disk
from tests.launcher.command import TIMEOUT_S, last_of_each, launch
from tests.launcher.local_world import end_all
from tests.launcher.real_runs import SMALL, go_on, named, steps
from tests.processes import command_of, descendants
from tests.resilience.tiered.fault_proxy import Fault, fault_proxy
from tests.resilience.tiered.s3_server import s3_server
from tests.waiting import wait_until

NUM_STEPS = 300
"""So many that the progress says twice how far the store is."""
_LIMIT_S = 3 * TIMEOUT_S


@dataclass
class Store:
    """A store that can be broken and mended."""

    url: str
    breaks: Callable[[], object]
    mends: Callable[[], object]
    words: str
    """Of the store's own about what is wrong, in lower case."""
    more: tuple[str, ...] = ()


@contextmanager
def s3(folder: Path, fault: Fault, words: str) -> Iterator[Store]:
    with s3_server(folder) as server, fault_proxy(server.port) as proxy:
        server.make_bucket("runs")
        more = (
            f"resilience.tiered.store.endpoint={proxy.endpoint}",
            "resilience.tiered.store.path_style=true",
            "resilience.tiered.store.attempts=2",
        )
        yield Store("s3://runs/team", lambda: proxy.begin(fault), proxy.end, words, more)


@contextmanager
def lost_folder(folder: Path) -> Iterator[Store]:
    disk, away = folder / "disk", folder / "away"
    disk.mkdir()

    def breaks() -> None:
        disk.rename(away)
        disk.write_bytes(b"")

    def mends() -> None:
        disk.unlink()
        away.rename(disk)

    yield Store(f"folder:{disk}/store", breaks, mends, "not a directory")


@contextmanager
def full_disk(folder: Path) -> Iterator[Store]:
    with open_disk(folder / "disk", folder / "image"):
        ballast = folder / "disk" / "ballast"

        def breaks() -> None:
            subprocess.run(["dd", "if=/dev/zero", f"of={ballast}", "bs=1M"], capture_output=True)

        # The run itself is not to fill the disk with what it keeps.
        more = ("resilience.tiered.store.keep=2",)
        yield Store(f"folder:{folder}/disk/store", breaks, ballast.unlink, "no space left", more)


@contextmanager
def read_only_disk(folder: Path) -> Iterator[Store]:
    with open_disk(folder / "disk", folder / "image"):

        def mount(how: str) -> Callable[[], object]:
            words = ["mount", "-o", f"remount,{how}", str(folder / "disk")]
            return lambda: subprocess.run(words, check=True)

        yield Store(f"folder:{folder}/disk/store", mount("ro"), mount("rw"), "read-only file")


@contextmanager
def hanging_disk(folder: Path) -> Iterator[Store]:
    with open_disk(folder / "disk", folder / "image"), ExitStack() as stack:

        def freeze() -> None:
            stack.enter_context(frozen(folder / "disk"))

        more = ("resilience.tiered.store.deadline_s=5",)
        yield Store(f"folder:{folder}/disk/store", freeze, stack.close, "no answer", more)


STORES = {
    "expired": lambda path: s3(path, Fault("status", status=403), "expired"),
    "unreachable": lambda path: s3(path, Fault("refuse"), ""),
    "silent": lambda path: s3(path, Fault("hang"), ""),
    "lost": lost_folder,
    "full": full_disk,
    "read-only": read_only_disk,
    "hanging": hanging_disk,
}
CASES = [*((name, 4) for name in STORES), ("expired", NUM_STEPS - 40), ("full", NUM_STEPS - 40)]


@dataclass
class Run:
    """A run that goes on in the background, and its console."""

    folder: Path
    process: subprocess.Popen[bytes]

    @property
    def path(self) -> Path:
        return self.folder / "runs" / "run"

    def wait_until(self, is_there: Callable[[], bool]) -> None:
        wait_until(
            lambda: is_there() or self.process.poll() is not None, self.console, limit_s=_LIMIT_S
        )
        assert self.process.poll() is None, self.console()

    def console(self) -> str:
        return (self.folder / "console").read_text()

    def safe(self) -> str:
        """Return what `launcher status` says of what is kept."""
        lines = launch("status", str(self.path), folder=self.folder).out.splitlines()
        return next((each for each in lines if each.startswith("  safe ")), "")

    def tiers(self) -> str:
        """Return what the node's daemon says of the store."""
        return subprocess.run(
            [
                *(sys.executable, "-m", "resilience.tiered", "status"),
                *("--dir", str(read_arenas(self.path)["node-0"])),
                *("--token-file", str(self.path / "run.token")),
            ],
            capture_output=True, text=True, timeout=_LIMIT_S, check=True,
        ).stdout  # fmt: skip


@contextmanager
def started(folder: Path, *words: str) -> Iterator[Run]:
    with (folder / "console").open("wb") as console:
        process = subprocess.Popen(
            [sys.executable, "-m", "launcher", *words], cwd=folder, stdout=console, stderr=console
        )
    run = Run(folder, process)
    try:
        yield run
    finally:
        end_all(folder)
        process.kill()
        process.wait()
        launch("clean", str(run.path), folder=folder)


def training(folder: Path, store: Store) -> AbstractContextManager[Run]:
    words = last_of_each(
        *SMALL,
        "run.name=run",
        f"trainer.max_steps={NUM_STEPS}",
        "trainer.optimizer.decay_steps=200",
        "resilience/tiered=folder",
        f"resilience.tiered.store.url={store.url}",
        "resilience.tiered.ram.every_n_steps=2",
        "resilience.tiered.store.every_n_steps=4",
        *store.more,
    )
    return started(folder, *words)


@pytest.mark.slow
def test_a_run_whose_daemon_hangs_has_not_succeeded(tmp_path: Path) -> None:
    more = ("run.name=run", "trainer.max_steps=200", "trainer.optimizer.decay_steps=200")
    with started(tmp_path, *last_of_each(*SMALL, *more)) as run:
        process = run.process
        events = run.path / "events.jsonl"
        run.wait_until(lambda: events.exists() and bool(named(run.path, "step_stored")))
        daemons = [each for each in descendants(process.pid) if b"memoryd" in command_of(each)]
        assert daemons
        for each in daemons:
            os.kill(each, signal.SIGSTOP)

        assert process.wait(_LIMIT_S) == 74, run.console()

        assert "no checkpoint of step 200: the daemon or the copy stood still" in run.console()
        assert "not all of it is in the store (told by node-0)" in run.console()
        assert "in the store: step 1 of 200" in run.console().splitlines()[-1]
        assert list((run.path / "checkpoint").iterdir()), "the weights were written all the same"
        again = go_on(run.path)
        assert again.status == 0, again.out + again.err
        assert named(run.path, "step_stored")[-1].step == 200
        log = (run.path / "logs" / "node-0.log").read_text()
        assert log.count("start 1 of the run begins") == 1, log


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    folder = tmp_path_factory.mktemp("undisturbed")
    store = Store(f"folder:{folder}/store", lambda: None, lambda: None, "")
    with training(folder, store) as run:
        assert run.process.wait(_LIMIT_S) == 0, run.console()
        return [each["loss"] for each in steps(run.path)]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "after"), CASES)
def test_store_that_fails_is_told_in_five_places_and_gets_all_later(
    tmp_path: Path, undisturbed: list[float], name: str, after: int
) -> None:
    is_late = after > NUM_STEPS // 2
    with STORES[name](tmp_path) as store, training(tmp_path, store) as run:
        events = run.path / "events.jsonl"
        run.wait_until(lambda: events.exists() and bool(named(run.path, "step_stored")))
        run.wait_until(lambda: any((each.step or 0) >= after for each in named(run.path, "step")))
        store.breaks()
        if not is_late:
            run.wait_until(lambda: "the store fails on node-0 for " in run.safe())
            assert store.words in run.safe().lower()
            assert re.search(r" has (failed|not answered) for \d", " ".join(run.tiers().split()))
        status = run.process.wait(_LIMIT_S)

        console = run.console()
        lines = console.splitlines()
        assert status == 74, console
        assert "Traceback" not in console
        assert lines[-1].startswith("  store  "), console
        assert "the store fails on node-0 for " in lines[-1]
        assert store.words in lines[-1].lower()
        if not is_late:
            progress = [each for each in lines if f" of {NUM_STEPS}, loss " in each]
            assert any("the store fails on node-0 for " in each for each in progress), console
        assert "the store fails on node-0" in (run.path / "report.html").read_text()
        assert [each.event for each in named(run.path, "store_failing")]

        store.mends()
        again = go_on(run.path)
        assert again.status == 0, again.out + again.err
        assert f"in the store: step {NUM_STEPS} of {NUM_STEPS}" in run.safe()
        assert [each["loss"] for each in steps(run.path)] == undisturbed
