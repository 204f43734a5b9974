"""The segments that lie in a folder: listed, opened, found by the number of a batch, deleted."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from resilience.data.errors import DamagedBatchError
from resilience.data.segments import Sealer, SegmentReader, parse_serial, segment_path


class SegmentStore:
    """The open segments of a folder, for a producer or a consumer. One thread.

    The store knows the files that were there at the last `refresh`.
    """

    def __init__(self, folder: Path, fingerprint: bytes, *, sealer: Sealer | None = None) -> None:
        self.folder = folder
        self.damaged: dict[int, str] = {}
        """Serials of the files that cannot be opened, and why."""
        self._fingerprint = fingerprint
        self._sealer = sealer
        self._segments: dict[int, SegmentReader] = {}
        """By serial, the oldest first."""
        self._inodes: dict[int, int] = {}
        """By serial, as they were when these were opened."""

    @property
    def segments(self) -> list[SegmentReader]:
        """Return the segments, the oldest first."""
        return list(self._segments.values())

    @property
    def next_serial(self) -> int:
        """Return a serial that no file has."""
        return max((*self._segments, *self.damaged), default=0) + 1

    def refresh(self) -> None:
        """Open what has come, forget what is deleted; costs a listing of the folder."""
        found = _inodes(self.folder)
        for serial in list(self._segments):
            # A folder that was emptied begins with the same serials again.
            if found.get(serial) != self._inodes.get(serial):
                self._segments.pop(serial).close()
        self.damaged = {}
        self._inodes = found
        for serial in found.keys() - self._segments.keys():
            path = segment_path(self.folder, serial)
            try:
                self._segments[serial] = SegmentReader.open(
                    path, self._fingerprint, sealer=self._sealer
                )
            except DamagedBatchError as error:
                self.damaged[serial] = str(error)
            except FileNotFoundError:
                continue
        self._segments = dict(sorted(self._segments.items()))

    def find(self, number: int) -> SegmentReader | None:
        """Return the newest segment that holds a batch; one whose count is damaged holds none."""
        for segment in reversed(self._segments.values()):
            with suppress(DamagedBatchError):
                if number in segment.numbers:
                    return segment
        return None

    def delete(self, serial: int) -> None:
        """Delete a file; what others have mapped stays valid. A no-op for what is not there."""
        segment_path(self.folder, serial).unlink(missing_ok=True)
        self.damaged.pop(serial, None)
        segment = self._segments.pop(serial, None)
        if segment is not None:
            segment.close()

    def close(self) -> None:
        """Let all segments go."""
        for segment in self._segments.values():
            segment.close()
        self._segments = {}


def _inodes(folder: Path) -> dict[int, int]:
    """Return which file stands at each serial; nothing where there is no folder."""
    try:
        entries = os.scandir(folder)  # three times as fast as a Path's for the first batch
    except FileNotFoundError:
        return {}
    with entries:
        return {
            serial: each.inode()
            for each in entries
            if (serial := parse_serial(each.name)) is not None
        }
