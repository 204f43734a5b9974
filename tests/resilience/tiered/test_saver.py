"""A rank's state into the node's memory and back."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from resilience.errors import BrokenError
from resilience.state.view import NamedTensor
from resilience.tiered import client as client_module
from resilience.tiered import packing
from resilience.tiered.client import TieredClient
from resilience.tiered.errors import HeldError, LostError, StaleError
from resilience.tiered.loader import load, newest_whole
from resilience.tiered.saver import AbandonedError, Saver, Saving
from tests.processes import stopped
from tests.resilience.state.nodes import PlainView
from tests.resilience.state.programs import odd_tensors
from tests.resilience.tiered.daemons import LIMIT_S, Daemon, segments


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    with Daemon(folder=tmp_path / "arena", budget_mib=64) as running:
        running.start().client().go_back(step=0, first_generation=0)
        yield running


def state(seed: int, **options: object) -> PlainView:
    """Return tensors of many types, sizes and strides, empty ones and scalars among them."""
    return PlainView(odd_tensors(seed), {"seed": seed}, **options)  # type: ignore[arg-type]


def large(value: int, *, mib: int = 24) -> PlainView:
    return PlainView([torch.full((mib << 20,), value, dtype=torch.uint8)], {"value": value})


def test_state_comes_back_with_its_rest(daemon: Daemon) -> None:
    client, other = daemon.client(), state(9)

    saved = Saver(client, num_shards=1).save(state(3), step=5, generation=2)
    loaded = load(client, other, step=5, generation=2)

    assert other.content() == state(3).content()
    assert other.rest == {"seed": 3}
    assert (loaded.step, loaded.generation, loaded.source, loaded.num_bad) == (5, 2, "ram", 0)
    assert loaded.num_bytes == saved.num_bytes


def test_two_tensors_of_one_name_are_refused() -> None:
    """One of them would be left out of the shard, or would keep its values at a load."""
    tensors = [*state(3).tensors(), state(3).tensors()[0]]

    with pytest.raises(ValueError, match=f"the state lists {tensors[0].name} more than once"):
        packing.place_tensors(tensors)


def test_layout_aligns_tensors_and_says_which_differs() -> None:
    tensors = state(3).tensors()
    places, num_bytes = packing.place_tensors(tensors)
    memory = np.zeros(num_bytes, dtype=np.uint8)

    packing.pack(tensors, memory, on_piece=lambda _: None)

    assert all(each.offset % 64 == 0 for each in places)
    for each, place in zip(tensors, places, strict=True):
        part = memory[place.offset : place.offset + place.num_bytes].tobytes()
        assert part == PlainView([each.tensor]).content()[0]


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        pytest.param([torch.zeros(3)], r"t0 as float32 \[2\], and this rank t0 as float32 \[3\]"),
        pytest.param([torch.zeros(2).double()], r"t0 as float32 \[2\], and .* t0 as float64 \[2\]"),
        pytest.param(
            [torch.zeros(2), torch.zeros(3), torch.zeros(1)], "step 1 has no t2, or not all of it"
        ),
        pytest.param([torch.zeros(2)], "step 1 has t1, which the state that it is loaded into"),
        pytest.param([], "step 1 has t0, t1, which the state that it is loaded into"),
    ],
)
def test_another_layout_is_refused_and_changes_nothing(
    daemon: Daemon, tensors: list[torch.Tensor], words: str
) -> None:
    client, other = daemon.client(), PlainView(tensors)
    before = other.content()
    saved = PlainView([torch.ones(2), torch.ones(3)])
    Saver(client, num_shards=1).save(saved, step=1, generation=0)

    for options in ({}, {"shards": ("0",), "num_shards": 2}):
        with pytest.raises(ValueError, match=words):
            load(client, other, step=1, generation=0, **options)

    assert other.content() == before


class _FirstOnly(PlainView):
    def leaves_out(self, name: str) -> bool:
        return name == "t1"


def test_a_view_says_which_tensors_it_leaves_out(daemon: Daemon) -> None:
    client, other = daemon.client(), _FirstOnly([torch.zeros(2)])
    saved = PlainView([torch.ones(2), torch.ones(3)])
    Saver(client, num_shards=1).save(saved, step=1, generation=0)

    load(client, other, step=1, generation=0)

    assert other.content() == PlainView([torch.ones(2)]).content()


def test_copy_that_changed_is_given_back_and_counts_as_lost(daemon: Daemon) -> None:
    client = daemon.client()
    Saver(client, num_shards=1).save(large(7), step=1, generation=0)
    (segment,) = segments(daemon.folder)
    with segment.open("r+b") as file:
        file.seek(10 << 20)
        file.write(b"\x06")

    with pytest.raises(LostError, match="shard 0 of step 1 can be read: 1 copies were not intact"):
        load(client, large(0), step=1, generation=0)

    assert newest_whole(client) is None


def test_step_that_nobody_has_is_lost(daemon: Daemon) -> None:
    with pytest.raises(LostError, match="no copy of shard 0 of step 4 can be read: nobody has it"):
        load(daemon.client(), state(1), step=4, generation=0)


def test_run_that_has_not_said_where_it_begins_saves_nothing(daemon: Daemon) -> None:
    """Else rank 0's old values and rank 1's new ones would be one step."""
    old = [daemon.client("fresh"), daemon.client("fresh")]
    old[0].go_back(step=0, first_generation=7)
    Saver(old[0], num_shards=2).save(large(1, mib=1), step=10, generation=7)
    again = daemon.client("other")

    with pytest.raises(StaleError, match=r"step 10 cannot be saved before .*go_back\(step=...\)"):
        Saver(again, num_shards=2).save(large(2, mib=1), step=10, generation=0)
    with pytest.raises(StaleError, match="generation 0, and the newest run's begin at 7"):
        Saver(old[1], num_shards=2).save(large(2, mib=1), step=10, generation=0)

    assert newest_whole(again) is None
    assert newest_whole(old[1]) is None


def test_shard_of_another_history_is_not_taken_for_a_replicas(daemon: Daemon) -> None:
    """Two runs that give their histories one number do not mix, either."""
    client = daemon.client()
    Saver(client, num_shards=2).save(large(1), step=10, generation=0)

    for saver in (Saver(client, num_shards=2), Saver(daemon.client(), num_shards=2)):
        with pytest.raises(HeldError, match="held with other content: another history"):
            saver.save(large(2), step=10, generation=0)
        with pytest.raises(HeldError, match="held with other content: another history"):
            saver.start(large(2), step=10, generation=0).wait(60)


@pytest.mark.parametrize("is_kept", [True, False])
def test_replica_waits_for_the_one_that_writes(daemon: Daemon, is_kept: bool) -> None:
    first = Saver(daemon.client(), num_shards=1).start(
        large(7), step=1, generation=0, is_stable=False
    )
    first.wait_copied(stall_s=60, pulse=lambda: None)
    view = large(7)
    second = Saver(daemon.client(), num_shards=1).start(view, step=1, generation=0, is_stable=False)
    second.wait_copied(stall_s=60, pulse=lambda: None)
    view.values[0].fill_(0)  # the next update
    second.commit()
    is_over = second.wait_over(0.5)

    (first.commit if is_kept else first.abandon)()

    assert not is_over
    if is_kept:
        second.wait(60)
        assert newest_whole(daemon.client()) is not None
    else:
        with pytest.raises(LostError, match="the replica that wrote shard 0 of step 1 has given"):
            second.wait(60)
        assert newest_whole(daemon.client()) is None


def test_save_in_a_thread_keeps_what_a_forward_writes(daemon: Daemon) -> None:
    """The update has to wait; running statistics cannot."""
    client = daemon.client()
    names = {"t1"}
    view = PlainView([torch.full((24 << 20,), 1, dtype=torch.uint8), torch.tensor([1.0, 2.0])])

    saving = Saver(client, num_shards=1, volatile=names).start(view, step=1, generation=0)
    view.values[1].fill_(9.0)
    saving.wait()

    view.values[0].fill_(5)
    load(client, view, step=1, generation=0)
    assert view.values[1].tolist() == [1.0, 2.0]
    assert set(view.values[0].tolist()) == {1}


def test_draft_is_visible_from_its_commit_on(daemon: Daemon) -> None:
    client = daemon.client()

    saving = Saver(client, num_shards=1).start(state(3), step=5, generation=2, is_stable=False)
    is_copied = saving.wait_copied(stall_s=60, pulse=lambda: None)
    before = newest_whole(client)
    saving.commit()
    saving.abandon()
    saving.wait(60)

    assert is_copied
    assert before is None
    assert newest_whole(client) is not None


def test_abandoned_draft_never_was_and_its_memory_is_free_again(daemon: Daemon) -> None:
    client = daemon.client()
    saver = Saver(client, num_shards=1)
    for value in range(8):
        saving = saver.start(large(value), step=5, generation=0, is_stable=False)
        if value % 2:
            saving.wait_copied(stall_s=60, pulse=lambda: None)
        saving.abandon()
        saving.commit()
        with pytest.raises(AbandonedError):
            saving.wait(60)

    assert newest_whole(client) is None
    assert client.status()["held_bytes"] == 0
    saver.save(large(9), step=5, generation=0)
    assert newest_whole(client) is not None


def test_memory_that_is_being_made_is_waited_for() -> None:
    """Gigabytes take longer than a copy may stand still."""
    made, pulses = iter([10, 20, 30]), []
    saving = Saving(1, made_bytes=lambda: next(made, 30))

    is_copied = saving.wait_copied(stall_s=0.2, pulse=lambda: pulses.append(1))

    assert not is_copied
    assert pulses == [1] * 3


def test_what_a_daemon_has_made_is_seen(daemon: Daemon) -> None:
    client = daemon.client()
    before = client.made_bytes()
    client.prepare(1 << 20)
    prepared = client.made_bytes()

    Saver(client, num_shards=1).save(state(1), step=1, generation=0)

    assert prepared - before == 2 << 20
    assert client.made_bytes() >= prepared
    assert TieredClient(Path("/no/folder/socket")).made_bytes() == 0


def test_copy_that_stands_still_is_given_up(daemon: Daemon) -> None:
    """A daemon that does not answer holds an update up no longer than it may."""
    client, pulses = daemon.client(), []
    saver = Saver(client, num_shards=1)
    saver.save(state(1), step=1, generation=0)
    with stopped(daemon.pid):
        saving = saver.start(state(2), step=2, generation=0, is_stable=False)

        is_copied = saving.wait_copied(stall_s=0.2, pulse=lambda: pulses.append(1))

    assert not is_copied
    assert pulses == [1]
    with pytest.raises(AbandonedError):
        saving.wait(60)
    found = newest_whole(client)
    assert found is not None
    assert found.step == 1


def test_pulse_may_end_the_wait(daemon: Daemon) -> None:
    def end() -> None:
        raise KeyboardInterrupt

    saving = Saver(daemon.client(), num_shards=1).start(large(1), step=2, generation=0)

    with pytest.raises(KeyboardInterrupt):
        saving.wait_copied(stall_s=60, pulse=end)
    saving.wait(60)


class PartView(PlainView):
    """Rows of one tensor."""

    begin = 0
    num_rows = 40

    def tensors(self) -> list[NamedTensor]:
        (part,) = self.values
        return [
            NamedTensor(
                name="rows",
                tensor=part,
                full_shape=(self.num_rows, *part.shape[1:]),
                begin=(self.begin, *(0 for _ in part.shape[1:])),
            )
        ]


def part(begin: int, end: int, *, shard: str, whole: torch.Tensor) -> PartView:
    view = PartView([whole[begin:end].clone()], {"from": begin}, shard=shard)
    view.begin, view.num_rows = begin, len(whole)
    return view


def test_only_shards_that_hold_a_part_are_read(daemon: Daemon) -> None:
    client, whole = daemon.client(), torch.arange(40 * 300_000, dtype=torch.int16).view(40, -1)
    for number in range(4):
        view = part(10 * number, 10 * number + 10, shard=str(number), whole=whole)
        Saver(client, num_shards=4).save(view, step=1, generation=0)
    with segments(daemon.folder)[0].open("r+b") as file:
        file.write(b"\xff\xff\xff")  # of shard 0, which nobody needs here

    view = part(15, 33, shard="1", whole=torch.zeros_like(whole))
    loaded = load(client, view, step=1, generation=0, shards=("0", "1", "2", "3"), num_shards=2)

    assert torch.equal(view.values[0], whole[15:33])
    assert loaded.num_bad == 0
    assert loaded.num_bytes == view.values[0].nbytes


def test_part_of_a_shard_that_changed_is_not_taken(daemon: Daemon) -> None:
    client, whole = daemon.client(), torch.ones(40, 300_000, dtype=torch.int16)
    Saver(client, num_shards=1).save(part(0, 40, shard="0", whole=whole), step=1, generation=0)
    with segments(daemon.folder)[0].open("r+b") as file:
        file.seek(23 * 600_000)
        file.write(b"\x09")

    def take(begin: int, end: int) -> PartView:
        view = part(begin, end, shard="0", whole=torch.zeros_like(whole))
        load(client, view, step=1, generation=0, shards=("0",), num_shards=4)
        return view

    assert torch.equal(take(0, 10).values[0], whole[0:10])
    with pytest.raises(LostError, match="1 copies were not intact"):
        take(20, 30)


class SlowView(PlainView):
    """A view whose rest cannot be read twice, and only by the thread that owns it."""

    def read_rest(self) -> dict[str, object]:
        assert threading.current_thread() is threading.main_thread()
        return super().read_rest()


def test_view_is_read_by_the_thread_that_owns_it(daemon: Daemon) -> None:
    view = SlowView([torch.ones(4)], {"a": 1})

    Saver(daemon.client(), num_shards=1).start(view, step=1, generation=0).wait()


@pytest.fixture
def client(daemon: Daemon) -> TieredClient:
    client = daemon.client()
    Saver(client, num_shards=1).save(large(3, mib=9), step=1, generation=0)
    return client


def break_at(count: int) -> tuple[list[int], client_module.Check]:
    """Return what raises when it is called for the nth time, and its calls."""
    calls: list[int] = []

    def check() -> None:
        calls.append(1)
        if len(calls) == count:
            raise BrokenError("a peer's fault")

    return calls, check


def test_check_ends_a_load_that_waits_and_the_client_goes_on(
    daemon: Daemon, client: TieredClient
) -> None:
    """The answer that comes late is not taken for that to the next request."""
    other = large(0, mib=9)
    calls, check = break_at(3)
    with stopped(daemon.pid), pytest.raises(BrokenError):
        load(client, other, step=1, generation=0, check=check)

    found = newest_whole(client)
    load(client, other, step=1, generation=0, check=lambda: None)

    assert len(calls) == 3
    assert found is not None
    assert other.content() == large(3, mib=9).content()


def test_check_ends_a_copy_within_it(client: TieredClient) -> None:
    other = large(0, mib=9)
    _, check = break_at(2)  # the second piece

    with pytest.raises(BrokenError):
        load(client, other, step=1, generation=0, check=check)

    assert other.values[0][0] == 3
    assert other.values[0][-1] == 0


def test_check_ends_a_wait_for_another_call(client: TieredClient) -> None:
    _, check = break_at(2)

    with client._lock, pytest.raises(BrokenError):
        client.steps(check=check)


def test_check_ends_a_wait_for_the_end_of_a_save() -> None:
    saving = Saving(1)
    calls, check = break_at(2)

    with pytest.raises(BrokenError):
        saving.wait_over(LIMIT_S, check=check)

    assert len(calls) == 2
    assert not saving.wait_over(0.0)


def test_close_ends_a_call_of_another_thread(
    daemon: Daemon, client: TieredClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy that waits for a daemon which does not answer holds no worker up at its end."""
    monkeypatch.setattr(client_module, "_CLOSE_TIMEOUT_S", 0.1)
    errors = []

    def begin() -> None:
        try:
            client.begin(step=2, generation=0, shard="0", num_shards=1, num_bytes=10)
        except LostError as error:
            errors.append(str(error))

    thread = threading.Thread(target=begin)
    with stopped(daemon.pid):
        thread.start()
        while not client._lock.locked():
            assert thread.is_alive()
        client.close()
        thread.join(LIMIT_S / 4)  # half of what the call itself would take
        is_ended = not thread.is_alive()
    thread.join(LIMIT_S)

    assert is_ended
    assert len(errors) == 1
