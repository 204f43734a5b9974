from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest

from resilience.state.transfer_buffer import TransferBuffer, create_transfer_buffer
from tests.disks import files_of_at_most

SLOT_BYTES = 1 << 20


@pytest.fixture
def descriptor() -> Iterator[int]:
    made = create_transfer_buffer(3, SLOT_BYTES)
    yield made
    os.close(made)


def test_slots_are_the_same_memory_for_all_who_map_them(descriptor: int) -> None:
    one, other = (TransferBuffer(descriptor, 3, SLOT_BYTES) for _ in range(2))

    one.slot(1)[:3] = b"abc"

    assert bytes(other.slot(1)[:3]) == b"abc"
    assert [bytes(other.slot(n)[:3]) for n in (0, 2)] == [bytes(3)] * 2


def test_slot_outside_the_transfer_buffer_is_refused(descriptor: int) -> None:
    transfer_buffer = TransferBuffer(descriptor, 3, SLOT_BYTES)

    with pytest.raises(ValueError, match="no slot 3: the transfer buffer has 3"):
        transfer_buffer.slot(3)


def test_memory_is_smaller_than_the_map(descriptor: int) -> None:
    with pytest.raises(ValueError, match="mmap length is greater than file size"):
        TransferBuffer(descriptor, 4, SLOT_BYTES)


def test_touched_memory_has_no_page_faults_left(descriptor: int) -> None:
    transfer_buffer = TransferBuffer(descriptor, 3, SLOT_BYTES)
    transfer_buffer.touch()
    num_pages = 3 * SLOT_BYTES // resource.getpagesize()
    ones = bytes([1]) * SLOT_BYTES
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt

    for number in range(3):
        transfer_buffer.slot(number)[:] = ones

    num_faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    assert num_faults < num_pages // 10


def test_transfer_buffer_has_no_name_and_goes_with_its_last_holder() -> None:
    made = create_transfer_buffer(1, SLOT_BYTES)
    transfer_buffer = TransferBuffer(made, 1, SLOT_BYTES)

    assert list(Path("/dev/shm").glob("*resilience*")) == []
    assert not os.get_inheritable(made)
    os.close(made)
    transfer_buffer.slot(0)[0] = 1
    del transfer_buffer
    assert "resilience-transfer" not in Path("/proc/self/maps").read_text()


def test_lack_of_memory_is_an_error_where_the_transfer_buffer_is_created() -> None:
    """A limit on files' sizes stands for a full memory: both end the allocation."""
    num_open = len(list(Path("/proc/self/fd").iterdir()))

    with files_of_at_most(1 << 20), pytest.raises(OSError, match="File too large"):
        create_transfer_buffer(2, 1 << 20)

    assert len(list(Path("/proc/self/fd").iterdir())) == num_open


@pytest.mark.parametrize(
    ("num_slots", "slot_bytes", "message"),
    [
        (0, 4096, "holds nothing"),
        (1, 0, "holds nothing"),
        (1, 5000, "slots of 5000 bytes are no whole pages"),
    ],
)
def test_odd_sizes_are_refused(num_slots: int, slot_bytes: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        create_transfer_buffer(num_slots, slot_bytes)
