"""Files that a Lightning Trainer writes, and those that it begins with."""

# ruff: noqa: SLF001 - Lightning has no public way to continue a log

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.fabric.utilities.cloud_io import _is_local_file_protocol
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.loggers.csv_logs import ExperimentWriter

from resilience.frameworks.shared_texts import begin_texts
from resilience.inprocess.lasting import current_set_up

_PATH_BYTES = 256
"""Room for a path in a set-up, whose results are kept for all ranks."""


class WholeCheckpointIO(TorchCheckpointIO):  # type: ignore[misc]
    """Writes a checkpoint beside its place and renames it, so that a kill leaves no torn one."""

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None
    ) -> None:
        """Write a checkpoint."""
        is_local = _is_local_file_protocol(path)
        part = f"{path}.saving" if is_local else path
        super().save_checkpoint(checkpoint, part, storage_options)
        if is_local:
            Path(part).replace(path)


class _ContinuedWriter(ExperimentWriter):  # type: ignore[misc]
    """Adds to the file of a process that is gone, but for lines that this one has written."""

    def _check_log_dir_exists(self) -> None:
        """Read the file that is there, which a new log would remove."""
        path, self._found = Path(self.metrics_file_path), list[dict[str, str]]()
        if path.exists():
            with path.open(newline="") as file:
                self._found = list(csv.DictReader(file))
            self.metrics_keys = list(self._found[0]) if self._found else []

    def log_metrics(self, metrics_dict: dict[str, float], step: int | None = None) -> None:
        """Record values, if they are not in the file."""
        super().log_metrics(metrics_dict, step)
        row = {key: str(each) for key, each in self.metrics[-1].items()}
        if {**dict.fromkeys(self.metrics_keys, ""), **row} in self._found:
            self.metrics.pop()


def keep_resume(trainer: Any) -> None:
    """Have a process that takes a lost rank's place resume where that one did.

    It may find a newer checkpoint, and its set-up would differ.
    """
    connector = trainer._checkpoint_connector
    resume = connector.resume_start

    def resume_start(path: Any = None, **named: Any) -> None:
        resume(_keep(trainer, str(path or ""))[trainer.global_rank] or None, **named)

    vars(connector)["resume_start"] = resume_start


def keep_logs(trainer: Any) -> None:
    """Have a process that takes a lost rank's place log where that one did."""
    rank, set_up = trainer.global_rank, current_set_up()
    for logger in trainer.loggers:
        if isinstance(logger, (CSVLogger, TensorBoardLogger)) and logger._version is None:
            logger._version = int(_keep(trainer, str(logger.version if rank == 0 else 0))[0])
        if rank == 0 and set_up and set_up.is_replay and isinstance(logger, CSVLogger):
            logger._experiment = _ContinuedWriter(log_dir=logger.log_dir)


def _keep(trainer: Any, text: str) -> list[str]:
    """Return a text of each rank, in a process that joins those of the first set-up."""
    place = {"rank": trainer.global_rank, "num_ranks": trainer.world_size}
    return begin_texts(text, (), **place, width_min=_PATH_BYTES)()
