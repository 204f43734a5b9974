"""Objects in a bucket of S3, or of a server that speaks its protocol.

The bytes go through the native client of s3torchconnector, without its Python
half: that imports torch. An object is written by a multipart upload, so it appears
when the upload is completed. What a dead writer has uploaded until then is seen by
nobody, but is stored: the bucket needs a rule that ends incomplete uploads.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from resilience.tiered.errors import TierError
from resilience.tiered.stores.deadline import Calls, DeadlineError, Hung
from resilience.tiered.stores.objects import Stored, blocks_of
from resilience.tiered.stores.store import Store

if TYPE_CHECKING:
    from s3torchconnectorclient._mountpoint_s3_client import (
        GetObjectStream,
        ListObjectResult,
        MountpointS3Client,
        PutObjectStream,
    )

PARTS_MAX = 10_000
"""Parts that S3 allows an upload."""

_WINDOW_BYTES = 64 << 20
"""How much is asked for at once: the client keeps in memory what it was asked for."""
_WINDOWS_AHEAD = 2
_THROUGHPUT_GBPS = 10.0
"""What the client aims at: it decides the number of connections."""


@dataclass(frozen=True, slots=True, kw_only=True)
class S3Settings:
    """Which bucket, by which way, and how long it may take.

    Credentials come from where the AWS clients look for them: environment,
    profile, the node's or the pod's role.
    """

    bucket: str
    prefix: str = ""
    """Folder within the bucket; slashes at its ends mean nothing."""
    region: str = "us-east-1"
    endpoint: str | None = None
    """Such as http://127.0.0.1:8333; None for AWS's own, or that of AWS_ENDPOINT_URL."""
    force_path_style: bool = False
    """Name the bucket in the path: for a server that is not AWS's and is reached by a name."""
    part_size_mib: int = 16
    """A shard has at most 10,000 parts."""
    attempts: int = 5
    """Times that a request is sent before the operation fails, with growing pauses between."""
    deadline_s: float = 60.0
    """For one operation without its bytes."""

    def __post_init__(self) -> None:
        if not self.bucket:
            raise ValueError("bucket has to be named")
        if self.endpoint is not None:
            url = urlsplit(self.endpoint)
            if url.scheme not in ("http", "https") or not url.hostname:
                raise ValueError(f"endpoint {self.endpoint!r} is no http:// or https:// address")
        if not 5 <= self.part_size_mib <= 5120:
            raise ValueError(f"part_size_mib {self.part_size_mib} is not within 5 and 5120")
        if self.attempts < 1 or self.deadline_s <= 0:
            raise ValueError("attempts and deadline_s have to be above 0")


def open_s3(settings: S3Settings) -> Store:
    """Return the store in this bucket; connects to nothing yet."""
    return Store(S3Objects(settings))


class S3Objects:
    """Objects below a prefix of a bucket; see `Objects`.

    The native client is made by the first call of a process, and again behind one
    that hangs. It does not live through a fork: a child that was forked while calls
    were running may hang; start processes by spawn or exec.
    """

    def __init__(self, settings: S3Settings) -> None:
        self._settings = settings
        prefix = settings.prefix.strip("/")
        self._prefix = f"{prefix}/" if prefix else ""
        self._hung = Hung()
        self._lock = threading.Lock()
        self._client: tuple[int, MountpointS3Client] | None = None

    def write(self, name: str, num_bytes: int, pieces: Iterable[memoryview]) -> None:
        """Write an object by a multipart upload; one that fails leaves no object.

        The client ends it, as a rule; parts that it leaves are ended by a rule of the bucket.
        """
        what = f"writing {self._url(name)}"
        size_max = self._settings.part_size_mib * PARTS_MAX << 20
        if num_bytes > size_max:
            raise TierError(
                f"{what}: {num_bytes} bytes are more than {size_max}; raise part_size_mib"
            )
        with self._calls(what, num_bytes) as calls:
            # Held by the calls' thread alone: dropped before it is complete, the client ends it.
            upload: list[PutObjectStream] = []
            try:
                calls.call(lambda: upload.append(self.open_put(name)))
                for block in blocks_of(pieces, num_bytes, what):
                    calls.call(_append, upload, bytes(block))
                calls.call(_complete, upload)
            finally:
                calls.undo(upload.clear)

    def read(self, name: str, num_bytes: int, begin: int, into: memoryview) -> None:
        """Fill `into` from an object of exactly `num_bytes`, asked for in ranges."""
        what = f"reading {self._url(name)}"
        with self._calls(what, into.nbytes) as calls:
            found = calls.call(self._find, name)
            if found is None or found.num_bytes != num_bytes:
                there = f"{found.num_bytes} bytes there" if found else "nothing there"
                raise TierError(f"{what}: {there}, {num_bytes} bytes expected")
            download = _Download(self, name, begin, begin + into.nbytes)
            try:
                done = 0
                while done < into.nbytes:
                    block = calls.call(download.read)
                    if not block or len(block) > into.nbytes - done:
                        raise TierError(f"{what}: the answer ends at byte {begin + done}")
                    into[done : done + len(block)] = block
                    done += len(block)
            finally:
                calls.undo(download.drop)

    def find(self, name: str) -> Stored | None:
        """Return what is known of an object; None where there is none."""
        with self._calls(f"looking for {self._url(name)}") as calls:
            return calls.call(self._find, name)

    def find_all(self, prefix: str) -> list[Stored]:
        """Return all objects whose names begin so."""
        with self._calls(f"listing {self._url(prefix)}") as calls:
            pages = calls.call(self._pages, prefix, 1000)
            found: list[Stored] = []
            while (page := calls.call(lambda: next(pages, None))) is not None:
                found.extend(self._stored(page))
                calls.renew()
            return found

    def delete(self, names: Sequence[str]) -> None:
        """Delete objects."""
        for name in names:
            with self._calls(f"deleting {self._url(name)}") as calls:
                calls.call(self._delete, name)

    def clean(self, namespace: str) -> None:
        """Do nothing: incomplete uploads are ended by a rule of the bucket."""

    def native_client(self) -> MountpointS3Client:
        """Return this process's client; makes it where there is none."""
        with self._lock:
            if self._client is None or self._client[0] != os.getpid():
                self._client = (os.getpid(), _make_client(self._settings))
            return self._client[1]

    def open_get(self, name: str, begin: int, end: int) -> GetObjectStream:
        """Ask for bytes of an object."""
        return self.native_client().get_object(
            self._settings.bucket, self._prefix + name, begin, end
        )

    def open_put(self, name: str) -> PutObjectStream:
        """Begin an upload."""
        return self.native_client().put_object(self._settings.bucket, self._prefix + name)

    def _find(self, name: str) -> Stored | None:
        # A listing, because the client tells "there is none" from other failures by words only.
        for each in self._stored(next(self._pages(name, 1))):
            if each.name == name:
                return each
        return None

    def _pages(self, prefix: str, page_size: int) -> Iterator[ListObjectResult]:
        client = self.native_client()
        return iter(
            client.list_objects(self._settings.bucket, self._prefix + prefix, max_keys=page_size)
        )

    def _stored(self, page: ListObjectResult) -> list[Stored]:
        return [
            Stored(each.key.removeprefix(self._prefix), each.size, float(each.last_modified))
            for each in page.object_info
        ]

    def _delete(self, name: str) -> None:
        self.native_client().delete_object(self._settings.bucket, self._prefix + name)

    def _url(self, name: str) -> str:
        return f"s3://{self._settings.bucket}/{self._prefix}{name}"

    @contextmanager
    def _calls(self, what: str, num_bytes: int = 0) -> Iterator[Calls]:
        try:
            with closing(Calls(what, self._settings.deadline_s, self._hung, num_bytes)) as calls:
                yield calls
        except DeadlineError:
            with self._lock:
                # Its connections may hang as well.
                self._client = None
            raise


def _append(upload: list[PutObjectStream], block: bytes) -> None:
    upload[0].write(block)


def _complete(upload: list[PutObjectStream]) -> None:
    upload[0].close()


class _Download:
    """A range of an object, asked for window by window."""

    def __init__(self, objects: S3Objects, name: str, begin: int, end: int) -> None:
        self._objects = objects
        self._name = name
        self._next = begin
        self._end = end
        self._streams: deque[GetObjectStream] = deque()

    def read(self) -> bytes | None:
        """Return the next bytes; None behind the last."""
        while True:
            while len(self._streams) < _WINDOWS_AHEAD and self._next < self._end:
                end = min(self._next + _WINDOW_BYTES, self._end)
                self._streams.append(self._objects.open_get(self._name, self._next, end))
                self._next = end
            if not self._streams:
                return None
            block: bytes | None = next(self._streams[0], None)
            if block:
                return block
            self._streams.popleft()

    def drop(self) -> None:
        """End what was asked for."""
        self._streams.clear()


def _make_client(settings: S3Settings) -> MountpointS3Client:
    try:
        from s3torchconnectorclient._mountpoint_s3_client import MountpointS3Client
    except ImportError as error:
        raise TierError(f"S3 needs the package's extra s3: {error}") from error
    return MountpointS3Client(
        region=settings.region,
        user_agent_prefix="resilience",
        throughput_target_gbps=_THROUGHPUT_GBPS,
        part_size=settings.part_size_mib << 20,
        endpoint=settings.endpoint,
        force_path_style=settings.force_path_style,
        max_attempts=settings.attempts,
    )
