"""S3 and a folder on bad days, and wrong bytes in them: what a job could load it still can."""

from __future__ import annotations

import http.client
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.resilience.tiered.cluster import wait_until
from tests.resilience.tiered.daemons import MIB
from tests.resilience.tiered.fault_proxy import Fault, FaultProxy, fault_proxy
from tests.resilience.tiered.s3_server import S3Server, s3_server
from tests.scenarios.memoryd.scene import Scene, make_scene

pytestmark = pytest.mark.slow

BUCKET = "scene"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[S3Server]:
    (tmp_path / "s3").mkdir()
    with s3_server(tmp_path / "s3") as running:
        running.make_bucket(BUCKET)
        yield running


@pytest.fixture
def proxy(server: S3Server) -> Iterator[FaultProxy]:
    with fault_proxy(server.port) as between:
        yield between


def s3_words(endpoint: str) -> tuple[str, ...]:
    return (
        *("--store", f"s3://{BUCKET}/runs", "--store-endpoint", endpoint, "--store-path-style"),
        *("--store-attempts", "1", "--store-deadline-s", "3", "--store-part-size-mib", "5"),
    )


Faults = Callable[[], Fault]
FAULTS = {
    "slow": lambda: Fault("delay", delay_s=0.02),
    "refusing": lambda: Fault("refuse"),
    "500": lambda: Fault("status", status=500),
    "503": lambda: Fault("status", status=503),
    "cut-while-sending": lambda: Fault("cut_up", after_bytes=MIB),
    "cut-before-the-answer": lambda: Fault("cut_down"),
    "silent": lambda: Fault("hang"),
}


@pytest.mark.parametrize("fault", [pytest.param(each, id=name) for name, each in FAULTS.items()])
def test_s3_that_fails_costs_no_checkpoint(
    tmp_path: Path, proxy: FaultProxy, fault: Faults
) -> None:
    with make_scene(tmp_path, options=s3_words(proxy.endpoint)) as scene:
        scene.save()
        scene.wait_stored(scene.wait_complete())

        proxy.begin(begun := fault())
        scene.save(2)
        before = scene.wait_complete()
        if begun.kind != "delay":
            scene.wait_store_fails()
        scene.check(before)
        scene.begin_generation()
        scene.check(before)

        proxy.end()
        scene.wait_stored(before)
        scene.lose_all()
        assert scene.check(before) == before
        assert scene.go_on() > before


@pytest.mark.parametrize("names", ["abc", "abcd"])
def test_two_nodes_gone_with_s3_behind_them(tmp_path: Path, server: S3Server, names: str) -> None:
    with make_scene(tmp_path, names, options=s3_words(server.endpoint)) as scene:
        scene.save(2)
        before = scene.wait_complete()
        scene.wait_stored(before)

        scene.kill_ranks()
        for name in "ab":
            scene.lose_node(name)
        scene.begin_generation()

        scene.check(before)
        assert scene.go_on() > before


def test_daemon_killed_while_it_sends_to_s3(tmp_path: Path, proxy: FaultProxy) -> None:
    with make_scene(tmp_path, options=s3_words(proxy.endpoint)) as scene:
        proxy.begin(Fault("hang"))
        scene.save()
        before = scene.wait_complete()
        for name in "ab":
            scene.kill_daemon(name)
        proxy.end()
        for name in "ab":
            scene.start_daemon(name)
        scene.begin_generation()
        scene.check(before)

        scene.wait_stored(before)
        scene.lose_all()
        assert scene.check(before) == before


@dataclass(frozen=True)
class Folder:
    """A store that is a folder."""

    path: Path

    @property
    def words(self) -> tuple[str, ...]:
        return ("--store", f"folder:{self.path}")

    def flip_bits(self, names: list[str]) -> None:
        for name in names:
            path = self.path / name
            path.write_bytes(flipped(path.read_bytes()))

    def data(self) -> list[str]:
        found = (self.path / "run" / "data").iterdir()
        return sorted(f"run/data/{each.name}" for each in found)


@dataclass(frozen=True)
class Bucket:
    """A store that is a bucket."""

    server: S3Server

    @property
    def words(self) -> tuple[str, ...]:
        return s3_words(self.server.endpoint)

    def flip_bits(self, names: list[str]) -> None:
        for name in names:
            self._ask("PUT", name, flipped(self._ask("GET", name)))

    def data(self) -> list[str]:
        listed = self._ask("GET", "?prefix=runs/run/data/").decode()
        return sorted(each.partition("<")[0] for each in listed.split("<Key>")[1:])

    def _ask(self, method: str, name: str, body: bytes | None = None) -> bytes:
        connection = http.client.HTTPConnection("127.0.0.1", self.server.port, timeout=30)
        try:
            connection.request(method, f"/{BUCKET}/{name}", body)
            answer = connection.getresponse()
            assert answer.status == 200, answer.read()
            return answer.read()
        finally:
            connection.close()


def flipped(content: bytes) -> bytes:
    place = len(content) // 2
    return content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :]


@pytest.fixture(params=["s3", "folder"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Bucket | Folder:
    if request.param == "folder":
        (tmp_path / "disk").mkdir()
        return Folder(tmp_path / "disk" / "store")
    return Bucket(request.getfixturevalue("server"))


def stored_twice(scene: Scene, store: Bucket | Folder) -> tuple[list[str], list[str]]:
    """Save two steps and wait until they are stored; returns the names of their data."""
    names: list[list[str]] = []
    for _ in range(2):
        scene.save()
        scene.wait_stored(scene.wait_complete())
        names.append(store.data())
    return names[0], [each for each in names[1] if each not in names[0]]


def test_bit_in_all_memory_is_mended_from_the_store(tmp_path: Path, store: Bucket | Folder) -> None:
    with make_scene(tmp_path, options=store.words) as scene:
        stored_twice(scene, store)
        before = scene.wait_complete()
        scene.wait_safe(before)

        for name in "ab":
            scene.flip_bit(name, before)

        assert scene.check(before) == before


def test_bit_in_the_store_costs_nothing_while_memory_has_it(
    tmp_path: Path, store: Bucket | Folder
) -> None:
    with make_scene(tmp_path, options=store.words) as scene:
        _, newest = stored_twice(scene, store)
        before = scene.wait_complete()
        scene.wait_safe(before)

        store.flip_bits(newest)
        scene.kill_ranks()
        scene.lose_node("a")
        scene.replace_node("a")
        scene.begin_generation()

        assert scene.check(before) == before


def test_bit_in_the_store_alone_gives_the_step_before(
    tmp_path: Path, store: Bucket | Folder
) -> None:
    with make_scene(tmp_path, options=store.words) as scene:
        _, newest = stored_twice(scene, store)
        step, generation = scene.step, scene.generation

        store.flip_bits(newest)
        scene.lose_all()

        assert scene.offered("a")[0] == (step, generation)
        words = {"step": step, "generation": generation, "shard": "0"}
        refused = scene.ranks["a"].ask("load", **words)
        assert refused["error"] == "TierError"
        assert "not what their checksum says" in refused["text"]
        older = (step - 1, generation)
        wait_until(lambda: all(scene.offered(name)[0] == older for name in "ab"))
        assert scene.check(older) == older


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Return a folder with room for 16 MiB."""
    folder = tmp_path / "small"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("no right to mount")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def test_full_disk_costs_no_checkpoint(tmp_path: Path, small_disk: Path) -> None:
    words = ("--store", f"folder:{small_disk / 'store'}", "--store-keep", "1")
    with make_scene(tmp_path, options=words) as scene:
        scene.save()
        scene.wait_stored(scene.wait_complete())
        filler = small_disk / "filler"
        filler.write_bytes(bytes(8 * MIB))

        scene.save(2)
        before = scene.wait_complete()
        scene.wait_store_fails()
        assert "No space left on device" in scene.describe()
        scene.check(before)
        filler.unlink()

        scene.wait_stored(before)
        scene.lose_all()
        assert scene.check(before) == before
