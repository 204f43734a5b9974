"""What is left of a run's checkpoints when its daemon and its agent are killed again and again."""

from __future__ import annotations

import hashlib
import os
import random
import select
import signal
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from resilience.tiered.client import TieredClient
from resilience.tiered.errors import LostError
from resilience.tiered.loader import Loaded, load
from resilience.tiered.saver import Saver
from resilience.tiered.status import ask_daemon, wait_for_daemon
from tests.processes import sent
from tests.resilience.agent.places import Place, start_agent
from tests.resilience.agent.runs import Run
from tests.resilience.state.nodes import PlainView
from tests.resilience.tiered.daemons import LIMIT_S, Daemon
from tests.tokens import TOKEN
from tests.waiting import wait_until

SAVING_S = 0.3
"""How long steps are saved at most before a kill."""
LONG_LIFE_S = 5.5
"""After ten short lives in a row the agent gives a daemon up; every few ones have to be long."""
LIVES_SHORT = 7


def state(step: int) -> PlainView:
    """Return tensors that differ from those of any other step."""
    draw = torch.Generator().manual_seed(step)
    tensors = [torch.randn(300, 301, generator=draw), torch.randn(99, generator=draw).double()]
    return PlainView([*tensors, torch.tensor(step)], {"step": step})


def digest(view: PlainView) -> str:
    return hashlib.blake2b(b"".join(view.content())).hexdigest()


@dataclass
class Story:
    """A run whose steps are saved in its daemon, which is killed meanwhile."""

    run: Run
    place: Place
    store: Path
    rng: random.Random
    step: int = 0
    digests: dict[int, str] = field(default_factory=dict)
    """Of each step, when it was saved."""
    newest: int = 0
    """The newest step that `status` has called complete."""

    def save(self) -> None:
        """Save one more step, and see what `status` says; the daemon may die in the midst."""
        self.step += 1
        view = state(self.step)
        self.digests[self.step] = digest(view)
        with suppress(LostError), self.place.client() as client:
            Saver(client, num_shards=1, has_begun=True).save(view, step=self.step, generation=0)
            self.see()

    def see(self) -> None:
        complete = [each["step"] for each in self.rows() if each["is_complete"]]
        self.newest = max(complete, default=self.newest)

    def is_stored(self) -> bool:
        return any(each["store"] for each in self.rows() if each["step"] == self.newest)

    def rows(self) -> list[dict[str, Any]]:
        """Return what `status` says of each step."""
        reply = ask_daemon(self.place.arena, token=TOKEN).reply
        return list(reply["jobs"]["run"]["steps"])

    def kill_daemon(self, *, after_s: float) -> None:
        """Kill the daemon at a random moment, also while it drains, and go on saving until then."""
        file = os.pidfd_open(self.place.pid())
        signals = [(after_s, signal.SIGKILL)]
        if self.rng.random() < 0.4:
            drained_s = self.rng.random() * 0.05
            signals = [(after_s, signal.SIGINT), (after_s + drained_s, signal.SIGKILL)]
        with sent(file, signals):
            while not select.select([file], [], [], 0.0)[0]:
                self.save()
        os.close(file)
        wait_for_daemon(self.place.arena, timeout_s=LIMIT_S, token=TOKEN)

    def kill_agent(self) -> None:
        """Kill the agent; the next one takes the daemon over, which never stops."""
        before = self.place.pid()
        self.run.agents["n0"].kill()
        self.run.agents["n0"].wait()
        self.save()
        start_agent(self.run, self.place)
        wait_until(lambda: "memoryd of an earlier agent goes on" in self.run.text())
        assert self.place.pid() == before

    def check(self) -> None:
        """Load the newest step that was complete, from memory and from the store alone.

        Steps that a daemon took in its last moments, unseen, may have let an older one go from
        memory: then they are complete themselves, and the older one is in the store.
        """
        seen = self.newest
        assert seen
        with self.place.client() as client:
            self.loaded(client)
            self.see()
            assert self.newest >= seen
            assert self.loaded(client).source == "ram"
        wait_until(self.is_stored)
        self.check_store()

    def check_store(self) -> None:
        folder = self.run.folder / f"reader-{self.step}"
        words = ("--store", f"folder:{self.store}")
        with Daemon(folder=folder, options=words).start() as reader:
            assert self.loaded(reader.client()).source == f"folder:{self.store}"

    def loaded(self, client: TieredClient) -> Loaded:
        view = state(0)
        found = load(client, view, step=self.newest, generation=0)
        assert digest(view) == self.digests[self.newest]
        assert view.rest == {"step": self.newest}
        return found


@pytest.mark.parametrize("num_kills", [2, pytest.param(20, marks=pytest.mark.slow)])
def test_newest_complete_step_outlives_every_kill(
    run: Run, place: Place, tmp_path: Path, num_kills: int
) -> None:
    """From memory and from the store, with its digest; no save but one in a kill is refused."""
    store = tmp_path / "store"
    place.write(store=store, keep=2, budget_mib=64)
    story = Story(run, place, store, random.Random(num_kills))
    gate = start_agent(run, place)
    story.save()
    for number in range(num_kills):
        if number == num_kills // 2:
            story.kill_agent()
            story.check()
        least_s = LONG_LIFE_S if number % LIVES_SHORT == LIVES_SHORT - 1 else 0.0
        story.kill_daemon(after_s=least_s + SAVING_S * story.rng.random())
        story.check()

    story.save()
    assert story.newest == story.step
    gate.write_bytes(b"")

    assert run.wait() == 0, run.show()
    story.check_store()
    assert not [each for each in run.events() if each.event == "service_lost"]
    assert place.daemons() == []
    assert not place.arena.exists()
    run.assert_nothing_left()
