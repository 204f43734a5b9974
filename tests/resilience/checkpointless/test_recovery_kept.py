"""What is read of a state is kept where the state was right when it had been read."""

from __future__ import annotations

import threading

import pytest
import torch

from resilience.checkpointless.recovery import Recovery
from resilience.errors import CorruptionError
from resilience.state.layout import make_layout
from resilience.state.report import Phase, Report
from resilience.state.view import ViewWithRest
from tests.resilience.state.nodes import PlainView


class Gate:
    """Lets everybody in."""

    def enter(self, step, *, lock, is_current):
        assert is_current()


class Members:
    """A generation of one rank that holds nothing yet."""

    number = 0
    rank = 0
    layout = make_layout(nodes=["n0"], num_local_ranks=1)
    gate = Gate()
    lock = threading.Lock()
    before = None
    is_passing = False
    reports = (Report(rank=0, node="n0", generation=-1, phase=Phase.FRESH),)

    def is_current(self):
        return True

    def check(self):
        """The generation goes on."""

    def mark(self, activity, step, micro_batch=0):
        """Nobody is looking."""


def make_recovery(told, *, before_update):
    recovery = Recovery(
        apply=lambda step: None,
        self_check_every_n_steps=1,
        before_update=before_update,
        keep=lambda: told.append("keep"),
    )
    view = PlainView([torch.zeros(4)])
    recovery.bind(view)
    return recovery, view


def test_save_is_kept_after_its_state_was_looked_at():
    told = []
    recovery, view = make_recovery(told, before_update=lambda: told.append("read"))
    recovery.resume(Members(), start=lambda fallback: 0)

    with recovery.commit(Members()):
        told.append("update")
        view.values[0].add_(1)

    assert told == ["read", "keep", "update"]


def test_save_of_a_state_that_changed_before_it_was_read_is_not_kept():
    told = []

    def flip():
        view.values[0].view(torch.int32)[2] ^= 1 << 20

    recovery, view = make_recovery(told, before_update=flip)
    recovery.resume(Members(), start=lambda fallback: 0)

    with pytest.raises(CorruptionError), recovery.commit(Members()):
        told.append("update")

    assert told == []


def test_start_leaves_the_rest_that_a_save_holds():
    recovery, view = make_recovery([], before_update=lambda: None)
    recovery.rest, recovery.pending = {"last": 7}, {"next": 8}
    held, pending = ViewWithRest(view, recovery).read_rest()["recovery"], recovery.pending

    recovery.resume(Members(), start=lambda fallback: 0)

    assert (held, pending) == ({"last": 7}, {"next": 8})
    assert (recovery.rest, recovery.pending) == ({}, {})
