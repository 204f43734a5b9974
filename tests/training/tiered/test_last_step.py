"""What becomes of the last step of a run whose store would not get it by its cadence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from launcher.job.workload import TorchTrainer
from resilience.events import EventLog
from tests.resilience.state.nodes import PlainView
from tests.resilience.tiered.daemons import Daemon
from tests.resilience.tiered.kept import stored
from tests.training.groups import make_group
from tests.training.jobs import make_job
from tests.training.tiered.runs import tiered
from tests.training.tiered.test_tiers import NoProgress, go_on
from training.torch_trainer.tiers import TieredCheckpoints


def test_a_run_that_is_asked_to_stop_leaves_its_last_step_in_the_store(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    unset = dict.fromkeys(
        ("every_s", "keep", "endpoint", "region", "path_style", "part_size_mib", "attempts")
    )
    store = {**unset, "url": f"folder:{disk}", "every_n_steps": 100, "waiting_max": 1,
             "deadline_s": 60.0, "path_style": False}  # fmt: skip
    job = make_job(resilience={"tiered": tiered(every_n_steps=4, store=store)})
    assert isinstance(job.trainer, TorchTrainer)
    assert job.resilience.tiered is not None
    words = ("--store", f"folder:{disk}", "--store-every-n-steps", "100")
    state: Any = None
    with Daemon(folder=tmp_path / "arena", options=words).start() as daemon:
        saves = TieredCheckpoints(
            daemon.client(),
            job.resilience.tiered,
            job.trainer,
            EventLog(tmp_path / "events.jsonl", node="n0", rank=0, generation=0),
            lineage="ours",
            is_inline=True,
        )
        group = make_group(world_size=1)
        view = PlainView([torch.ones(9)], {"view": {}, "recovery": {}})
        saves.bind(view, NoProgress(), group, state=state, stall_s=60.0)
        saves.finish(7, generation=0, is_forced=True, group=group, pulse=go_on, check=go_on)

        assert daemon.end() == 0

    assert {each.parent.name for each in stored_anywhere(disk)} == {"000000000007-g0"}


def stored_anywhere(disk: Path) -> list[Path]:
    (space,) = disk.iterdir()
    return stored(disk, "steps", space.name)
