"""S3 and a folder on bad days, and wrong bytes in them: what a job could load it still can."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.resilience.tiered.daemons import MIB
from tests.resilience.tiered.fault_proxy import Fault, FaultProxy, fault_proxy
from tests.resilience.tiered.s3_server import S3Server, s3_server
from tests.scenarios.memoryd.scene import make_scene

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
    "503": lambda: Fault("status", status=503),
    "cut-while-sending": lambda: Fault("cut_up", after_bytes=MIB),
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


def test_bit_in_all_memory_is_mended_from_the_store(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    with make_scene(
        tmp_path, options=("--store", f"folder:{tmp_path / 'disk' / 'store'}")
    ) as scene:
        scene.save()
        scene.wait_stored(before := scene.wait_complete())
        scene.wait_safe(before)

        for name in "ab":
            scene.flip_bit(name, before)

        assert scene.check(before) == before
