"""Text in a bucket, on a real server of S3's protocol."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import boto3
import pytest
from pydantic import ValidationError

from launcher.job.workload import S3Jsonl
from recipes_training.data import s3
from recipes_training.data.jsonl import map_token_file, open_encoder, token_file, write_token_file
from recipes_training.data.loading import open_samples
from recipes_training.data.tokens import describe_samples
from recipes_training.errors import DataError
from tests.recipes_training.groups import make_group
from tests.recipes_training.jobs import make_job
from tests.resilience.tiered.s3_server import S3Server, s3_server

_NUMBERS = count(1)


class Bucket:
    """A bucket of its own."""

    def __init__(self, server: S3Server) -> None:
        self.name = f"texts-{next(_NUMBERS)}"
        self._client = boto3.client("s3", endpoint_url=server.endpoint, region_name="us-east-1")
        self._endpoint = server.endpoint
        server.make_bucket(self.name)

    def put(self, key: str, *texts: str) -> None:
        self.put_bytes(key, "".join(f"{json.dumps({'text': text})}\n" for text in texts).encode())

    def put_bytes(self, key: str, content: bytes) -> None:
        self._client.put_object(Bucket=self.name, Key=key, Body=content)

    def data(self, prefix: str = "/", **changed: Any) -> S3Jsonl:
        return make_data(
            url=f"s3://{self.name}{prefix}", endpoint=self._endpoint, path_style=True, **changed
        )


def make_data(**changed: Any) -> S3Jsonl:
    options = {
        "kind": "s3_jsonl",
        "seq_length": 4,
        "url": "s3://texts/train/",
        "text_key": "text",
        "tokenizer": "bytes",
        "endpoint": None,
        "region": None,
        "path_style": False,
    }
    return S3Jsonl(**{**options, **changed})


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    with s3_server(tmp_path_factory.mktemp("s3")) as started:
        yield started


@pytest.fixture
def bucket(server: S3Server) -> Bucket:
    return Bucket(server)


def read_tokens(data: S3Jsonl, folder: Path) -> list[int]:
    encode, _ = open_encoder(data.tokenizer)
    path = token_file(data, folder)
    write_token_file(data, path, node="n", encode=encode)
    return map_token_file(path).tolist()


def test_objects_are_read_in_the_order_of_their_keys(bucket, tmp_path):
    for key in ("train/b", "train/a", "train/Z", "train/\u00e9", "other/a"):
        bucket.put(key, key[-1])
    bucket.put_bytes("train/", b"")
    bucket.put_bytes("train/c", b'\n{"text": "c"}')

    tokens = read_tokens(bucket.data("/train/"), tmp_path)

    assert tokens == [90, 256, 97, 256, 98, 256, 99, 256, 0xC3, 0xA9, 256]
    assert read_tokens(bucket.data(""), tmp_path) == [97, 256, *tokens], "the whole bucket"


def test_objects_and_lines_longer_than_a_block(bucket, tmp_path, monkeypatch):
    monkeypatch.setattr(s3, "_BLOCK_BYTES", 1000)
    texts = ["x" * number for number in (999, 10, 5000, 0, 1)]
    bucket.put("a", *texts)
    bucket.put("b", "end")

    tokens = read_tokens(bucket.data(), tmp_path)

    assert tokens == [token for text in [*texts, "end"] for token in (*text.encode(), 256)]


def test_a_worker_opens_its_samples(bucket, tmp_path):
    bucket.put("a", "a long way", "to go")

    samples = open_samples(bucket.data(), make_job().model, run_dir=tmp_path, group=make_group())

    assert samples.num_samples == 4
    assert bytes(samples.read([0])[0].tolist()) == b"a lon"


def test_who_comes_later_lists_no_bucket(bucket, tmp_path, monkeypatch):
    """It may be out of reach by then, or hold something else; the run has its tokens."""
    bucket.put("a", "a long way", "to go")
    data, model = bucket.data(), make_job().model
    first = open_samples(data, model, run_dir=tmp_path, group=make_group())
    monkeypatch.setattr(s3, "list_objects", lambda data: pytest.fail("it was listed"))

    again = open_samples(data, model, run_dir=tmp_path, group=make_group())

    assert describe_samples(again) == describe_samples(first)
    other = data.model_copy(update={"text_key": "body"})
    with pytest.raises(pytest.fail.Exception, match="it was listed"):
        open_samples(other, model, run_dir=tmp_path, group=make_group())


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda bucket: bucket.put("a", "A"), id="content"),
        pytest.param(lambda bucket: bucket.put("b", "b"), id="another-object"),
    ],
)
def test_file_of_tokens_is_another_for_other_objects(bucket, tmp_path, change):
    bucket.put("a", "a")
    data = bucket.data()
    first = token_file(data, tmp_path)
    assert token_file(data, tmp_path) == first

    change(bucket)

    assert token_file(data, tmp_path) != first


@pytest.mark.parametrize(
    "changed", [{"text_key": "body"}, {"tokenizer": "/x"}, {"url": "s3://{}/a"}]
)
def test_file_of_tokens_is_another_for_other_options(bucket, tmp_path, changed):
    bucket.put("a", "a")
    other = {key: value.format(bucket.name) for key, value in changed.items()}

    data = bucket.data()

    assert token_file(data.model_copy(update=other), tmp_path) != token_file(data, tmp_path)
    longer = data.model_copy(update={"seq_length": 8})
    assert token_file(longer, tmp_path) == token_file(data, tmp_path)


def test_objects_that_change_while_they_are_read_are_noticed(bucket, tmp_path):
    bucket.put("a", "a")
    data = bucket.data()
    path = token_file(data, tmp_path)
    bucket.put("b", "b")

    with pytest.raises(DataError, match=r"^the data changed while it was read; leave the data as"):
        write_token_file(data, path, node="n", encode=open_encoder("bytes")[0])

    assert list(tmp_path.iterdir()) == []
    with pytest.raises(DataError, match=r"^no tokens at .*: the data changed since"):
        map_token_file(path)


def test_broken_line_is_named(bucket, tmp_path):
    bucket.put("a", "a")
    bucket.put_bytes("b", b'{"text": "b"}\n\xff\n')

    with pytest.raises(DataError, match=rf"^data.url s3://{bucket.name}/b, line 2 is no JSON: "):
        read_tokens(bucket.data(), tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({}, r"data.url s3://texts-\d+/train has no object"),
        ({"url": "s3://nowhere/train"}, "cannot read data.url s3://nowhere.*bucket does not exist"),
        ({"endpoint": "http://127.0.0.1:1"}, "cannot read data.url s3://texts.*connection refused"),
    ],
)
def test_bucket_without_text_or_that_cannot_be_read_is_named(bucket, tmp_path, changed, told):
    bucket.put_bytes("train/", b"")

    with pytest.raises(DataError, match=f"^{told}"):
        token_file(bucket.data("/train").model_copy(update=changed), tmp_path)


def test_server_that_never_answers_is_not_waited_for(tmp_path, monkeypatch):
    monkeypatch.setattr(s3, "_LISTING_DEADLINE_S", 0.5)
    monkeypatch.setattr(s3, "_ATTEMPTS", 1)
    # Else the client may find first that it has none.
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        data = make_data(endpoint=f"http://127.0.0.1:{silent.getsockname()[1]}", path_style=True)

        with pytest.raises(
            DataError, match=r"^cannot read data.url s3://texts/train/: no answer within 0.5 s$"
        ):
            token_file(data, tmp_path)
    # The call that was left ends with the server; it may not outlive the interpreter.
    for thread in threading.enumerate():
        if thread.name == "store call":
            thread.join(60)
            assert not thread.is_alive()


def test_missing_package_is_named(bucket, tmp_path, monkeypatch):
    bucket.put("a", "a")
    monkeypatch.setitem(sys.modules, "s3torchconnector", None)

    with pytest.raises(DataError, match=r"^data.kind 's3_jsonl' needs the package's extra s3: "):
        read_tokens(bucket.data(), tmp_path)


def test_where_the_tokens_are_is_told_without_torch(bucket, tmp_path):
    """A producer of batches asks for it, and has to start fast."""
    bucket.put("a", "a")
    program = (
        "import sys\n"
        "from pathlib import Path\n"
        "from launcher.job.workload import S3Jsonl\n"
        "from recipes_training.data.jsonl import token_file\n"
        "data = S3Jsonl.model_validate_json(sys.argv[1])\n"
        "print(token_file(data, Path('/')).name, 'torch' in sys.modules)\n"
    )

    done = subprocess.run(
        [sys.executable, "-c", program, bucket.data().model_dump_json()],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=60,
    )

    assert done.stdout.split() == [token_file(bucket.data(), tmp_path).name, "False"]


@pytest.mark.parametrize(
    ("changed", "allowed"),
    [
        ({"url": "/data/train"}, "s3://BUCKET or s3://BUCKET/PREFIX"),
        ({"url": "s3://"}, "s3://BUCKET or s3://BUCKET/PREFIX"),
        ({"url": "s3://Texts/train"}, "s3://BUCKET or s3://BUCKET/PREFIX"),
        ({"url": "s3://texts/a\nb"}, "s3://BUCKET or s3://BUCKET/PREFIX"),
        ({"endpoint": "127.0.0.1:9000"}, "http://HOST:PORT or https://HOST:PORT"),
        ({"region": "us east"}, "a region's name such as us-east-1"),
        ({"text_key": ""}, "one line of printable text"),
    ],
)
def test_what_a_recipe_may_not_say_is_refused(changed, allowed):
    with pytest.raises(ValidationError, match=f"allowed: {allowed}") as refused:
        make_data(**changed)

    assert [each["loc"] for each in refused.value.errors()] == [(next(iter(changed)),)]
