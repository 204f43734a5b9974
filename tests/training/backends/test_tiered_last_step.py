"""What becomes of the last step of a run whose store would not get it by its cadence."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from resilience.events import EventLog
from tests.resilience.state.nodes import PlainView
from tests.resilience.tiered.daemons import Daemon
from tests.resilience.tiered.kept import stored
from tests.scenarios.tiered.runs import tiered
from tests.training.backends.subjects import make_subject
from tests.training.jobs import make_job
from training.backends.tiered import TieredCheckpoints


@pytest.mark.parametrize(
    ("num_values", "is_required", "stored_steps", "is_unstored"),
    [
        pytest.param(9, True, {"000000000007-g0"}, False, id="saved"),
        # Its daemon would wait for it in vain.
        pytest.param(1 << 20, True, set(), True, id="no-room"),
        pytest.param(1 << 20, False, set(), False, id="no-room, not required"),
    ],
)
def test_a_run_that_is_asked_to_stop_leaves_its_last_step_in_the_store(
    tmp_path: Path, num_values: int, is_required: bool, stored_steps: set[str], is_unstored: bool
) -> None:
    disk = tmp_path / "disk"
    unset = dict.fromkeys(
        ("every_s", "keep", "endpoint", "region", "path_style", "part_size_mib", "attempts")
    )
    store = {**unset, "url": f"folder:{disk}", "every_n_steps": 100, "waiting_max": 1,
             "deadline_s": 60.0, "path_style": False, "required": is_required}  # fmt: skip
    job = make_job(resilience={"tiered": tiered(every_n_steps=4, store=store)})
    assert job.resilience.tiered is not None
    words = ("--store", f"folder:{disk}", "--store-every-n-steps", "100")
    with Daemon(folder=tmp_path / "arena", budget_mib=1, options=words).start() as daemon:
        saves = TieredCheckpoints(
            daemon.client(),
            job,
            job.resilience.tiered,
            EventLog(tmp_path / "events.jsonl", node="n0", rank=0, generation=0),
            run_dir=tmp_path,
        )
        view = PlainView([torch.ones(num_values)], {"view": {}, "recovery": {}})
        saves.bind(make_subject(view))
        saves.finish(7)

        assert saves.is_unstored == is_unstored
        assert daemon.end() == 0

    assert {each.parent.name for each in stored_anywhere(disk)} == stored_steps


def stored_anywhere(disk: Path) -> list[Path]:
    return [each for space in disk.iterdir() for each in stored(disk, "steps", space.name)]
