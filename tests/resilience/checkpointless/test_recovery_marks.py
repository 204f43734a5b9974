"""What a rank says of its memory, wherever in a step or a recovery it has failed."""

from __future__ import annotations

import signal
import threading
from contextlib import suppress
from dataclasses import replace

import pytest
import torch

from resilience.checkpointless.recovery import Recovery
from resilience.comm.gate import Gate
from resilience.errors import BrokenError, CorruptionError, StateLostError
from resilience.state.layout import make_layout
from resilience.state.report import Phase, Report
from resilience.state.view import ViewWithRest
from tests.resilience.state.nodes import PlainView

STEP = 4
LAYOUT = make_layout(nodes=["n0", "n1"], num_local_ranks=1)


class PassingChannel:
    """What the only rank of a gate needs."""

    def reduce(self, buffer):
        """The sum over one rank is there."""


class BrokenChannel:
    def reduce(self, buffer):
        raise RuntimeError("Connection closed by peer")


class LostPeers:
    """A group whose other ranks are gone."""

    def recv(self, tensors, source, tag):
        raise RuntimeError("Connection closed by peer")


class Members:
    """A generation as rank 0 sees it, which has a gate to itself."""

    number = 3
    rank = 0
    layout = LAYOUT
    lock = threading.Lock()
    group = LostPeers()
    before = None
    keeps_state = True
    is_passing = False

    def __init__(self, *reports, channel=None):
        self.reports = reports
        self.gate = Gate(channel or PassingChannel(), world_size=1)

    def is_current(self):
        return True

    def check(self):
        """The generation goes on."""

    def mark(self, activity, step, micro_batch=0):
        """Nobody is looking."""


def held(rank, phase=Phase.COMPUTING, step=STEP, shard=""):
    return Report(
        rank=rank,
        node=f"n{rank}",
        generation=2,
        shard=shard,
        phase=phase,
        step=step,
        member_generation=-1 if phase is Phase.FRESH else 2,
    )


def begun(*, state=None, step=STEP, **options):
    """Return what holds the whole state after so many updates."""
    recovery = Recovery(**{"apply": lambda step: None, **options})
    recovery.bind(PlainView([torch.zeros(4) if state is None else state]))
    members = Members(held(0, Phase.FRESH), held(1, Phase.FRESH))
    recovery.enter(members)
    recovery.resume(members, lambda fallback: step)
    return recovery


def broken_in_its_gate():
    recovery = begun()
    with pytest.raises(BrokenError), recovery.commit(Members(channel=BrokenChannel())):
        pytest.fail("the update has begun")
    return recovery


def said(recovery):
    report = recovery.report(rank=0, node="n0", generation=3)
    return report.phase, report.step, report.step_generation, report.gradient_generation


def test_rank_whose_repair_breaks_off_holds_parts_of_two_states():
    """Also one that held a whole state before, which the others were ahead of."""
    recovery = begun()

    with pytest.raises(RuntimeError, match="closed by peer"):
        recovery.resume(Members(held(0), held(1, step=STEP + 1)), lambda fallback: 0)

    assert said(recovery)[0] is Phase.TORN_REPAIR


def test_rank_whose_start_breaks_off_holds_parts_of_two_states():
    recovery = begun()

    def start(fallback):
        raise OSError("the disk is gone")

    with pytest.raises(OSError, match="disk"):
        recovery.resume(Members(held(0, shard="0"), held(1, Phase.FRESH, shard="1")), start)

    assert said(recovery)[0] is Phase.TORN_REPAIR


def torn(state):
    """Return a rank whose update of STEP has raised after it had written to the state."""
    recovery = begun(state=state)
    recovery.begin()
    with suppress(ValueError), recovery.commit(Members(held(0), held(1))):
        state += 1
        raise ValueError("a bug in a scheduler")
    return recovery


def test_trained_state_that_nobody_makes_anew_ends_the_run_with_the_update_s_error():
    recovery = torn(torch.zeros(4))
    members = Members(held(0, Phase.TORN_UPDATE), held(1, Phase.TORN_UPDATE))

    with pytest.raises(StateLostError, match=r"step 0 without .*ValueError: a bug in a scheduler"):
        recovery.resume(members, lambda fallback: 0)


def test_state_that_start_makes_anew_is_trained_on():
    state = torch.zeros(4)
    recovery = torn(state)
    members = Members(held(0, Phase.TORN_UPDATE), held(1, Phase.TORN_UPDATE))

    def start(fallback):
        state.zero_()
        return 0

    assert recovery.resume(members, start).step == 0
    # Nothing was trained since: `start` may leave it as it is.
    assert recovery.resume(members, lambda fallback: 0).step == 0


def trained():
    """Return a rank that has ended its update of STEP."""
    recovery = begun(state=(state := torch.zeros(4)))
    recovery.begin()
    with recovery.commit(Members(held(0), held(1))):
        state += 1
    return recovery


def test_a_checkpoint_of_the_step_that_a_rank_holds_is_no_lost_state():
    """All holders of another shard are gone; the checkpoint has the bits that are in memory."""
    members = Members(held(0, step=STEP + 1, shard="0"), held(1, Phase.FRESH, shard="1"))

    assert trained().resume(members, lambda fallback: STEP + 1).step == STEP + 1
    with pytest.raises(StateLostError, match="returned step 0 without"):
        trained().resume(members, lambda fallback: 0)


def test_a_checkpoint_is_loaded_after_an_update_that_has_written_nothing():
    recovery = begun(state=(state := torch.ones(4)))
    recovery.begin()
    with suppress(ValueError), recovery.commit(Members(held(0), held(1))):
        raise ValueError("no memory for the update")
    members = Members(held(0, Phase.TORN_UPDATE), held(1, Phase.TORN_UPDATE))

    def start(fallback):
        state.copy_(torch.ones(4))
        return STEP

    assert recovery.resume(members, start).step == STEP


@pytest.mark.parametrize(
    ("phase", "step"),
    [(Phase.COMPUTING, STEP), (Phase.PASSED, STEP + 1), (Phase.FRESH, STEP)],
)
def test_ranks_of_a_passing_generation_wait_until_all_have_the_state(phase, step):
    """Else the first to leave would end it for those that have none yet."""
    met = []

    class Group:
        def allreduce(self, tensors):
            met.append(said(recovery)[:2])
            return self

        def wait(self):
            """The others are there."""

    recovery = begun()
    reports = [replace(held(rank, phase), gradient_generation=2) for rank in (0, 1)]
    members = Members(*reports)
    members.group, members.is_passing = Group(), True

    recovery.resume(members, lambda fallback: STEP)

    assert met == [(Phase.COMPUTING, step)]


def test_state_that_has_changed_since_its_gate_is_not_rolled_forward():
    state, updates = torch.zeros(4), []
    recovery = begun(state=state, apply=updates.append, self_check_every_n_steps=1)
    reports = [replace(held(rank, Phase.PASSED), gradient_generation=2) for rank in (0, 1)]
    state[1] = 1.0

    with pytest.raises(CorruptionError, match="something has changed it since"):
        recovery.resume(Members(*reports), lambda fallback: 0)

    assert (updates, recovery.step) == ([], STEP)
    assert not recovery.report(rank=0, node="n0", generation=3).is_healthy


@pytest.mark.parametrize("step", range(7))
def test_changed_state_is_found_before_the_gate_of_every_third_step(step):
    state = torch.zeros(4)
    recovery = begun(state=state, step=0, self_check_every_n_steps=3)
    for _ in range(step):
        with recovery.commit(Members()):
            state += 1.0
    state[1] = 0.5

    # The gate, where it is entered, says that it is broken.
    error = CorruptionError if step in (0, 3, 6) else BrokenError
    with pytest.raises(error), recovery.commit(Members(channel=BrokenChannel())):
        pytest.fail("the update has begun")


def test_state_that_took_the_place_of_a_changed_one_is_healthy():
    recovery = begun()
    recovery.distrust()
    assert not recovery.report(rank=0, node="n0", generation=3).is_healthy

    recovery.resume(Members(held(0, Phase.FRESH), held(1, Phase.FRESH)), lambda fallback: STEP)

    assert recovery.report(rank=0, node="n0", generation=3).is_healthy


def test_rank_whose_gate_breaks_has_entered_and_does_not_know():
    assert said(broken_in_its_gate()) == (Phase.ENTERED, STEP, -1, 3)


@pytest.mark.parametrize(
    ("other", "phase"),
    [
        pytest.param(replace(held(1), step=STEP + 1, step_generation=3), Phase.PASSED, id="held"),
        pytest.param(held(1, Phase.PASSED), Phase.PASSED, id="passed"),
        pytest.param(held(1, Phase.TORN_UPDATE), Phase.PASSED, id="torn"),
        pytest.param(held(1, Phase.ENTERED), Phase.ENTERED, id="nobody-knows"),
        pytest.param(held(1, Phase.FRESH), Phase.ENTERED, id="nobody-is-left"),
        pytest.param(replace(held(1), step=STEP + 1), Phase.ENTERED, id="another-history"),
    ],
)
def test_rank_that_hears_that_its_gate_was_passed_keeps_that(other, phase):
    """Whoever proves it may be gone when the next generation ends before it has one state."""
    recovery = broken_in_its_gate()
    own = recovery.report(rank=0, node="n0", generation=3)

    other = replace(other, generation=3, member_generation=3, gradient_generation=3)

    recovery.enter(Members(own, other))

    assert said(recovery) == (phase, STEP, -1, 3)


def test_rank_that_fails_between_its_gate_and_its_update_can_end_it():
    def fail():
        raise OSError("no room for a copy")

    recovery = begun(before_update=fail)

    with pytest.raises(OSError, match="room"), recovery.commit(Members()):
        pytest.fail("the update has begun")

    assert said(recovery) == (Phase.PASSED, STEP, -1, 3)


def test_rank_that_fails_within_its_update_is_torn():
    recovery = begun()

    with pytest.raises(ZeroDivisionError), recovery.commit(Members()):
        raise ZeroDivisionError

    assert said(recovery) == (Phase.TORN_UPDATE, STEP, -1, 3)


def test_update_that_has_ended_was_made_by_the_generation_of_its_gradients():
    recovery = begun()

    with recovery.commit(Members()):
        pass

    assert said(recovery) == (Phase.COMPUTING, STEP + 1, 3, -1)


def test_forward_ends_the_worth_of_earlier_gradients():
    recovery = broken_in_its_gate()

    recovery.begin()

    assert said(recovery) == (Phase.COMPUTING, STEP, -1, -1)


def test_signal_waits_for_the_end_of_the_update():
    """Its handler may raise, in the middle of the weights."""

    class AskedError(Exception):
        pass

    def ask(number, frame):
        raise AskedError

    recovery, before = begun(), signal.signal(signal.SIGTERM, ask)
    try:
        with pytest.raises(AskedError), recovery.commit(Members()):
            signal.raise_signal(signal.SIGTERM)
        assert signal.getsignal(signal.SIGTERM) is ask
    finally:
        signal.signal(signal.SIGTERM, before)

    assert said(recovery) == (Phase.COMPUTING, STEP + 1, 3, -1)


# ---- what is read of a state is kept where the state was right when it had been read


def test_save_is_kept_after_its_state_was_looked_at():
    told, state = [], torch.zeros(4)
    recovery = begun(
        state=state,
        self_check_every_n_steps=1,
        before_update=lambda: told.append("read"),
        keep=lambda: told.append("keep"),
    )

    with recovery.commit(Members()):
        told.append("update")
        state.add_(1)

    assert told == ["read", "keep", "update"]


def test_save_of_a_state_that_changed_before_it_was_read_is_not_kept():
    told, state = [], torch.zeros(4)

    def flip():
        state.view(torch.int32)[2] ^= 1 << 20

    recovery = begun(
        state=state,
        self_check_every_n_steps=1,
        before_update=flip,
        keep=lambda: told.append("keep"),
    )

    with pytest.raises(CorruptionError), recovery.commit(Members()):
        told.append("update")

    assert told == []


def test_start_leaves_the_rest_that_a_save_holds():
    recovery, view = begun(), PlainView([torch.zeros(4)])
    recovery.rest, recovery.pending = {"last": 7}, {"next": 8}
    rest, pending = ViewWithRest(view, recovery).read_rest()["recovery"], recovery.pending

    recovery.resume(Members(held(0, Phase.FRESH), held(1, Phase.FRESH)), lambda fallback: STEP)

    assert (rest, pending) == ({"last": 7}, {"next": 8})
    assert (recovery.rest, recovery.pending) == ({}, {})
