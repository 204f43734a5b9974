"""AWS's checkpoints in S3, as its library lays them out.

    {prefix}/{namespace}/rank_{R}/step_{N}/checkpoint.pt       each rank's blob
    {prefix}/{namespace}/rank_0/step_{N}/metadata.metadata     written last

Within Ray, `step_{N}` stands before `rank_{R}`; both are found.
"""

from __future__ import annotations

import re

from resilience.tiered.errors import FormatError
from resilience.tiered.stores.objects import Stored
from resilience.tiered.stores.s3 import S3Objects, S3Settings

_METADATA = "metadata.metadata"
_BLOB = "checkpoint.pt"
_STEP = re.compile(r"(?:rank_0/step_([0-9]{1,18})|step_([0-9]{1,18})/rank_0)/metadata\.metadata")


class BucketSource:
    """A bucket; `settings.prefix` is what the library calls its base path, without the bucket.

    Its objects have no checksum of the library's; each tensor in them has one of its own.
    Raises TierError where S3 fails.
    """

    is_checked = False

    def __init__(self, settings: S3Settings, namespace: str) -> None:
        self._objects = S3Objects(settings)
        self._namespace = namespace
        parts = (settings.bucket, settings.prefix.strip("/"), namespace)
        self.name = "s3://" + "/".join(each for each in parts if each)

    def steps(self) -> list[int]:
        """Return the steps that have a metadata, newest first: it is written when all is there."""
        prefix = f"{self._namespace}/"
        found: set[int] = set()
        for folder in ("rank_0/", "step_"):
            for each in self._objects.find_all(prefix + folder):
                if match := _STEP.fullmatch(each.name.removeprefix(prefix)):
                    found.add(int(match[1] or match[2]))
        return sorted(found, reverse=True)

    def read_metadata(self, step: int, bytes_max: int) -> bytes | None:
        """Return a step's metadata."""
        found = self._find(step, 0, _METADATA)
        if found is None:
            return None
        if found.num_bytes > bytes_max:
            raise FormatError(f"{self.name}: {found.name} is longer than {bytes_max} bytes")
        return bytes(self._read(found, 0, found.num_bytes))

    def read(self, step: int, rank: int, begin: int, end: int) -> memoryview | None:
        """Return bytes of a rank's blob; only these are sent."""
        found = self._find(step, rank, _BLOB)
        if found is None:
            return None
        if end > found.num_bytes:
            raise FormatError(f"{self.name}: {found.name} has {found.num_bytes} bytes, not {end}")
        return self._read(found, begin, end)

    def _find(self, step: int, rank: int, name: str) -> Stored | None:
        for folder in (f"rank_{rank}/step_{step}", f"step_{step}/rank_{rank}"):
            if found := self._objects.find(f"{self._namespace}/{folder}/{name}"):
                return found
        return None

    def _read(self, found: Stored, begin: int, end: int) -> memoryview:
        body = memoryview(bytearray(end - begin))
        self._objects.read(found.name, found.num_bytes, begin, body)
        return body
