"""A job on nodes of its own, to which things happen: each rank and each daemon is a process.

A scene saves steps, breaks something, and asks whether the newest complete checkpoint that
was on offer before is still there, whole and to the byte, for every node that is left.
"""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import xxhash

from resilience.tiered.client import TieredClient
from resilience.tiered.shard import ShardId, ShardMeta, decode_meta
from tests.processes import stop
from tests.resilience.rank_processes import CONTEXT, PRELOADED
from tests.resilience.tiered.cluster import Cluster, make_cluster
from tests.resilience.tiered.daemons import LIMIT_S, MIB, Daemon, segments
from tests.scenarios.memoryd.rank_process import make_bytes, serve

NAMESPACE = "run"
GONE_S = 1.0
StepId = tuple[int, int]
"""Step and generation; later ones compare greater."""


class Rank:
    """A process that saves and loads through the daemon of its node."""

    def __init__(self, daemon: Daemon) -> None:
        CONTEXT.set_forkserver_preload(PRELOADED)
        self._pipe, orders = CONTEXT.Pipe()
        arguments = (orders, str(daemon.socket_path), NAMESPACE)
        self._process = CONTEXT.Process(target=serve, args=arguments)
        self._process.start()
        orders.close()

    def order(self, op: str, **words: Any) -> None:
        """Tell it what to do, without waiting."""
        self._pipe.send({"op": op, **words})

    def answer(self) -> dict[str, Any]:
        """Wait for what it says to the last order."""
        assert self._pipe.poll(2 * LIMIT_S), "a rank does not answer"
        return dict(self._pipe.recv())

    def ask(self, op: str, **words: Any) -> dict[str, Any]:
        self.order(op, **words)
        return self.answer()

    def kill(self) -> None:
        self._process.kill()
        self._process.join()
        self._process.close()
        self._pipe.close()


class Scene:
    """Nodes with a rank each; a new generation begins with new ranks.

    Each rank has a shard of its own, or ranks are replicas that share `num_shards` of them.
    """

    def __init__(self, cluster: Cluster, num_bytes: int, num_shards: int | None = None) -> None:
        self.cluster = cluster
        self.num_bytes = num_bytes
        self.num_shards = num_shards
        self.has_store = False
        self.generation = 0
        self.step = 0
        self.saved: StepId = (0, 0)
        """The last step that all ranks have saved."""
        self.ranks: dict[str, Rank] = {}
        self.living = set(cluster.nodes)

    def start(self) -> None:
        """Start all daemons and a rank on each node."""
        self.cluster.start()
        self.begin_generation()

    def close(self) -> None:
        self.kill_ranks()

    # What a job does

    def begin_generation(self) -> None:
        """Begin with new ranks on the nodes that are there."""
        self.kill_ranks()
        self.generation += 1
        self.ranks = {name: Rank(self.cluster[name]) for name in sorted(self.living)}

    def save(self, num_steps: int = 1, *, halting: Collection[str] = ()) -> None:
        """Save steps on all ranks at once; those that are to halt stay in the midst of it."""
        for _ in range(num_steps):
            self.order_save(halting=halting)
            wanted = {name: {"halted": True} if name in halting else {} for name in self.ranks}
            assert self.answers() == wanted
            if not halting:
                self.saved = (self.step, self.generation)

    def try_save(self) -> int:
        """Save a step on all ranks, which may find no room; returns how many have saved."""
        self.order_save()
        answers = list(self.answers().values())
        assert all(each.get("error") in (None, "VaultFullError") for each in answers), answers
        return sum(not each for each in answers)

    def order_save(self, *, halting: Collection[str] = ()) -> None:
        """Tell all ranks to save the next step, without waiting."""
        self.step += 1
        num_shards = self.num_shards or len(self.ranks)
        for number, (name, rank) in enumerate(self.ranks.items()):
            words = {"step": self.step, "generation": self.generation, "halt": name in halting}
            words |= {"shard": str(number % num_shards), "num_shards": num_shards}
            rank.order("save", **words, num_bytes=self.num_bytes)

    def answers(self) -> dict[str, dict[str, Any]]:
        """Wait for what all ranks say to their last order."""
        return {name: rank.answer() for name, rank in self.ranks.items()}

    def offered(self, name: str) -> list[StepId]:
        """Return the steps of which a node offers every shard, newest first."""
        answer = self.ranks[name].ask("steps")
        return [(step, generation) for step, generation, _ in answer.get("steps", [])]

    def newest(self) -> StepId:
        """Return the newest step that any node offers; (0, 0) where none does in mid-save."""
        offered = [found[0] for name in self.ranks if (found := self.offered(name))]
        return max(offered, default=(0, 0))

    def wait_complete(self) -> StepId:
        """Wait until each node offers the step that all saved last, or a newer one."""

        def is_there(name: str) -> bool:
            return bool(offered := self.offered(name)) and offered[0] >= self.saved

        self._wait(lambda: all(map(is_there, self.ranks)), f"{self.saved} complete")
        return self.saved

    def wait_safe(self, at: StepId) -> None:
        """Wait until each shard of a step, or of a newer one, is in two memories, if there are."""
        wanted = min(2, len(self.living))

        def is_safe() -> bool:
            places = self._places()
            return any(
                all(
                    places.count((each, num_shards, str(shard))) >= wanted
                    for shard in range(num_shards)
                )
                for each, num_shards in {(each, num_shards) for each, num_shards, _ in places}
                if each >= at
            )

        self._wait(is_safe, f"{at} in {wanted} memories")

    def wait_stored(self, at: StepId) -> None:
        """Wait until the store has all that it is to get, a step or a newer one with it."""

        def is_stored(name: str) -> bool:
            store = self.status(name)["store"]
            space = store["namespaces"].get(NAMESPACE, {})
            newest = space.get("newest_step") or 0
            return bool(newest >= at[0] and not space["steps_waiting"])

        self._wait(lambda: all(is_stored(name) for name in self.living), f"{at} stored")

    def wait_store_fails(self) -> None:
        """Wait until a daemon has noticed that its store does not do what it is told."""
        self._wait(
            lambda: any(self.status(name)["store"]["last_error"] for name in self.living),
            "an error of the store",
        )

    def wait_gone(self, name: str, others: Iterable[str]) -> None:
        """Wait until the others have seen that a daemon says nothing any more."""
        self._wait(
            lambda: all(name not in self.status(each)["nodes"] for each in others), f"{name} gone"
        )

    def check(self, before: StepId) -> StepId:
        """Let each node's rank load the newest step: what was offered before, or a newer one.

        Returns the newest. What each rank hears first counts: a job would go on from there.
        """
        found = [self._check_node(name, before) for name in self.ranks]
        return max(found)

    def watch(self, before: StepId, seconds: float) -> None:
        """Check again and again, while the daemons find out what has happened."""
        end_s = time.monotonic() + seconds
        while time.monotonic() < end_s:
            self.check(before)

    # What happens to it

    def kill_ranks(self, names: Iterable[str] | None = None) -> None:
        for name in list(self.ranks if names is None else names):
            self.ranks.pop(name).kill()

    def kill_daemon(self, name: str) -> None:
        self.cluster[name].kill()

    def start_daemon(self, name: str) -> None:
        self.cluster[name].start()

    def lose_node(self, name: str) -> None:
        """A machine is gone: its rank, its daemon and its memory."""
        self.kill_ranks([name] if name in self.ranks else [])
        self.cluster[name].kill()
        shutil.rmtree(self.cluster[name].folder)
        self.living.discard(name)

    def replace_node(self, name: str) -> None:
        """Another machine takes a lost one's place, with nothing in it."""
        self.cluster[name].start()
        self.living.add(name)

    def lose_all(self) -> None:
        """All memory is gone; other machines take the nodes' places."""
        self.kill_ranks()
        names = sorted(self.living)
        for name in names:
            self.lose_node(name)
        for name in names:
            self.replace_node(name)
        self.begin_generation()

    def stop_daemon(self, name: str) -> None:
        stop(self.cluster[name].pid)

    def continue_daemon(self, name: str) -> None:
        os.kill(self.cluster[name].pid, signal.SIGCONT)

    def flip_bit(self, name: str, at: StepId) -> None:
        """Flip a bit of each shard of a step that lies in a node's memory."""
        for segment in segments(self.cluster[name].folder):
            if any((each.id.step, each.id.generation) == at for each in _metas(segment)):
                with segment.open("r+b") as file:
                    file.seek(self.num_bytes // 3)
                    (byte,) = file.read(1)
                    file.seek(self.num_bytes // 3)
                    file.write(bytes([byte ^ 16]))

    def go_on(self) -> StepId:
        """Begin a new generation on what is left, and save a step that gets complete."""
        self.begin_generation()
        self.save()
        at = self.wait_complete()
        return self.check(at)

    def _check_node(self, name: str, before: StepId) -> StepId:
        """Load the newest step; where that went for a newer one meanwhile, load that."""
        while True:
            step, generation, shards = self._first(name, before)
            if all(self._is_loaded(name, step, generation, each) for each in shards):
                return step, generation
            at = (step, generation)
            self._wait(lambda at=at: self.offered(name)[:1] > [at], f"newer than {at} at {name}")

    def _first(self, name: str, before: StepId) -> tuple[int, int, list[str]]:
        answer = self.ranks[name].ask("steps")
        if "start memoryd there" in answer.get("text", ""):
            # A node that is gone for good may have the rest of it, for all this daemon knows.
            for gone in sorted(self.cluster.nodes.keys() - self.living):
                self.replace_node(gone)
            self._wait(lambda: bool(self.offered(name)), f"an offer of {name}")
            answer = self.ranks[name].ask("steps")
        assert answer.get("steps"), (name, before, answer, self.tell_end())
        step, generation, shards = answer["steps"][0]
        assert (step, generation) >= before, (name, before, answer, self.tell_end())
        return step, generation, shards

    def _is_loaded(self, name: str, step: int, generation: int, shard: str) -> bool:
        """Load a shard; says whether it is there. Other bytes than were saved are an error."""
        loaded = self.ranks[name].ask("load", step=step, generation=generation, shard=shard)
        if "error" in loaded:
            return False
        wanted = digest_of(step, generation, shard, self.num_bytes)
        assert loaded["digest"] == wanted, (name, step, generation, shard, loaded)
        return True

    def _places(self) -> list[tuple[StepId, int, str]]:
        """Return step, number of shards and shard of all that lies in any node's memory."""
        return [
            ((each.id.step, each.id.generation), each.num_shards, each.id.shard)
            for name in self.living
            for segment in segments(self.cluster[name].folder)
            for each in _metas(segment)
        ]

    def _wait(self, is_so: Callable[[], bool], what: str) -> None:
        end_s = time.monotonic() + LIMIT_S
        while not is_so():
            assert time.monotonic() < end_s, f"{what}: {self.tell_end()}"
            time.sleep(0.02)

    def status(self, name: str) -> dict[str, Any]:
        """Return what a daemon says of itself."""
        with TieredClient(self.cluster[name].socket_path) as client:
            return client.status()

    def describe(self) -> str:
        """Return what all daemons say of themselves."""
        running = [name for name, each in self.cluster.nodes.items() if each.process is not None]
        return "\n".join(f"{name}: {self.status(name)}" for name in running)

    def end_daemons(self) -> list[str]:
        """End all daemons in order; returns what they have said as errors."""
        self.kill_ranks()
        said = []
        for daemon in self.cluster.nodes.values():
            # With 3 the store lacks a step that a lost node had a part of.
            assert daemon.end() in (0, 3)
            said += daemon.outputs
        return said

    def tell_end(self) -> str:
        """End all daemons; returns what they have said of themselves and as errors."""
        lines = [self.describe()]
        for name, daemon in self.cluster.nodes.items():
            daemon.end(signal.SIGKILL)
            lines += [f"{name} said: {each[-2000:]}" for each in daemon.outputs]
        return "\n".join(lines)


@contextmanager
def make_scene(
    folder: Path,
    names: Sequence[str] = "ab",
    *,
    num_bytes: int = 3 * MIB + 5,
    num_shards: int | None = None,
    options: Sequence[str] = (),
    wired: Sequence[tuple[str, str]] = (),
    budget_mib: int = 64,
) -> Iterator[Scene]:
    """Make a job that runs."""
    words = ("--peer-gone-s", str(GONE_S), *options)
    with make_cluster(folder, names, wired=wired, budget_mib=budget_mib, options=words) as cluster:
        scene = Scene(cluster, num_bytes, num_shards)
        try:
            scene.start()
            yield scene
        finally:
            scene.close()


@cache
def digest_of(step: int, generation: int, shard: str, num_bytes: int) -> str:
    """Return the digest of the bytes that a rank has saved."""
    shard_id = ShardId(namespace=NAMESPACE, step=step, generation=generation, shard=shard)
    return xxhash.xxh3_128_hexdigest(make_bytes(shard_id, num_bytes))


def _metas(segment: Path) -> list[ShardMeta]:
    """Return the shards that a segment holds."""
    try:
        text = segment.with_name(segment.name + ".meta").read_bytes()
    except FileNotFoundError:
        return []
    return [decode_meta(line) for line in text.splitlines()]
