"""AWS's checkpoints in S3, as its library lays them out.

    {prefix}/{namespace}/rank_{R}/step_{N}/checkpoint.pt       each rank's blob
    {prefix}/{namespace}/rank_0/step_{N}/metadata.metadata     written last

Within Ray, `step_{N}` stands before `rank_{R}`; both are found.
"""

from __future__ import annotations

import re

from resilience.tiered.errors import FormatError
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
        for is_ray in (False, True):
            name = self._object(step, 0, _METADATA, is_ray=is_ray)
            found = self._objects.find(name)
            if found is not None:
                if found.num_bytes > bytes_max:
                    raise FormatError(f"{self.name}: {name} is longer than {bytes_max} bytes")
                body = bytearray(found.num_bytes)
                self._objects.read(name, found.num_bytes, 0, memoryview(body))
                return bytes(body)
        return None

    def read(self, step: int, rank: int, begin: int, end: int) -> memoryview | None:
        """Return bytes of a rank's blob; only these are sent."""
        for is_ray in (False, True):
            name = self._object(step, rank, _BLOB, is_ray=is_ray)
            if found := self._objects.find(name):
                if end > found.num_bytes:
                    raise FormatError(f"{self.name}: {name} has {found.num_bytes} bytes, not {end}")
                body = memoryview(bytearray(end - begin))
                self._objects.read(name, found.num_bytes, begin, body)
                return body
        return None

    def _object(self, step: int, rank: int, name: str, *, is_ray: bool) -> str:
        folders = (f"rank_{rank}", f"step_{step}")
        return "/".join((self._namespace, *(folders[::-1] if is_ray else folders), name))
