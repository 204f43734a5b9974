from __future__ import annotations

import base64
import functools
import os
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import boto3
import pytest

from resilience.data.errors import CacheKeyError, DamagedBatchError
from resilience.data.loader import CachedLoader, cached
from resilience.data.sealing import (
    KEY_NAME,
    AesGcmSealer,
    FileKeys,
    open_sealer,
    read_key_file,
)
from resilience.settings import CacheEncryption
from tests.resilience.data import source_functions
from tests.resilience.data.scene import make_settings
from tests.resilience.tiered.s3_server import S3Server, s3_server

KEY = bytes(range(200, 232))
SEGMENT = "segment-0.batches"


def by_file(path: Path) -> CacheEncryption:
    return CacheEncryption(
        kind="file", key_file=str(path), kms_key_id=None, endpoint=None, region=None
    )


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    return write_key(tmp_path / "key", KEY)


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    folder = tmp_path / "train-0of1-0123456789abcdef"
    folder.mkdir()
    return folder


def make_producer(encryption: CacheEncryption, cache: Path) -> AesGcmSealer:
    return open_sealer(encryption, cache, is_producer=True)


def make_consumer(encryption: CacheEncryption, cache: Path) -> AesGcmSealer:
    return open_sealer(encryption, cache, is_producer=False)


def write_key(path: Path, content: bytes, mode: int = 0o600) -> Path:
    path.write_bytes(content)
    path.chmod(mode)
    return path


@pytest.mark.parametrize(
    "parts",
    [
        pytest.param([b"one ", bytearray(b"batch"), memoryview(b"!" * 100_000)], id="parts"),
        pytest.param([b""], id="empty"),
        pytest.param([], id="nothing"),
    ],
)
def test_consumer_opens_what_the_producer_sealed(key_file, cache, parts):
    sealed = make_producer(by_file(key_file), cache).seal(parts, b"batch 7")

    opened = make_consumer(by_file(key_file), cache).open(memoryview(sealed), b"batch 7")

    assert opened == b"".join(parts)
    assert b"batch" not in sealed
    assert len(sealed) == len(opened) + 28


def test_no_batch_is_sealed_twice_alike(key_file, cache):
    sealer = make_producer(by_file(key_file), cache)

    assert len({sealer.seal([b"one batch"], b"") for _ in range(100)}) == 100


def test_a_consumer_waits_for_the_key_until_its_first_batch(key_file, cache):
    consumer = make_consumer(by_file(key_file), cache)

    with pytest.raises(DamagedBatchError):
        consumer.open(b"x" * 100, b"")
    sealed = make_producer(by_file(key_file), cache).seal([b"one batch"], b"")

    assert consumer.open(sealed, b"") == b"one batch"


def test_another_bit_another_length_or_another_place_is_noticed(key_file, cache):
    sealer = make_producer(by_file(key_file), cache)
    sealed = sealer.seal([b"one batch"], b"batch 7")

    for place in (0, 11, 12, 20, -17, -16, -1):
        flipped = bytearray(sealed)
        flipped[place] ^= 1
        with pytest.raises(DamagedBatchError, match="damaged, or of another key"):
            sealer.open(flipped, b"batch 7")
    for num_bytes in (0, 11, 27, 28, 36):
        with pytest.raises(DamagedBatchError):
            sealer.open(sealed[:num_bytes], b"batch 7")
    with pytest.raises(DamagedBatchError):
        sealer.open(sealed, b"batch 8")


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda cache, key: write_key(key, KEY[::-1]), id="another-key"),
        pytest.param(lambda cache, key: (cache / KEY_NAME).unlink(), id="no-key"),
        pytest.param(lambda cache, key: (cache / KEY_NAME).write_bytes(b'{"ver'), id="torn-key"),
    ],
)
def test_a_cache_whose_key_is_lost_is_thrown_away(key_file, cache, change):
    """Its consumers get the new key with the next batch. So are batches that are not encrypted."""
    (cache / SEGMENT).write_bytes(b"not encrypted")
    first = make_producer(by_file(key_file), cache)
    assert (cache / SEGMENT).read_bytes() == b""
    consumer = make_consumer(by_file(key_file), cache)
    old = first.seal([b"old batch"], b"")
    assert consumer.open(old, b"") == b"old batch"
    (cache / SEGMENT).write_bytes(b"batches")
    change(cache, key_file)

    second = make_producer(by_file(key_file), cache)

    assert (cache / SEGMENT).read_bytes() == b""
    assert consumer.open(second.seal([b"new batch"], b""), b"") == b"new batch"
    with pytest.raises(DamagedBatchError):
        second.open(old, b"")
    assert sorted(path.name for path in cache.iterdir()) == [KEY_NAME, SEGMENT]


def test_each_cache_has_a_data_key_of_its_own_that_only_its_user_reads(key_file, cache, tmp_path):
    other = tmp_path / "val-0of1-0123456789abcdef"
    other.mkdir()
    sealed = make_producer(by_file(key_file), cache).seal([b"one batch"], b"")
    (other / KEY_NAME).write_bytes((cache / KEY_NAME).read_bytes())

    with pytest.raises(DamagedBatchError):
        make_consumer(by_file(key_file), other).open(sealed, b"")
    assert (cache / KEY_NAME).stat().st_mode & 0o777 == 0o600
    assert KEY.hex() not in (cache / KEY_NAME).read_text()


def test_a_folder_that_cannot_be_written_is_named(key_file, tmp_path):
    with pytest.raises(CacheKeyError, match=r"cannot write .*/nowhere/key.wrapped: No such file"):
        make_producer(by_file(key_file), tmp_path / "nowhere")


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(KEY, id="raw"),
        pytest.param(KEY.hex().encode(), id="hexadecimal"),
        pytest.param(KEY.hex().upper().encode() + b"\n", id="hexadecimal-line"),
        pytest.param(base64.b64encode(KEY), id="base64"),
        pytest.param(base64.b64encode(KEY) + b"\r\n", id="base64-line"),
    ],
)
def test_forms_of_a_key(tmp_path, content):
    assert read_key_file(write_key(tmp_path / "key", content)) == KEY


def test_a_mounted_secret_is_read_through_its_links(tmp_path):
    (tmp_path / "..data").mkdir()
    write_key(tmp_path / "..data" / "key", KEY, mode=0o440)
    (tmp_path / "key").symlink_to("..data/key")

    assert read_key_file(tmp_path / "key") == KEY


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(b"", id="empty"),
        pytest.param(KEY[:31], id="short"),
        pytest.param(KEY + b"\n", id="raw-line"),
        pytest.param(KEY.hex().encode()[:-1], id="half-a-byte"),
        pytest.param(base64.b64encode(KEY + b"x"), id="base64-of-33"),
        pytest.param(b"a" * 100_000, id="long"),
    ],
)
def test_what_is_no_key_is_refused_without_being_shown(tmp_path, content):
    path = write_key(tmp_path / "key", content)

    with pytest.raises(CacheKeyError, match=r"that are no key: 32 bytes, or 64 hex") as refused:
        read_key_file(path)

    assert not content or content.decode("latin-1").strip() not in str(refused.value)


@pytest.mark.parametrize("mode", [0o604, 0o602, 0o644])
def test_a_key_file_that_is_open_to_others_is_refused(tmp_path, cache, mode):
    path = write_key(tmp_path / "key", KEY, mode=mode)

    with pytest.raises(CacheKeyError, match=r"key_file .*/key is open to everybody .* chmod o="):
        make_consumer(by_file(path), cache)


def test_a_key_file_that_is_missing_or_no_file_is_named(tmp_path):
    with pytest.raises(CacheKeyError, match=r"cannot read encryption.key_file .*: no such file"):
        read_key_file(tmp_path / "nowhere")
    with pytest.raises(CacheKeyError, match=r"cannot read encryption.key_file .*: is a directory"):
        read_key_file(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(CacheKeyError, match=r"encryption.key_file .*/pipe is no file"):
        read_key_file(tmp_path / "pipe")


@pytest.mark.parametrize(("kind", "field"), [("file", "key_file"), ("kms", "kms_key_id")])
def test_a_kind_without_its_key_is_refused(cache, kind, field):
    encryption = CacheEncryption(
        kind=kind, key_file=None, kms_key_id=None, endpoint=None, region=None
    )

    with pytest.raises(CacheKeyError, match=rf"^encryption.{field} null: .* '{kind}' needs it$"):
        make_producer(encryption, cache)


def test_derived_keys_stay_what_they_are(key_file):
    """Another derivation would throw away the caches of everybody who upgrades."""
    wrapped = bytes(range(32)) + bytes.fromhex("16f950fa791b497a45ad4122686f2642")

    key = FileKeys("cache").decrypt(wrapped, str(key_file))

    assert key.hex() == "a04025877a2b38cb363fc6939fccf5b95c89bc44288af6b142b4b41823215234"


class Kms:
    """A server of KMS' protocol that counts what it is asked."""

    def __init__(self, server: S3Server, log: Path) -> None:
        self._endpoint = server.endpoint
        self._log = log
        self._client = boto3.client("kms", endpoint_url=server.endpoint, region_name="us-east-1")

    def make_key(self) -> str:
        return str(self._client.create_key()["KeyMetadata"]["KeyId"])

    def num_calls(self) -> int:
        return self._log.read_text().count("POST / HTTP/1.1")

    def settings(self, key_id: str) -> CacheEncryption:
        return CacheEncryption(
            kind="kms",
            key_file=None,
            kms_key_id=key_id,
            endpoint=self._endpoint,
            region="us-east-1",
        )


@pytest.fixture(scope="module")
def kms(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kms]:
    folder = tmp_path_factory.mktemp("kms")
    with s3_server(folder) as server:
        yield Kms(server, folder / "s3-server.log")


def test_another_kms_key_throws_the_cache_away_with_one_call(kms, cache):
    old = make_producer(kms.settings(kms.make_key()), cache).seal([b"one batch"], b"")
    (cache / SEGMENT).write_bytes(b"batches")
    other = kms.settings(kms.make_key())
    before = kms.num_calls()

    with pytest.raises(DamagedBatchError):
        make_consumer(other, cache).open(old, b"")
    producer = make_producer(other, cache)

    assert kms.num_calls() == before + 1
    assert (cache / SEGMENT).read_bytes() == b""
    with pytest.raises(DamagedBatchError):
        producer.open(old, b"")


def test_a_data_key_of_another_cache_throws_the_cache_away(kms, cache, tmp_path):
    encryption = kms.settings(kms.make_key())
    other = tmp_path / "val-0of1-0123456789abcdef"
    other.mkdir()
    make_producer(encryption, other)
    (cache / KEY_NAME).write_bytes((other / KEY_NAME).read_bytes())
    (cache / SEGMENT).write_bytes(b"batches")
    before = kms.num_calls()
    consumer = make_consumer(encryption, cache)

    for _ in range(3):
        with pytest.raises(DamagedBatchError):
            consumer.open(b"x" * 100, b"")
    assert kms.num_calls() == before + 1
    make_producer(encryption, cache)

    assert (cache / SEGMENT).read_bytes() == b""


def test_kms_tells_in_its_own_words_what_is_wrong(kms, cache):
    missing = "12345678-1234-1234-1234-123456789012"

    with pytest.raises(CacheKeyError, match=rf"encryption.kms_key_id {missing}: .*NotFound"):
        make_producer(kms.settings(missing), cache)
    assert list(cache.iterdir()) == []


def test_kms_that_is_not_there_is_named(kms, cache):
    encryption = kms.settings("alias/any").model_copy(update={"endpoint": "http://127.0.0.1:1"})

    with pytest.raises(CacheKeyError, match=r"kms_key_id alias/any: .*http://127.0.0.1:1"):
        make_producer(encryption, cache)


def open_loader(folder: Path, encryption: CacheEncryption) -> CachedLoader:
    settings = make_settings(folder / "cache", encryption=encryption)
    factory = functools.partial(source_functions.begins_there, length=1000)
    return cached(factory, settings, identity={}, job="job", owner_pid=os.getpid())


def read_all(loader: CachedLoader) -> None:
    assert list(islice(loader, 20)) == list(range(20))


def test_producer_and_consumer_call_kms_once_each(kms, tmp_path):
    encryption = kms.settings(kms.make_key())
    before = kms.num_calls()

    with open_loader(tmp_path, encryption) as loader:
        read_all(loader)
        assert kms.num_calls() == before + 2
        with open_loader(tmp_path, encryption) as other:
            read_all(other)
        assert kms.num_calls() == before + 3
        loader.close(is_over=True)


def test_a_key_that_is_damaged_under_a_living_producer_is_made_again(tmp_path, key_file):
    """Who has read before goes on; who comes anew cannot, until the batches have another key."""
    with open_loader(tmp_path, by_file(key_file)) as loader:
        read_all(loader)
        (path,) = (tmp_path / "cache").rglob(KEY_NAME)
        content = bytearray(path.read_bytes())
        content[-3] ^= 1
        path.write_bytes(content)

        with open_loader(tmp_path, by_file(key_file)) as other:
            read_all(other)
        assert next(iter(loader)) == 20
        loader.close(is_over=True)
