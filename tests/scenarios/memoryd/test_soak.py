"""An hour's work in minutes, with random kills: nothing grows, and nothing is lost."""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import pytest

from tests.ports import free_ports
from tests.resilience.tiered.daemons import MIB, Daemon, make_content, segments
from tests.resilience.tiered.http_client import Client, head, shard_meta, shard_path
from tests.scenarios.memoryd.process_use import read_use
from tests.scenarios.memoryd.scene import Scene, make_scene

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

NUM_SAVES = 10_000
NUM_HTTP_SAVES = 1_000
WORKER_LIFE = 100
"""How many saves a worker lives, on average."""
DAEMON_LIFE = 1_000
HTTP_DAEMON_LIFE = 250
SLACK_BYTES = 4 * MIB
LIBRARIES_BYTES = 24 * MIB
"""What is mapped of Python itself."""

Sample = tuple[int, int, int, int]
"""Memory, descriptors, threads, and files in the folder; segments are bounded by the budget."""


def sample(daemon: Daemon) -> Sample:
    use = read_use(daemon.process)
    held = segments(daemon.folder)
    assert sum(each.stat().st_size for each in held) <= daemon.budget_mib * MIB
    assert use.pss_bytes - use.own_bytes <= daemon.budget_mib * MIB + LIBRARIES_BYTES
    others = [each for each in daemon.folder.iterdir() if not each.name.startswith("segment-")]
    return use.own_bytes, use.num_descriptors, use.num_threads, len(others)


def check_flat(samples: Sequence[Sample]) -> None:
    """Compare the first tenth with the last: the most of the one with the middle of the other."""
    tenth = len(samples) // 10
    assert tenth >= 5, "too few samples"
    first = [max(column) for column in zip(*samples[:tenth], strict=True)]
    last = [statistics.median(column) for column in zip(*samples[-tenth:], strict=True)]
    print(f"first tenth, the most: {first}; last tenth, the middle: {last}")  # noqa: T201
    assert last[0] <= first[0] * 1.1 + SLACK_BYTES
    assert all(late <= early for early, late in zip(first[1:], last[1:], strict=True))


def test_ten_thousand_saves_with_random_kills(tmp_path: Path) -> None:
    rng = random.Random(1)
    names = "ab"
    samples: dict[str, list[Sample]] = {name: [] for name in names}
    num_saved = num_killed = 0
    with make_scene(tmp_path, names, num_bytes=MIB, budget_mib=32) as scene:
        scene.save()
        scene.wait_complete()
        while num_saved < NUM_SAVES:
            num_saved += scene.try_save()
            if rng.random() < len(names) / WORKER_LIFE:
                num_killed += 1
                kill_worker(scene, rng.choice(names))
            if rng.random() < len(names) / DAEMON_LIFE:
                num_killed += 1
                kill_daemon(scene, rng.choice(names))
            if scene.step % 20 == 0:
                for name in names:
                    samples[name].append(sample(scene.cluster[name]))

        print(f"{num_saved} saves, {num_killed} kills")  # noqa: T201
        for each in samples.values():
            check_flat(each)
        assert scene.go_on() > (1, 1)
        assert all("Traceback" not in said for said in scene.end_daemons())


def kill_worker(scene: Scene, name: str) -> None:
    """Kill a worker while it saves, wherever it is."""
    before = scene.newest()
    scene.order_save()
    scene.begin_generation()
    scene.check(before)


def kill_daemon(scene: Scene, name: str) -> None:
    """Kill a daemon while all workers save through it, wherever it is."""
    before = scene.newest()
    scene.order_save()
    scene.kill_daemon(name)
    scene.start_daemon(name)
    scene.answers()
    scene.begin_generation()
    scene.check(before)


def test_a_thousand_saves_over_http_with_random_kills(tmp_path: Path) -> None:
    rng = random.Random(2)
    (port,) = free_ports(1)
    samples: list[Sample] = []
    words = ("--http", f"127.0.0.1:{port}")
    daemon = Daemon(folder=tmp_path / "arena", budget_mib=16, options=words, is_real=True)
    with daemon.start():
        client = Client(("127.0.0.1", port))
        assert client.create("run", 1).status == 201
        for step in range(1, NUM_HTTP_SAVES + 1):
            if rng.random() < 1 / WORKER_LIFE:
                leave_in_the_midst(client, rng, step)
                client = Client(("127.0.0.1", port))
            assert client.put("run", 0, step, make_content(MIB, step)).status == 200
            if rng.random() < 1 / HTTP_DAEMON_LIFE:
                with suppress(OSError):
                    leave_in_the_midst(client, rng, step + 1)
                daemon.kill()
                daemon.start()
                client = Client(("127.0.0.1", port))
            assert client.latest("run", 1) == [step]
            if step % 10 == 0:
                assert client.get("run", 0, step).body == make_content(MIB, step)
                samples.append(sample(daemon))
        client.close()

        check_flat(samples)
        assert daemon.end() == 0
        assert all("Traceback" not in said for said in daemon.outputs)


def leave_in_the_midst(client: Client, rng: random.Random, step: int) -> None:
    """End as a killed worker does, some of the body being sent."""
    body = make_content(MIB, step + NUM_HTTP_SAVES)
    words = {"Content_Length": str(MIB), "Shard_Meta": shard_meta(body)}
    client.send(head("POST", shard_path("run", 0, step), **words) + body[: rng.randrange(MIB)])
    client.close()
