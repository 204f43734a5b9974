"""Leave nothing of a sweep that is refused: Hydra writes its config before it looks at a job."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

from hydra.experimental.callback import Callback
from omegaconf import DictConfig

from launcher.errors import RecipeError

_CONFIG_FILE = "multirun.yaml"


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


def _inwards_first(path: Path) -> tuple[Path, ...]:
    return (*path.glob("*"), path, *path.parents)
