from __future__ import annotations

import io
from collections import defaultdict, deque
from types import SimpleNamespace

import numpy as np
import torch

from resilience.frameworks.plain_values import (
    changed_values,
    read_values,
    restore_values,
    write_values,
)


def test_plain_attributes_are_put_back_and_others_stay() -> None:
    kept, other = torch.ones(2), object()
    owner = SimpleNamespace(count=1, lines=[{"loss": 0.5}], kept=kept, other=other, apart=7)
    values = read_values(owner, without=frozenset({"apart"}))

    owner.count, owner.apart = 9, 8
    owner.lines.append({"loss": 0.1})
    kept.zero_()
    write_values(owner, values)

    assert (owner.count, owner.lines, owner.apart) == (1, [{"loss": 0.5}], 8)
    assert owner.other is other
    assert owner.kept.tolist() == [1, 1]


def test_arrays_deques_and_sets_come_back_in_their_kinds_from_plain_values() -> None:
    steps = np.arange(3, dtype=np.int16)
    owner = SimpleNamespace(
        steps=steps, mean=np.float32(0.5), last=deque([1, np.int64(2)], maxlen=2), seen={"a", 3}
    )
    buffer = io.BytesIO()
    torch.save(read_values(owner), buffer)
    buffer.seek(0)
    found = torch.load(buffer, weights_only=True)

    assert changed_values(read_values(owner), found) == {}
    steps += 1
    owner.mean, owner.seen = np.float32(9), {"b"}
    owner.last.append(7)
    assert changed_values(read_values(owner), found).keys() == {"steps", "mean", "last", "seen"}
    write_values(owner, found)

    assert (owner.steps.tolist(), owner.steps.dtype) == ([0, 1, 2], np.int16)
    assert (owner.mean, type(owner.mean)) == (np.float32(0.5), np.float32)
    assert (owner.last, owner.last.maxlen, owner.seen) == (deque([1, 2]), 2, {"a", 3})
    assert type(owner.last[1]) is np.int64


def test_mapping_stays_the_object_that_it_is() -> None:
    """trl's trainers add to a value that is not there yet."""
    metrics = {"train": defaultdict(list, loss=[1.0])}
    owner = SimpleNamespace(metrics=metrics)
    values = read_values(owner)

    metrics["train"]["loss"].append(2.0)
    metrics["train"]["late"].append(3.0)
    write_values(owner, values)

    assert owner.metrics is metrics
    metrics["train"]["new"].append(4.0)
    assert metrics["train"] == {"loss": [1.0], "new": [4.0]}


def test_attribute_that_holds_an_object_anywhere_is_left_out() -> None:
    owner = SimpleNamespace(mixed=[1, object()], deep={"a": {"b": {"c": {"d": 1}}}})

    assert read_values(owner) == {}


def test_attribute_that_was_made_since_is_removed_unless_it_is_kept() -> None:
    owner = SimpleNamespace(bar=object())
    values = read_values(owner)

    owner.count, owner.bar = 3, None
    restore_values(owner, values, kept=frozenset({"bar"}))

    assert vars(owner) == {"bar": None}


def test_changed_values_leave_out_a_ranks_own() -> None:
    owner = SimpleNamespace(rank=1, bar=None, count=0, sums={"loss": [torch.zeros(1)]})
    before = read_values(owner)

    owner.count = 2
    owner.sums["loss"].append(torch.ones(1))

    assert changed_values(read_values(owner), before).keys() == {"count", "sums"}
