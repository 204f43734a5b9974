"""A real server of S3's protocol for the tests: a process on a free port, all in its memory."""

from __future__ import annotations

import http.client
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import pytest

START_DEADLINE_S = 60.0
_LOG = "s3-server.log"

ENVIRONMENT = {
    "AWS_ACCESS_KEY_ID": "testing",
    "AWS_SECRET_ACCESS_KEY": "testing",
    "AWS_EC2_METADATA_DISABLED": "true",
    "AWS_CONFIG_FILE": "/dev/null",
    "AWS_SHARED_CREDENTIALS_FILE": "/dev/null",
}
"""What a client needs to talk to it, and to nobody else."""

NEEDED = {"moto": "moto[server]", "flask": "moto[server]", "s3torchconnectorclient": "extra s3"}


def missing() -> str | None:
    """Return why there is no server here; None where there is one."""
    lacking = sorted({package for module, package in NEEDED.items() if find_spec(module) is None})
    return f"not installed: {', '.join(lacking)}" if lacking else None


@dataclass(frozen=True)
class S3Server:
    port: int

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def make_bucket(self, name: str) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        try:
            connection.request("PUT", f"/{name}")
            answer = connection.getresponse()
            assert answer.status == 200, answer.read()
        finally:
            connection.close()


@contextmanager
def s3_server(folder: Path) -> Iterator[S3Server]:
    """Start the server, and end it behind the tests; skips where none is installed."""
    with s3_environment(), s3_process(folder) as server:
        yield server


@contextmanager
def s3_environment() -> Iterator[None]:
    """Let clients talk to the server."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ENVIRONMENT.items():
            patch.setenv(name, value)
        for name in ("AWS_ENDPOINT_URL", "AWS_PROFILE", "AWS_SESSION_TOKEN", "http_proxy"):
            patch.delenv(name, raising=False)
        yield


@contextmanager
def s3_process(folder: Path) -> Iterator[S3Server]:
    """Start the server alone: what is in the environment stays as it is."""
    if reason := missing():
        pytest.skip(reason)
    with _process(folder) as process:
        yield S3Server(_read_port(process, folder / _LOG))


@contextmanager
def _process(folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    with (folder / _LOG).open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", "0"],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=folder,
        )
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _read_port(process: subprocess.Popen[bytes], log: Path) -> int:
    until_s = time.monotonic() + START_DEADLINE_S
    while time.monotonic() < until_s and process.poll() is None:
        if found := re.search(r"http://127\.0\.0\.1:(\d+)", log.read_text()):
            return int(found[1])
        time.sleep(0.05)
    raise AssertionError(f"the S3 server did not start: {log.read_text()}")
