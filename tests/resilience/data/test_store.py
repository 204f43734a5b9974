"""The store of segments: what it knows of a folder, and when it notices what has changed there."""

from __future__ import annotations

from pathlib import Path

from resilience.data.segments import segment_path
from resilience.data.store import SegmentStore
from tests.resilience.data.segment_files import FINGERPRINT, is_batch, read, write


def test_a_store_knows_what_lies_in_its_folder(tmp_path: Path) -> None:
    store = SegmentStore(tmp_path / "cache", FINGERPRINT)
    store.refresh()
    assert (store.segments, store.next_serial, store.find(0)) == ([], 1, None)
    (tmp_path / "cache").mkdir()

    for serial, first in ((9, 0), (10, 2)):
        write(store.folder, first, first + 1, first + 2, serial=serial)
    segment_path(store.folder, 11).write_bytes(b"nothing")
    (store.folder / "segment-1.batches").touch()
    (store.folder / "cache.json").touch()
    store.refresh()

    assert [each.serial for each in store.segments] == [9, 10]
    assert store.next_serial == 12
    assert "segment-00000011.batches is damaged" in store.damaged[11]
    found = {number: store.find(number) for number in range(6)}
    # Both have 2; the newer one counts.
    serials = [each.serial if each else None for each in found.values()]
    assert serials == [9, 9, 10, 10, 10, None]

    store.delete(11)
    segment_path(store.folder, 10).unlink()
    store.refresh()
    assert [each.serial for each in store.segments] == [9]
    assert store.damaged == {}
    store.delete(9)
    assert (list(store.folder.glob("segment-0*")), store.find(0)) == ([], None)
    store.close()


def test_a_file_that_was_deleted_and_made_again_is_opened_again(tmp_path: Path) -> None:
    """As where somebody empties the folder and the next producer begins from the first serial."""
    write(tmp_path, 0, 1, serial=1)
    store = SegmentStore(tmp_path, FINGERPRINT)
    store.refresh()
    known = store.find(0)
    store.refresh()
    assert store.find(0) is known

    segment_path(tmp_path, 1).unlink()
    write(tmp_path, 7, 8, serial=1)
    store.refresh()

    segment = store.find(7)
    assert segment is not None
    assert is_batch(read(segment, 7), 7)
    assert store.find(0) is None
    store.close()
