from __future__ import annotations

import io
import json
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from resilience.frameworks.plain_values import (
    KeptValues,
    as_json,
    from_json,
    read_values,
    write_values,
)


def send(values: dict[str, Any]) -> dict[str, Any]:
    """Return what another process gets."""
    buffer = io.BytesIO()
    torch.save(values, buffer)
    buffer.seek(0)
    found: dict[str, Any] = torch.load(buffer, weights_only=True)
    return found


def send_text(values: dict[str, Any]) -> Any:
    """Return what another process gets where they travel as text."""
    return json.loads(json.dumps(as_json(values)), object_hook=from_json)


def test_attributes_of_a_step_that_is_run_again_are_themselves_with_what_they_had() -> None:
    """An object that the program or another attribute shares is put back for these too."""
    lines, array, total = [{"loss": 0.5}], np.arange(3), torch.ones(2)
    other = object()
    owner = SimpleNamespace(count=1, lines=lines, array=array, parts={"t": total}, total=total)
    owner.other, owner.bar, owner.last = other, other, total[:1]
    kept = KeptValues(owner)
    found = send(kept.read())

    owner.count, owner.bar, owner.made = 9, None, 1
    lines.append({"loss": 0.1})
    array += 1
    total.zero_()
    owner.last = batch = torch.full((1,), 7.0)
    del owner.lines
    kept.restore(found)

    assert (owner.count, owner.lines, owner.array.tolist()) == (1, [{"loss": 0.5}], [0, 1, 2])
    assert (owner.lines is lines, owner.array is array) == (True, True)
    assert owner.parts["t"] is owner.total is total
    assert total.tolist() == [1, 1]
    assert (owner.last.tolist(), batch.tolist()) == ([1], [7])
    assert (owner.other, owner.bar) == (other, None)
    assert not hasattr(owner, "made")


def test_earlier_moments_can_be_restored_too() -> None:
    owner = SimpleNamespace(lines=["step"])
    kept = KeptValues(owner)
    of_step = kept.read()
    owner.lines = ["functions"]
    of_functions = kept.read()

    kept.restore(of_step)
    assert owner.lines == ["step"]
    kept.restore(of_functions)
    assert owner.lines == ["functions"]
    kept.restore({**of_step, "moment": -1})
    assert owner.lines == ["step"]


def test_process_that_joins_takes_what_has_ever_changed_and_keeps_its_own() -> None:
    nan = torch.tensor([float("nan")])
    owner, joining = (
        SimpleNamespace(rank=rank, counter=0, warm=1, gone=None, mine=nan * rank, bar=None)
        for rank in range(2)
    )
    kept, taking = KeptValues(owner), KeptValues(joining)
    owner.counter = 1
    kept.read()
    owner.counter = 0
    del owner.warm
    joining.counter = 1  # restored from a checkpoint

    taking.take_over(send(kept.read_changed()))

    assert (joining.counter, joining.rank) == (0, 1)
    assert not hasattr(joining, "warm")
    assert taking.read_changed()["changed"] == ["counter", "warm"]


@pytest.mark.parametrize("send", [send, send_text])
def test_kinds_come_back_from_plain_values(send: Callable[[dict[str, Any]], Any]) -> None:
    values = {
        "steps": np.arange(3, dtype=np.int16)[::2],
        "mean": np.float32(0.5),
        "big": np.array([1, 2], dtype=">i4"),
        "last": deque([1, np.int64(2)], maxlen=2),
        "seen": {"a", 3},
        "sums": [defaultdict(float, loss=1.0)],
        "counts": (Counter(a=2), OrderedDict(b=1)),
        "nan": float("nan"),
        "places": {1: (0.1, None), None: {"tensor": "text"}, "pairs": {}},
    }
    found = send(read_values(SimpleNamespace(**values)))
    taken = SimpleNamespace()
    write_values(taken, found)

    assert (taken.steps.tolist(), taken.steps.dtype) == ([0, 2], np.int16)
    assert (taken.mean, type(taken.mean), taken.big.tolist()) == (0.5, np.float32, [1, 2])
    assert (taken.last, taken.last.maxlen, taken.seen) == (deque([1, 2]), 2, {"a", 3})
    assert type(taken.last[1]) is np.int64
    taken.sums[0]["new"] += 1
    assert taken.sums == [{"loss": 1.0, "new": 1.0}]
    assert (taken.counts, [type(each) for each in taken.counts]) == (
        values["counts"],
        [Counter, OrderedDict],
    )
    assert taken.nan != taken.nan
    assert taken.places == values["places"]


def test_mapping_stays_the_object_that_it_is() -> None:
    """trl's trainers add to a value that is not there yet."""
    metrics = {"train": defaultdict(lambda: [0.0], loss=[1.0])}
    owner = SimpleNamespace(metrics=metrics)
    values = read_values(owner)

    metrics["train"]["loss"].append(2.0)
    metrics["train"]["late"].append(3.0)
    write_values(owner, values)

    assert owner.metrics is metrics
    metrics["train"]["new"].append(4.0)
    assert metrics["train"] == {"loss": [1.0], "new": [0.0, 4.0]}


def test_attribute_that_holds_what_cannot_travel_is_left_out() -> None:
    owner = SimpleNamespace(
        mixed=[1, object()],
        deep={"a": {"b": {"c": {"d": 1}}}},
        sparse=torch.eye(2).to_sparse(),
        words=np.array(["a"]),
    )

    assert read_values(owner) == {}
