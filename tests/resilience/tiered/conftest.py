from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.resilience.tiered.s3_server import S3Server, s3_server


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """A server of S3's protocol without a bucket."""
    with s3_server(tmp_path_factory.mktemp("s3")) as running:
        yield running
