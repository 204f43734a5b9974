"""Leave nothing of a sweep that is refused: Hydra writes its config before it looks at a job.

A sweep of very many jobs is refused before Hydra lists them, which would take all of the memory.
"""

from __future__ import annotations

import math
import os
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep, RangeSweep
from hydra.experimental.callback import Callback
from omegaconf import DictConfig

from launcher.errors import RecipeError

_CONFIG_FILE = "multirun.yaml"
_JOBS_MAX = 1000


class SweepFolder(Callback):
    """The folder of the sweep that Hydra has begun; conf/launcher.yaml has Hydra call it."""

    path: ClassVar[Path | None] = None
    was_there: ClassVar[set[Path]] = set()
    """Of what is in the folder, itself and the folders around it: what was there before."""

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Note the folder before it is made, and look at the file that Hydra writes there.

        Raises RecipeError and OSError, of which `composing_error` hears by Hydra's warning.
        """
        path = Path(config.hydra.sweep.dir).absolute()
        self._note(path)
        if not (num_jobs := _count_jobs(config.hydra)) <= _JOBS_MAX:
            raise RecipeError(f"the sweep has {num_jobs:g} jobs; allowed: at most {_JOBS_MAX}")
        file = path / _CONFIG_FILE
        if os.path.lexists(file):
            if file.is_symlink() or not file.is_file():
                raise RecipeError(f"{file} is no plain file, and a sweep writes to it; remove it")
            # Hydra would write into the file, which may have another name elsewhere.
            file.unlink()

    @classmethod
    def _note(cls, path: Path) -> None:
        cls.path = path
        cls.was_there = {each for each in _inwards_first(path) if os.path.lexists(each)}

    @classmethod
    def remove_new(cls) -> None:
        """Remove Hydra's file, the jobs' empty folders, their own, and those around."""
        for path in _inwards_first(cls.path) if cls.path else ():
            if path not in cls.was_there:
                # A folder that another sweep has filled meanwhile stays.
                with suppress(OSError):
                    path.unlink() if path.name == _CONFIG_FILE else path.rmdir()


def _count_jobs(hydra: DictConfig) -> float:
    """Return how many jobs a sweep has at most; options by a pattern count as one.

    It is not a number for a range whose step is 0, or whose end is not a number.
    """
    params = hydra.sweeper.get("params") or {}
    words = [*(f"{key}={value}" for key, value in params.items()), *hydra.overrides.task]
    overrides = OverridesParser.create().parse_overrides(words)
    values = {each.get_key_element(): each.value() for each in overrides}.values()
    lists = [len(each.list) for each in values if isinstance(each, ChoiceSweep)]
    ranges = [each for each in values if isinstance(each, RangeSweep)]
    lengths = [abs((r.stop or 0) - (r.start or 0)) / (abs(r.step) or math.nan) for r in ranges]
    return math.prod([*lists, *lengths])


def _inwards_first(path: Path) -> tuple[Path, ...]:
    return (*path.glob("*"), path, *path.parents)
