"""S3 that refuses, hangs or has lost its bucket: known soon, in its own words, and made good."""

from __future__ import annotations

import http.client
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.resilience.tiered.daemons import MIB, Daemon, make_content, make_id, save
from tests.resilience.tiered.fault_proxy import Fault, FaultProxy, fault_proxy
from tests.resilience.tiered.news_reader import Reader
from tests.resilience.tiered.s3_server import S3Server

BUCKET = "news"


@pytest.fixture
def proxy(server: S3Server) -> Iterator[FaultProxy]:
    server.make_bucket(BUCKET)
    with fault_proxy(server.port) as between:
        yield between


@pytest.fixture
def daemon(tmp_path: Path, proxy: FaultProxy) -> Iterator[Daemon]:
    options = (
        *("--store", f"s3://{BUCKET}/{tmp_path.name}", "--store-endpoint", proxy.endpoint),
        *("--store-path-style", "--store-attempts", "2", "--store-deadline-s", "20"),
    )
    with Daemon(folder=tmp_path / "arena", options=options).start() as started:
        yield started


def empty(server: S3Server) -> None:
    """Remove the bucket, as somebody does who tidies up."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
    try:
        connection.request("POST", "/moto-api/reset")
        assert connection.getresponse().status == 200
    finally:
        connection.close()


def begin(fault: Fault) -> Callable[[S3Server, FaultProxy], None]:
    return lambda server, proxy: proxy.begin(fault)


def end(server: S3Server, proxy: FaultProxy) -> None:
    proxy.end()


BREAKS = {
    "expired-credentials": (begin(Fault("status", status=403)), end, "token expired"),
    "refused": (begin(Fault("refuse")), end, ""),
    "silent": (begin(Fault("hang")), end, ""),
    "deleted-bucket": (
        lambda server, proxy: empty(server),
        lambda server, proxy: server.make_bucket(BUCKET),
        "bucket",
    ),
}


@pytest.mark.parametrize("name", BREAKS)
def test_store_that_fails_is_news_and_gets_all_once_it_answers(
    server: S3Server, proxy: FaultProxy, daemon: Daemon, name: str
) -> None:
    breaks, mends, words = BREAKS[name]
    reader, client = Reader(daemon), daemon.client()
    reader.wait_for(trial="")

    breaks(server, proxy)
    save(client, make_id(4), make_content(MIB, 4))
    news = reader.wait_for(lacking=(4,))
    while not news.failure:
        news = reader.news()

    assert words in news.failure.lower()
    assert news.stored_step is None
    mends(server, proxy)
    assert reader.wait_for(stored_step=4, failure="", lacking=()).trial == ""
