from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from resilience.frameworks.shared_texts import begin_texts


def test_texts_of_any_length_come_back_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another rank's text is twice as long as the room for it: all ranks meet once more."""
    meetings = []
    other = "\u00e9" * 8192

    def add_other(rows: torch.Tensor, *, async_op: bool) -> None:
        assert async_op
        meetings.append(rows.shape[1])
        packed = len(other.encode()).to_bytes(8, "big") + other.encode()
        part = packed[: rows.shape[1]]
        rows[1, : len(part)] += torch.frombuffer(bytearray(part), dtype=torch.uint8)

    monkeypatch.setattr(dist, "all_reduce", add_other)
    found = begin_texts("own", [], rank=0, num_ranks=2)()
    assert found == ["own", other]
    assert len(meetings) == 2

    assert begin_texts("", found, rank=0, num_ranks=2)() == ["", other]
    assert len(meetings) == 3


def test_one_rank_keeps_its_own() -> None:
    assert begin_texts("own", ["before"], rank=0, num_ranks=1)() == ["own"]
