from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from resilience.data.datamodule import CachedDataModule
from resilience.data.errors import DataCacheError
from resilience.data.loader import CachedLoader
from resilience.data.sources import Source
from tests.resilience.data import user_modules
from tests.resilience.data.scene import make_settings

ROOT = Path(__file__).parents[3]
FRAMEWORKS_PYTHON = ROOT / ".venv-frameworks/bin/python"
LIGHTNING = """
class LightningDataModule:
    trainer = None

    def __init__(self):
        self.is_initialised = True
"""
IS_LIGHTNING = """
from lightning.pytorch import LightningDataModule
from resilience.data.datamodule import CachedDataModule
from resilience.data.sources import Source

source = Source("tests.resilience.data.user_modules:from_zero", {"folder": "/nowhere"})
module = CachedDataModule(source, None, identity={}, job="job")
assert isinstance(module, LightningDataModule) and module.is_initialised
"""
LIGHTNING_EPOCHS = """
import json, sys, torch
import lightning.pytorch as lightning
from resilience.data.datamodule import CachedDataModule
from resilience.data.sources import Source
from tests.resilience.data.scene import make_settings

class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer, self.seen = torch.nn.Linear(4, 1), []

    def training_step(self, batch, index):
        self.seen.append(int(batch["number"][0]))
        return self.layer(torch.as_tensor(batch["number"]).float()).sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.0)

arguments = json.loads(sys.argv[1])
source = Source("tests.resilience.data.user_modules:from_zero", arguments)
from pathlib import Path
settings = make_settings(Path(arguments["folder"], "cache"), val_prefetch_length=8)
data = CachedDataModule(source, settings, identity={}, job="job", has_validation=False)
model = Model()
trainer = lightning.Trainer(max_epochs=2, accelerator="cpu", devices=1, logger=False,
                            enable_checkpointing=False, enable_progress_bar=False,
                            enable_model_summary=False, default_root_dir=arguments["folder"])
trainer.fit(model, datamodule=data)
data.close(is_over=True)
print(json.dumps(model.seen))
"""


class Job:
    """A run that may be started again: its cache stays."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._open: list[CachedDataModule] = []
        self._settings = make_settings(
            folder / "cache", val_prefetch_length=8, val_lookback_length=0
        )

    def start(self, make: Any = user_modules.from_start, **options: Any) -> CachedDataModule:
        if not isinstance(make, Source):
            make = functools.partial(make, folder=str(self.folder))
        module = CachedDataModule(
            make,
            self._settings,
            **{"identity": {"data": "counted"}, "job": "job", "owner_pid": os.getpid(), **options},
        )
        self._open.append(module)
        return module

    def close(self) -> None:
        for module in self._open:
            module.close(is_over=True)


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    started = Job(tmp_path)
    yield started
    started.close()


def numbers(batches: Any, count: int | None = None) -> list[int]:
    return [int(batch["number"][0]) for batch in islice(iter(batches), count)]


def test_batches_of_the_users_module_come_in_order(job):
    module = job.start(user_modules.with_state)

    assert numbers(module.train_dataloader(), 20) == list(range(20))
    assert numbers(module.val_dataloader()) == [0, 1, 2]
    assert numbers(module.val_dataloader()) == [0, 1, 2]
    assert numbers(module.train_dataloader(), 5) == [20, 21, 22, 23, 24]


@pytest.mark.parametrize("make", [user_modules.from_start, user_modules.with_state])
def test_a_job_that_is_started_again_goes_on_from_its_checkpoint(job, make):
    first = job.start(make, samples_per_batch=4)
    numbers(first.train_dataloader(), 10)
    state = first.state_dict()
    numbers(first.train_dataloader(), 3)
    first.teardown("fit")

    second = job.start(make, samples_per_batch=4)
    second.load_state_dict(state)

    assert state["samples_consumed"] == 40
    assert numbers(second.train_dataloader(), 3) == [10, 11, 12]


@pytest.mark.parametrize("make", ["from_zero", "from_start", "with_state"])
def test_a_further_epoch_has_all_batches_again(job, make):
    """Also one that begins where a checkpoint is resumed: at the end, and behind it."""
    source = Source(f"tests.resilience.data.user_modules:{make}",
                    {"folder": str(job.folder), "num_batches": 8})  # fmt: skip
    module = job.start(source, samples_per_batch=4)
    epochs = [numbers(module.train_dataloader()) for _ in range(3)]

    assert epochs == [list(range(8))] * 3
    assert module.state_dict() == {"samples_consumed": 3 * 8 * 4}
    module.teardown("fit")
    for batch in (8, 12, 23):
        again = job.start(source, samples_per_batch=4)
        again.load_state_dict({"samples_consumed": batch * 4})
        assert numbers(again.train_dataloader()) == list(range(batch % 8, 8))
        assert again.state_dict() == {"samples_consumed": (batch // 8 + 1) * 8 * 4}


def test_a_position_behind_the_end_that_cannot_be_placed_is_an_error(job):
    module = job.start(functools.partial(user_modules.from_start, num_batches=8))
    module.load_state_dict({"samples_consumed": 12})

    with pytest.raises(DataCacheError, match="position 12 is behind the stage's end"):
        numbers(module.train_dataloader())


def test_a_stage_without_batches_is_an_error(job):
    module = job.start(functools.partial(user_modules.from_zero, num_batches=0))

    with pytest.raises(DataCacheError, match="the stage has no batches"):
        numbers(module.train_dataloader())


@pytest.mark.slow
def test_lightnings_own_trainer_trains_on_every_batch_of_two_epochs(tmp_path):
    if not FRAMEWORKS_PYTHON.exists():
        pytest.skip("no Lightning; scripts/install-frameworks.sh installs it")
    source = {"folder": str(tmp_path), "num_batches": 32}

    done = subprocess.run(
        [str(FRAMEWORKS_PYTHON), "-c", LIGHTNING_EPOCHS, json.dumps(source)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip

    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == [*range(32), *range(32)]


def test_a_resume_far_away_reads_nothing_in_between(job):
    module = job.start(samples_per_batch=2)
    module.load_state_dict({"samples_consumed": 400})

    assert numbers(module.train_dataloader(), 2) == [200, 201]
    assert (job.folder / "starts").read_text() == "train 200\n"


def test_what_a_trainer_has_read_ahead_is_not_trained(job):
    """As Lightning does, which reads a batch before it has trained on the one before."""
    progress = SimpleNamespace(total=SimpleNamespace(processed=7))
    loop = SimpleNamespace(epoch_loop=SimpleNamespace(batch_progress=progress))
    module = job.start(samples_per_batch=4)
    module.trainer = SimpleNamespace(fit_loop=loop)
    batches = module.train_dataloader()
    assert numbers(batches, 5) == [0, 1, 2, 3, 4]

    progress.total.processed += 3

    assert module.state_dict() == {"samples_consumed": 12}
    assert numbers(batches, 2) == [3, 4]
    assert not hasattr(batches, "state_dict")


def test_the_batches_of_the_last_complete_checkpoint_are_asked_to_be_kept(job, monkeypatch):
    """Also of the one that it begins with, or goes back to."""
    noted: list[int] = []
    monkeypatch.setattr(CachedLoader, "note_checkpoint", lambda _, number: noted.append(number))
    module = job.start(samples_per_batch=4)
    module.load_state_dict({"samples_consumed": 40})

    batches = module.train_dataloader()
    for _ in range(3):
        numbers(batches, 5)
        module.state_dict()
    # Back to an older one: what was handed out since counts no more.
    module.load_state_dict({"samples_consumed": 20})
    module.state_dict()

    assert noted == [10, 15, 20, 5]


def test_data_is_prepared_by_the_users_module(job):
    for make in (user_modules.from_zero, user_modules.from_start):
        module = job.start(make, has_validation=False)
        module.prepare_data()

        (job.folder / "prepared").unlink()
        assert module.val_dataloader() == []


def test_a_module_of_many_loaders_is_refused(job):
    module = job.start(user_modules.many_loaders)

    with pytest.raises(TypeError, match=r"train_dataloader\(\) has returned a list; want one load"):
        numbers(module.train_dataloader())


def test_where_lightning_is_installed_it_is_a_module_of_it(tmp_path):
    (tmp_path / "lightning").mkdir()
    (tmp_path / "lightning" / "__init__.py").touch()
    (tmp_path / "lightning" / "pytorch.py").write_text(LIGHTNING)

    subprocess.run(
        [sys.executable, "-c", IS_LIGHTNING],
        env={**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"},
        check=True,
        timeout=60,
    )
