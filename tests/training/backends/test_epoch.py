from __future__ import annotations

import json
import shutil
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.distributed import HashStore

from launcher.job.lineage import lineage_digest
from resilience.errors import BrokenError
from resilience.events import EventLog, read_events
from resilience.state.view import NamedTensor, ViewWithRest
from tests.training.groups import make_group
from tests.training.jobs import make_job
from tests.training.subjects import NoProgress, make_subject
from training.backends.epoch import EpochCheckpoints, ends_epoch
from training.errors import CheckpointError

JOB = make_job()
OTHER_JOB = make_job(model={"rope_theta": 99.0})


class SmallState:
    """A StateView of two tensors."""

    replica = 0
    shard = ""

    def __init__(self, value: float) -> None:
        self.values = [torch.full((3, 2), value), torch.tensor(value), torch.empty(0)]
        self.rest = {"lr": value}

    def tensors(self):
        return [NamedTensor(name=f"tensor/{n}", tensor=each) for n, each in enumerate(self.values)]

    def read_rest(self):
        return self.rest

    def write_rest(self, rest):
        self.rest = dict(rest)


def open_checkpoints(folder, state, progress=None, *, job=JOB, group=None):
    """Return a worker's checkpoints, bound to its state."""
    events = EventLog(folder / "events.jsonl", node="n0", rank=0, generation=0)
    checkpoints = EpochCheckpoints(job, run_dir=folder, events=events)
    progress = progress or NoProgress()
    view = ViewWithRest(state, progress)
    checkpoints.bind(make_subject(view, progress, state=state, group=group))
    return checkpoints


@pytest.fixture
def write(tmp_path):
    def write_state(value: float, step: int) -> bool:
        return open_checkpoints(tmp_path, SmallState(value), NoProgress({"last": step})).write(step)

    return write_state


@pytest.mark.parametrize(
    ("num_samples", "steps"),
    [
        pytest.param(16, [2, 4, 6, 8], id="whole-steps"),
        pytest.param(20, [3, 5, 8], id="within-a-step"),
        pytest.param(8, list(range(1, 10)), id="each-step"),
        pytest.param(5, list(range(1, 10)), id="twice-a-step"),
        pytest.param(73, [], id="not-yet"),
    ],
)
def test_epoch_ends_with_the_step_that_takes_its_last_sample(num_samples, steps):
    found = [n for n in range(10) if ends_epoch(n, global_batch_size=8, num_samples=num_samples)]

    assert found == steps


def test_newest_state_comes_back_with_its_rest(tmp_path, write):
    write(1.5, step=2)
    write(2.5, step=10)
    state, progress = SmallState(0.0), NoProgress()

    begun = open_checkpoints(tmp_path, state, progress).load_newest()

    assert (begun.step, begun.source) == (10, "checkpoint")
    assert progress.rest == {"last": 10}
    assert [each.tolist() for each in state.values] == [[[2.5, 2.5]] * 3, 2.5, []]
    assert state.rest == {"lr": 2.5}
    assert [path.name for path in (tmp_path / "state").iterdir()] == ["step-00000010"]


def test_state_is_written_once(tmp_path, write):
    assert write(1.5, step=2)
    assert not write(1.5, step=2)


@pytest.mark.parametrize("job", [JOB, OTHER_JOB], ids=["no-manifest", "other-job"])
def test_state_of_another_job_or_without_its_manifest_counts_as_none(tmp_path, write, job):
    write(1.5, step=2)
    if job is JOB:
        (tmp_path / "state/step-00000002/manifest.json").unlink()

    checkpoints = open_checkpoints(tmp_path, SmallState(0.0), job=job)

    assert checkpoints.newest_step() is None
    assert checkpoints.load_newest() is None


def test_without_a_state_there_is_none(tmp_path):
    assert open_checkpoints(tmp_path, SmallState(0.0)).load_newest() is None


def test_changed_state_is_not_written(tmp_path):
    def changed() -> None:
        raise ValueError("changed")

    with pytest.raises(ValueError, match="changed"):
        open_checkpoints(tmp_path, SmallState(1.0), NoProgress(check=changed)).write(2)

    assert not (tmp_path / "state").exists()


def test_broken_shard_is_named(tmp_path, write):
    write(1.5, step=2)
    path = tmp_path / "state/step-00000002/shard-0.safetensors"
    path.write_bytes(path.read_bytes()[:50])

    with pytest.raises(CheckpointError, match=f"cannot read the state in {path}"):
        open_checkpoints(tmp_path, SmallState(0.0)).load_newest()


def test_manifest_says_which_generation_wrote(tmp_path, write):
    write(1.5, step=2)

    manifest = json.loads((tmp_path / "state/step-00000002/manifest.json").read_text())

    assert manifest == {"step": 2, "generation": 0, "key": lineage_digest(JOB)}


def write_on_both(folder, step, *, spoil=lambda rank: None):
    """Write as two workers who hold a shard each; returns what each of them got."""
    store = HashStore()

    def write_as(rank):
        state = SmallState(float(step))
        state.shard = str(rank)
        group = make_group(rank, store=store)
        checkpoints = open_checkpoints(folder, state, group=group)
        spoil(rank)
        try:
            return checkpoints.write(step)
        except CheckpointError as error:
            return str(error)

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(write_as, range(2)))


def take_name(path, *, rank):
    """Have one worker put a folder where it is about to write a file."""
    return lambda each: path.mkdir(parents=True) if each == rank else None


def test_shard_that_cannot_be_written_is_told_to_all_and_leaves_the_older_state(tmp_path):
    assert write_on_both(tmp_path, 2) == [True, True]

    path = tmp_path / "state/step-00000004/shard-1.safetensors"

    told = write_on_both(tmp_path, 4, spoil=take_name(path.with_suffix(".1.draft"), rank=1))

    assert told[0] == told[1]
    assert told[0].startswith(f"cannot write the state {path}: [Errno 21] Is a directory")
    assert [each.name for each in (tmp_path / "state").iterdir()] == ["step-00000002"]
    assert write_on_both(tmp_path, 6) == [True, True]


def test_manifest_that_cannot_be_written_leaves_the_older_state(tmp_path):
    assert write_on_both(tmp_path, 2) == [True, True]

    folder = tmp_path / "state/step-00000004"

    told = write_on_both(tmp_path, 4, spoil=take_name(folder / "manifest.0.draft", rank=0))

    assert told[0].startswith(f"cannot write the state {folder}")
    assert told[1] is True
    assert [each.name for each in (tmp_path / "state").iterdir()] == ["step-00000002"]


def test_state_that_cannot_be_written_is_told_and_the_run_goes_on(tmp_path, capsys):
    (tmp_path / "state").write_text("no folder")

    assert not open_checkpoints(tmp_path, SmallState(1.0)).save(2)

    (warning,) = read_events(tmp_path / "events.jsonl")
    assert (warning.event, warning.step) == ("warning", 2)
    assert warning.fields["text"].startswith("cannot write the state")
    assert "goes back to an older one" in capsys.readouterr().err


def test_removal_that_ends_midway_leaves_no_state_that_counts(tmp_path, write, monkeypatch):
    write(1.5, step=2)

    def die(path, **_):
        raise KeyboardInterrupt

    monkeypatch.setattr(shutil, "rmtree", die)
    with pytest.raises(KeyboardInterrupt):
        open_checkpoints(tmp_path, SmallState(0.0)).close()

    assert [each.name for each in (tmp_path / "state/step-00000002").iterdir()] == [
        "shard-0.safetensors"
    ]


def save_side(folder, name, value, ranks=(0, 1), step=4, check=lambda: None):
    """Write as workers of two shards that do not meet; returns what each of them got."""
    told = []
    for rank in ranks:
        state = SmallState(value)
        state.shard = str(rank)
        group = make_group(rank, num_shards=2)
        told.append(open_checkpoints(folder, state, group=group).save_part(step, name, check))
    return told


def test_sides_that_do_not_meet_write_states_of_their_own(tmp_path):
    """A side that goes on has written a state meanwhile, and each of the others its own."""
    assert write_on_both(tmp_path, 2) == [True, True]

    assert save_side(tmp_path, "0-a", 5.5, ranks=[0]) == [False]
    assert save_side(tmp_path, "0-b", 6.5, ranks=[1]) == [False]
    halves = {path.parent.name for path in (tmp_path / "state").glob("*/manifest.json")}
    assert save_side(tmp_path, "0-b", 6.5, ranks=[0]) == [True]

    assert halves == {"step-00000002"}
    state = SmallState(0.0)
    begun = open_checkpoints(tmp_path, state).load_newest()
    assert (begun.step, state.values[1].item()) == (4, 6.5)
    assert write_on_both(tmp_path, 6) == [True, True]
    assert [each.name for each in (tmp_path / "state").iterdir()] == ["step-00000006"]


def test_state_that_is_whole_is_not_written_by_a_side_once_more(tmp_path):
    assert write_on_both(tmp_path, 4) == [True, True]

    assert save_side(tmp_path, "0-a", 5.5, ranks=[0]) == [True]

    assert [each.name for each in (tmp_path / "state").iterdir()] == ["step-00000004"]


def test_side_that_is_wanted_elsewhere_leaves_no_state(tmp_path):
    def stop() -> None:
        raise BrokenError("the agent wants something else")

    with pytest.raises(BrokenError):
        save_side(tmp_path, "0-a", 5.5, check=stop)

    assert list((tmp_path / "state/step-00000004.0-a").iterdir()) == []


def test_side_that_cannot_write_says_so(tmp_path):
    (tmp_path / "state").write_text("no folder")

    with pytest.raises(CheckpointError, match="cannot write the state"):
        save_side(tmp_path, "0-a", 5.5)
