"""What S3 is sent, counted there: each distinct shard once, however many replicas hold it."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.resilience.tiered.daemons import MIB
from tests.resilience.tiered.fault_proxy import FaultProxy, fault_proxy
from tests.resilience.tiered.s3_server import s3_server
from tests.scenarios.memoryd.scene import make_scene

pytestmark = pytest.mark.slow

SIZE = 3 * MIB + 5
OVERHEAD = 1.05
"""Heads of requests, descriptions and listings, beside the bytes of the shards."""
_UPLOAD = re.compile(r'"(PUT|POST) /traffic/\S*/data/([0-9a-f]{32})\S*[?&](\w+)=?\S* HTTP')


@dataclass(frozen=True)
class Meter:
    """An S3 server behind a wire; both count."""

    proxy: FaultProxy
    log: Path

    @property
    def words(self) -> tuple[str, ...]:
        endpoint = self.proxy.endpoint
        return ("--store", "s3://traffic/runs", "--store-endpoint", endpoint, "--store-path-style")

    def parts(self) -> Counter[str]:
        """Return how many requests have brought bytes of each digest."""
        return Counter(digest for method, digest, _ in self._uploads() if method == "PUT")

    def wholes(self) -> Counter[str]:
        """Return how often an upload of each digest was made whole."""
        return Counter(
            digest
            for method, digest, name in self._uploads()
            if (method, name) == ("POST", "uploadId")
        )

    def _uploads(self) -> list[tuple[str, str, str]]:
        return _UPLOAD.findall(self.log.read_text())


@pytest.fixture
def meter(tmp_path: Path) -> Iterator[Meter]:
    folder = tmp_path / "s3"
    folder.mkdir()
    with s3_server(folder) as server, fault_proxy(server.port) as proxy:
        server.make_bucket("traffic")
        yield Meter(proxy, folder / "s3-server.log")


@pytest.mark.parametrize(
    ("names", "num_shards"),
    [
        pytest.param("ab", 1, id="2-replicas"),
        pytest.param("abcd", 1, id="4-replicas"),
        pytest.param("abcd", 2, id="2-replicas-of-2-shards"),
    ],
)
def test_replicas_are_sent_once(tmp_path: Path, meter: Meter, names: str, num_shards: int) -> None:
    num_replicas, num_steps = len(names) // num_shards, 4
    with make_scene(
        tmp_path, names, num_bytes=SIZE, num_shards=num_shards, options=meter.words
    ) as scene:
        for _ in range(num_steps):
            scene.save()
            scene.wait_complete()
        scene.wait_stored((scene.step, scene.generation))

        naive_bytes = len(names) * num_steps * SIZE
        assert set(meter.wholes().values()) == set(meter.parts().values()) == {1}
        assert len(meter.wholes()) == num_shards * num_steps
        assert naive_bytes / num_replicas < meter.proxy.bytes_up
        assert meter.proxy.bytes_up < naive_bytes / num_replicas * OVERHEAD


def test_what_is_there_is_not_sent_again_by_who_is_left(tmp_path: Path, meter: Meter) -> None:
    with make_scene(tmp_path, "abcd", num_bytes=SIZE, num_shards=1, options=meter.words) as scene:
        scene.save(3)
        scene.wait_stored(scene.wait_complete())
        for name in "bcd":
            scene.kill_daemon(name)
            scene.start_daemon(name)
        scene.lose_node("a")
        before = scene.go_on()
        scene.wait_stored(before)
        scene.save(2)
        scene.wait_stored(scene.wait_complete())

        assert set(meter.wholes().values()) == set(meter.parts().values()) == {1}
        assert len(meter.wholes()) == scene.step
        assert meter.proxy.bytes_up < scene.step * SIZE * OVERHEAD


def test_node_that_dies_while_it_sends_costs_its_own_upload_alone(
    tmp_path: Path, meter: Meter
) -> None:
    with make_scene(tmp_path, "abcd", num_bytes=SIZE, num_shards=1, options=meter.words) as scene:
        scene.save()
        scene.wait_stored(scene.wait_complete())
        scene.save(3)
        scene.wait_complete()
        scene.lose_node("b")
        scene.begin_generation()
        scene.wait_stored((scene.step, scene.generation - 1))

        assert len(meter.wholes()) == scene.step
        assert sum(meter.wholes().values()) <= scene.step + 1
        assert meter.proxy.bytes_up < (scene.step + 1) * SIZE * OVERHEAD
